"""A plugin of the tests: a small decoder of gated linear and MLA layers, three softmax backends that differ in one
hook, and one for both kinds of layers.

T tokens, C hidden size, H heads, D, V: head and value dims of the linear layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from enginery.api import (
    FULL,
    STATE,
    AttnBackend,
    AttnBackendSpec,
    AttnLayerFacts,
    BackendContext,
    ChunkPlan,
    Cut,
    DecoderShape,
    ForwardBatch,
    ForwardPlan,
    KVPiece,
    LatentFacts,
    LayerSpec,
    LinearShape,
    Model,
    ModelContext,
    ModelFacts,
    ModelSpec,
    Phase,
    PlanKey,
    RecurrentFacts,
    RecurrentWeights,
    WeightSource,
    covering_plan,
    hookimpl,
    read_decoder_shape,
)
from enginery.nn.decoder import AttentionBlock, Decoder, DecoderLayer, GatedMLP
from enginery.nn.latent_attention import LatentSelfAttention
from enginery_attn_linear.backend import LinearAttention
from enginery_attn_linear.spec import LINEAR
from enginery_attn_torch.backend import TorchAttention
from enginery_attn_torch.spec import TORCH

GATE_SLOWNESS = 16.0


def layer_facts(config: Mapping[str, Any], index: int) -> AttnLayerFacts:
    heads = config["num_attention_heads"]
    if index not in config["latent_layers"]:
        dim = config["linear_head_dim"]
        recurrent = RecurrentFacts(
            rule="linear",
            decay="head",
            key_heads=heads,
            value_heads=heads,
            key_dim=dim,
            value_dim=config["linear_value_dim"],
        )
        return AttnLayerFacts(num_heads=heads, num_kv_heads=heads, head_dim=dim, recurrent=recurrent, decoder_layer=index)
    latent = LatentFacts(
        rank=config["kv_lora_rank"],
        rope_dim=config["qk_rope_head_dim"],
        nope_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
    )
    head_dim = latent.rank + latent.rope_dim
    return AttnLayerFacts(num_heads=heads, num_kv_heads=1, head_dim=head_dim, latent=latent, decoder_layer=index)


def decoder_shape(config: Mapping[str, Any]) -> DecoderShape:
    return read_decoder_shape({**config, "head_dim": config["qk_rope_head_dim"]})


def describe(config: Mapping[str, Any]) -> ModelFacts:
    layers = tuple(layer_facts(config, index) for index in range(config["num_hidden_layers"]))
    return dataclasses.replace(decoder_shape(config).facts(), layers=layers)


def build(context: ModelContext) -> Model:
    return Decoder(context, decoder_shape(context.config), layer=decoder_layer)


def decoder_layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    facts = context.facts.layers[index]
    key_dim = facts.head_dim if facts.latent is None else facts.latent.nope_dim + facts.latent.rope_dim
    spec = context.stage.spec(index, scale=key_dim**-0.5)
    attention: AttentionBlock
    if facts.recurrent is not None:
        attention = GatedLinearAttention(context, weights.scope("self_attn"), spec=spec, norm_eps=shape.rms_eps)
    else:
        attention = LatentSelfAttention(
            context, weights.scope("self_attn"), spec=spec, q_rank=None, bias=False, norm_eps=shape.rms_eps
        )
    mlp = GatedMLP(context, weights.scope("mlp"), intermediate_size=shape.intermediate_size, bias=False)
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp)


class GatedLinearAttention:
    """The socket of a recurrent layer: projections, a decay for each head, norm of each head's output, output projection.

    The decay is logsigmoid(gate) / 16, which is -softplus(-gate) / 16: `advance` is given -gate and a_log = -log(16).
    """

    def __init__(self, context: ModelContext, weights: WeightSource, *, spec: LayerSpec, norm_eps: float) -> None:
        hidden, heads = context.facts.hidden_size, context.facts.layers[spec.global_id].num_heads
        dim, value_dim = spec.facts.head_dim, spec.facts.value_dim
        slope = torch.full((spec.facts.num_heads,), -math.log(GATE_SLOWNESS), device=context.device)
        self.spec, self.norm_eps = dataclasses.replace(spec, recurrent=RecurrentWeights(a_log=slope)), norm_eps
        names, units = ("q_proj", "k_proj", "v_proj", "gate_proj"), (dim, dim, value_dim, 1)
        rows = tuple(heads * unit for unit in units)
        self.qkvg = weights.linear(LinearShape(names=names, rows=rows, columns=hidden, cut=Cut.ROWS, unit=units))
        self.norm = weights.take("o_norm.weight", (value_dim,))
        out = LinearShape(
            names=("o_proj",), rows=(hidden,), columns=heads * value_dim, cut=Cut.COLUMNS, unit=value_dim, complete=False
        )
        self.out = weights.linear(out)
        self.rms_norm = context.ops.rms_norm
        self.advance = context.advance

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C]. Returns [T, C]."""
        num_tokens, heads = x.shape[0], self.spec.facts.num_heads
        *qkv, gate = self.qkvg.rows
        mixed, gates = self.qkvg(x).split((sum(qkv), gate), dim=-1)  # [T, C], [T, H]
        out = torch.empty(num_tokens, heads, self.spec.facts.value_dim, dtype=x.dtype, device=x.device)  # [T, H, V]
        self.advance(mixed, -gates, self.spec, batch, out)
        normed = self.rms_norm(out.view(-1, out.shape[-1]), self.norm, self.norm_eps)
        return self.out(normed.view(num_tokens, -1))


class WithoutHook:
    """The torch backend without its `init_mha_chunk_metadata`. Remembers the phases of what it was given."""

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = context.instance
        self.inner = TorchAttention(context)
        self.planned: list[Phase] = []
        self.attended: list[Phase] = []

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        self.planned.append(batch.phase)
        return self.inner.plan_forward_metadata(batch, capture)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        plan: ForwardPlan,
        out: torch.Tensor,
    ) -> None:
        self.attended.append(batch.phase)
        self.inner.attend(q, k, v, layer, batch, plan, out)


class BatchOnly(WithoutHook):
    """Its hook takes the batch alone and plans each piece when it sees it."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.asked: list[ForwardBatch] = []
        self.ragged: list[int] = []

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch) -> ChunkPlan:
        self.asked.append(batch)
        return ChunkPlan(key=PlanKey.of(batch, self.backend_id), attend=partial(self.attend_piece, batch))

    def attend_piece(
        self,
        batch: ForwardBatch,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        piece: KVPiece,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        self.ragged.append(piece.index)
        first = dataclasses.replace(piece, index=0)
        plan = self.inner.init_mha_chunk_metadata(batch, (first,), True)
        plan.attend(q, k, v, layer, first, out, lse)


class BatchAndFlag(BatchOnly):
    """Its hook is also told whether the pieces hold the step's own tokens."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.flags: list[bool] = []

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch, disable_ragged: bool) -> ChunkPlan:
        self.flags.append(disable_ragged)
        self.asked.append(batch)
        return ChunkPlan(key=PlanKey.of(batch, self.backend_id), attend=partial(self.attend_piece, batch))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BothPlan(ForwardPlan):
    """Of the views that the batch has. None: it has not got that one."""

    softmax: ForwardPlan | None
    recurrent: ForwardPlan | None


class Both:
    """Softmax attention and recurrences under one name."""

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = context.instance
        self.softmax, self.recurrent = TorchAttention(context), LinearAttention(context)

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> BothPlan:
        return BothPlan(
            key=PlanKey.of(batch, self.backend_id, capture=capture),
            softmax=self.softmax.plan_forward_metadata(batch, capture) if FULL in batch.views else None,
            recurrent=self.recurrent.plan_forward_metadata(batch, capture) if STATE in batch.views else None,
        )

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch, chunks: tuple[KVPiece, ...], disable_ragged: bool) -> ChunkPlan:
        return self.softmax.init_mha_chunk_metadata(batch, chunks, disable_ragged)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        plan: ForwardPlan,
        out: torch.Tensor,
    ) -> None:
        planned = covering_plan(plan, batch, BothPlan, backend=self.backend_id).softmax
        assert planned is not None
        self.softmax.attend(q, k, v, layer, batch, planned, out)

    def advance(
        self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: torch.Tensor
    ) -> None:
        planned = covering_plan(plan, batch, BothPlan, backend=self.backend_id).recurrent
        assert planned is not None
        self.recurrent.advance(mixed, gates, layer, batch, planned, out)


CAN = dataclasses.replace(TORCH.capabilities, trees=False)
BOTH = dataclasses.replace(
    TORCH,
    name="both",
    priority=1,
    capabilities=dataclasses.replace(
        CAN, recurrences=LINEAR.capabilities.recurrences, phases=TORCH.capabilities.phases - {Phase.VERIFY}
    ),
)
LEAVES = {"both": Both, "batch-only": BatchOnly, "batch-and-flag": BatchAndFlag, "without-hook": WithoutHook}


@hookimpl
def register_models() -> list[ModelSpec]:
    return [ModelSpec(name="hybrid", api=(2, 0), architectures=("HybridForCausalLM",), describe=describe, build=build)]


@hookimpl
def register_attn_backends() -> list[AttnBackendSpec]:
    """All claim what the torch backend claims, but for trees; `auto` takes that one."""
    return [BOTH if name == BOTH.name else dataclasses.replace(TORCH, name=name, priority=1, capabilities=CAN) for name in LEAVES]


@hookimpl
def create_attn_backend(name: str, context: BackendContext) -> AttnBackend | None:
    return LEAVES[name](context) if name in LEAVES else None
