"""What a plugin's `__init__` imports: the hook marker, the descriptors and the errors. Imports no torch.

The core itself imports from where things are defined, never from here.
"""

from enginery.config.decoder_shape import DecoderShape, RopeShape, read_decoder_shape
from enginery.contracts.attention import (
    AttnBackend,
    AttnBackendSpec,
    AttnLayerFacts,
    AttnNeeds,
    BackendContext,
    Capabilities,
    GlobalLayerId,
    KVGeometry,
    LayerSpec,
    LocalLayerId,
    ParallelFacts,
    Reason,
)
from enginery.contracts.batch import Axis, ForwardBatch, Phase
from enginery.contracts.memory import KVPool, LayerKV, WorkspaceArena
from enginery.contracts.model import AttendFn, Model, ModelContext, ModelFacts, ModelSpec, WeightSource, WriteKVFn
from enginery.contracts.offers import (
    CheckpointSpec,
    DrafterSpec,
    ExecutorSpec,
    GrammarSpec,
    SchedulePolicySpec,
    SparseCoordinatorSpec,
    WeightFormatSpec,
)
from enginery.contracts.ops import LinearFn, OpNeeds, OpSpec, OpTable
from enginery.contracts.plan import ForwardPlan, PlanKey, covering_plan
from enginery.contracts.request import FinishReason, GenerationRequest, RequestOutput, SamplingParams, TokenLogprob
from enginery.contracts.schedule import QueuedFacts, StepReport
from enginery.contracts.versions import CONTRACT_VERSIONS, ApiVersion, HookGroup
from enginery.errors import (
    CheckpointError,
    ConfigError,
    EngineDied,
    EnginError,
    OutOfMemory,
    PluginError,
    QueueFull,
    RequestError,
    StalePlan,
    Unsupported,
)
from enginery.plugin.hookspecs import hookimpl

__all__ = [
    "CONTRACT_VERSIONS",
    "ApiVersion",
    "AttendFn",
    "AttnBackend",
    "AttnBackendSpec",
    "AttnLayerFacts",
    "AttnNeeds",
    "Axis",
    "BackendContext",
    "Capabilities",
    "CheckpointError",
    "CheckpointSpec",
    "ConfigError",
    "DecoderShape",
    "DrafterSpec",
    "EnginError",
    "EngineDied",
    "ExecutorSpec",
    "FinishReason",
    "ForwardBatch",
    "ForwardPlan",
    "GenerationRequest",
    "GlobalLayerId",
    "GrammarSpec",
    "HookGroup",
    "KVGeometry",
    "KVPool",
    "LayerKV",
    "LayerSpec",
    "LinearFn",
    "LocalLayerId",
    "Model",
    "ModelContext",
    "ModelFacts",
    "ModelSpec",
    "OpNeeds",
    "OpSpec",
    "OpTable",
    "OutOfMemory",
    "ParallelFacts",
    "Phase",
    "PlanKey",
    "PluginError",
    "QueueFull",
    "QueuedFacts",
    "Reason",
    "RequestError",
    "RequestOutput",
    "RopeShape",
    "SamplingParams",
    "SchedulePolicySpec",
    "SparseCoordinatorSpec",
    "StalePlan",
    "StepReport",
    "TokenLogprob",
    "Unsupported",
    "WeightFormatSpec",
    "WeightSource",
    "WorkspaceArena",
    "WriteKVFn",
    "covering_plan",
    "hookimpl",
    "read_decoder_shape",
]
