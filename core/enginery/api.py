"""What a plugin's `__init__` imports: the hook marker, the descriptors and the errors. Imports no torch.

A name imported as itself is exported. The core itself imports from where things are defined, never from here.
"""

from enginery.checkpoint.decoder_shape import (
    DecoderShape as DecoderShape,
    MixtureShape as MixtureShape,
    NormNames as NormNames,
    RopeShape as RopeShape,
    latent_softmax_scale as latent_softmax_scale,
    read_decoder_shape as read_decoder_shape,
    read_grouped_experts as read_grouped_experts,
    read_latents as read_latents,
    read_rope as read_rope,
    read_windows as read_windows,
    required as required,
    whole_number as whole_number,
)
from enginery.checkpoint.next_tokens import (
    next_layers as next_layers,
    next_token_drafter as next_token_drafter,
    num_next_layers as num_next_layers,
)
from enginery.contracts.attention import (
    AttnBackend as AttnBackend,
    AttnBackendSpec as AttnBackendSpec,
    AttnLayerFacts as AttnLayerFacts,
    AttnNeeds as AttnNeeds,
    BackendContext as BackendContext,
    Capabilities as Capabilities,
    CoordinatorContext as CoordinatorContext,
    GlobalLayerId as GlobalLayerId,
    KernelStore as KernelStore,
    KVGeometry as KVGeometry,
    LatentFacts as LatentFacts,
    LatentWeights as LatentWeights,
    LayerSpec as LayerSpec,
    LocalLayerId as LocalLayerId,
    Reason as Reason,
    SparseCoordinator as SparseCoordinator,
    SparseCoordinatorSpec as SparseCoordinatorSpec,
)
from enginery.contracts.batch import (
    FULL as FULL,
    STATE as STATE,
    Axis as Axis,
    Fill as Fill,
    ForwardBatch as ForwardBatch,
    MemoryKind as MemoryKind,
    Named as Named,
    NamedTensor as NamedTensor,
    Phase as Phase,
    Split as Split,
    StateView as StateView,
    View as View,
)
from enginery.contracts.drafting import (
    CARRIED as CARRIED,
    FEATURES as FEATURES,
    Chained as Chained,
    DraftAsk as DraftAsk,
    DraftContext as DraftContext,
    DrafterSpec as DrafterSpec,
    DraftModelOptions as DraftModelOptions,
    DraftTree as DraftTree,
    HostDrafter as HostDrafter,
    MappedVocabulary as MappedVocabulary,
)
from enginery.contracts.engine import (
    EngineFacts as EngineFacts,
    EngineHandle as EngineHandle,
    EngineStats as EngineStats,
)
from enginery.contracts.grammars import (
    CompiledGrammar as CompiledGrammar,
    Grammar as Grammar,
    GrammarCompiler as GrammarCompiler,
    GrammarKind as GrammarKind,
    GrammarNeeds as GrammarNeeds,
    GrammarSpec as GrammarSpec,
    GrammarState as GrammarState,
    GrammarTokens as GrammarTokens,
    RevocableGrammarState as RevocableGrammarState,
    UnfinishedGrammar as UnfinishedGrammar,
)
from enginery.contracts.latent import (
    ChunkPlan as ChunkPlan,
    Denied as Denied,
    KVPiece as KVPiece,
    PrefillStrategy as PrefillStrategy,
    RaggedAttendFn as RaggedAttendFn,
)
from enginery.contracts.memory import (
    KVPool as KVPool,
    LayerKV as LayerKV,
    RecurrentFacts as RecurrentFacts,
    RecurrentWeights as RecurrentWeights,
    State as State,
    StatePool as StatePool,
    WorkspaceArena as WorkspaceArena,
)
from enginery.contracts.model import (
    AdvanceFn as AdvanceFn,
    AttendFn as AttendFn,
    CheckpointSpec as CheckpointSpec,
    DraftTarget as DraftTarget,
    Feature as Feature,
    Model as Model,
    ModelContext as ModelContext,
    ModelFacts as ModelFacts,
    ModelSpec as ModelSpec,
    StageLayers as StageLayers,
    Tapped as Tapped,
    WeightSource as WeightSource,
)
from enginery.contracts.ops import (
    LEAST_TEMPERATURE as LEAST_TEMPERATURE,
    BindExpertsFn as BindExpertsFn,
    EarlySums as EarlySums,
    ExpertBiases as ExpertBiases,
    ExpertsFn as ExpertsFn,
    HostCalls as HostCalls,
    LinearFn as LinearFn,
    NormGate as NormGate,
    NormingLinear as NormingLinear,
    OpNeeds as OpNeeds,
    OpSpec as OpSpec,
    OpTable as OpTable,
    PeerMemory as PeerMemory,
    PeerOps as PeerOps,
    PeerOpsSpec as PeerOpsSpec,
    RecordCalls as RecordCalls,
    Routed as Routed,
    Routing as Routing,
    SamplingTensors as SamplingTensors,
    only_torch as only_torch,
)
from enginery.contracts.parallel import (
    Channel as Channel,
    Collectives as Collectives,
    Cut as Cut,
    Death as Death,
    ExecutorSpec as ExecutorSpec,
    Joining as Joining,
    LaunchPlan as LaunchPlan,
    ParallelFacts as ParallelFacts,
    RunningRanks as RunningRanks,
    StageTensors as StageTensors,
)
from enginery.contracts.parsers import (
    ArgumentsText as ArgumentsText,
    ContentText as ContentText,
    ForceFn as ForceFn,
    OutputParser as OutputParser,
    ParserEvent as ParserEvent,
    ParserFacts as ParserFacts,
    ParserSetup as ParserSetup,
    ParserSpec as ParserSpec,
    ReasoningText as ReasoningText,
    Tool as Tool,
    ToolCallBegun as ToolCallBegun,
    ToolCallEnded as ToolCallEnded,
)
from enginery.contracts.plan import (
    Accepted as Accepted,
    Advances as Advances,
    Attends as Attends,
    ForwardPlan as ForwardPlan,
    IndexerPart as IndexerPart,
    IndexerPlan as IndexerPlan,
    MaskPart as MaskPart,
    PlanKey as PlanKey,
    VerifyMask as VerifyMask,
    covering_plan as covering_plan,
)
from enginery.contracts.request import (
    FinishReason as FinishReason,
    GenerationRequest as GenerationRequest,
    RequestOutput as RequestOutput,
    SamplingParams as SamplingParams,
    TokenLogprob as TokenLogprob,
)
from enginery.contracts.schedule import (
    PageCounts as PageCounts,
    QueuedFacts as QueuedFacts,
    SchedulePolicySpec as SchedulePolicySpec,
    StepReport as StepReport,
)
from enginery.contracts.versions import (
    CONTRACT_VERSIONS as CONTRACT_VERSIONS,
    ApiVersion as ApiVersion,
    HookGroup as HookGroup,
)
from enginery.contracts.weights import (
    SILU as SILU,
    Activation as Activation,
    ExpertNames as ExpertNames,
    Experts as Experts,
    ExpertsShape as ExpertsShape,
    FormatNeeds as FormatNeeds,
    Linear as Linear,
    LinearShape as LinearShape,
    RowOrder as RowOrder,
    Scheme as Scheme,
    StoredPart as StoredPart,
    StoredWeight as StoredWeight,
    WeightFormat as WeightFormat,
    WeightFormatSpec as WeightFormatSpec,
)
from enginery.errors import (
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    EngineDied as EngineDied,
    EnginError as EnginError,
    OutOfMemory as OutOfMemory,
    Overloaded as Overloaded,
    PluginError as PluginError,
    QueueFull as QueueFull,
    RequestError as RequestError,
    StalePlan as StalePlan,
    Unsupported as Unsupported,
)
from enginery.plugin.hookspecs import hookimpl as hookimpl
