"""Jamba: in each layer a Mamba mixer or attention without positions, and an MLP or experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from enginery.api import (
    CheckpointError,
    DecoderShape,
    ExpertNames,
    MixtureShape,
    Model,
    ModelContext,
    ModelFacts,
    NormNames,
    RecurrentFacts,
    Routing,
    WeightSource,
    read_decoder_shape,
    whole_number,
)
from enginery_model_mamba.mixers import memory_of, stated, with_memory

if TYPE_CHECKING:
    from enginery.nn.decoder import DecoderLayer

# transformers' JambaConfig, for files that leave them out
DEFAULTS: Final[dict[str, Any]] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
NAMES: Final = {"model.norm": "model.final_layernorm"}
EXPERTS: Final = ExpertNames(block="feed_forward")
ROPE_KEYS: Final = ("rope_parameters", "rope_scaling", "partial_rotary_factor")  # nothing is rotated


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanShape:
    """A Mamba mixer (arXiv:2312.00752) with norms of dt, B and C. step_rank: what dt is projected from."""

    conv: RecurrentFacts
    scan: RecurrentFacts
    step_rank: int
    bias: bool
    conv_bias: bool
    eps: float


def _complete(config: Mapping[str, Any]) -> dict[str, Any]:
    own = stated(config, *ROPE_KEYS)
    if "num_experts" not in own and "num_local_experts" in own:
        own["num_experts"] = own["num_local_experts"]
    return {**DEFAULTS, **own}


def _layers(config: Mapping[str, Any], what: str) -> frozenset[int]:
    """Each so many layers from one on: those that have attention, or experts."""
    count, period = whole_number(config, "num_hidden_layers"), whole_number(config, f"{what}_layer_period")
    offset = config[f"{what}_layer_offset"]
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise CheckpointError(f"config.json has {what}_layer_offset {offset!r}, which must be a whole number below {period}")
    return frozenset(range(offset, count, period))


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """The decoder around the mixers."""
    whole = _complete(config)
    experts = None
    if (count := whole_number(whole, "num_experts")) > 1 and (layers := _layers(whole, "expert")):
        experts = MixtureShape(
            layers=layers,
            num_experts=count,
            inner_size=whole_number(whole, "intermediate_size"),
            routing=Routing(top_k=whole_number(whole, "num_experts_per_tok")),
            names=EXPERTS,
        )
    plain = read_decoder_shape(whole, experts=experts)
    return dataclasses.replace(plain, norms=NormNames(mlp="pre_ff_layernorm"))


def read_scan(config: Mapping[str, Any]) -> ScanShape:
    """Read its mixer."""
    whole = _complete(config)
    hidden, state = whole_number(whole, "hidden_size"), whole_number(whole, "mamba_d_state")
    inner, rank = whole_number(whole, "mamba_expand") * hidden, whole["mamba_dt_rank"]
    one = RecurrentFacts(
        rule="conv",
        decay="constant",
        key_heads=1,
        value_heads=inner,
        key_dim=1,
        value_dim=1,
        conv_kernel=whole_number(whole, "mamba_d_conv"),
    )
    return ScanShape(
        conv=one,
        scan=dataclasses.replace(one, rule="scan", decay="channel", key_dim=state, conv_kernel=0),
        step_rank=-(-hidden // 16) if rank == "auto" else whole_number(whole, "mamba_dt_rank"),
        bias=bool(whole["mamba_proj_bias"]),
        conv_bias=bool(whole["mamba_conv_bias"]),
        eps=float(whole["rms_norm_eps"]),
    )


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with: a mixer's convolution and scan are two layers with memory."""
    whole, scan, facts = _complete(config), read_scan(config), shape(config).facts()
    attends, mixer = _layers(whole, "attn"), [memory_of(scan.conv), memory_of(scan.scan)]
    return with_memory(facts, [[layer] if index in attends else mixer for index, layer in enumerate(facts.layers)])


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery.nn.decoder import AttentionBlock, DecoderLayer, layer_attention
    from enginery_model_mamba.blocks import HybridDecoder
    from enginery_model_mamba.feed_forwards import plain_mlp, routed_experts
    from enginery_model_mamba.scans import MambaMixer

    mixer, attends = read_scan(context.config), _layers(_complete(context.config), "attn")

    def layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
        block: AttentionBlock
        if index in attends:
            block = layer_attention(context, weights, shape=shape, index=index)
        else:
            block = MambaMixer(context, weights.scope("mamba"), specs=context.stage.specs(index, scale=1.0), shape=mixer)
        if shape.experts is not None and index in shape.experts.layers:
            mlp = routed_experts(context, weights, experts=shape.experts, router="router")
        else:
            mlp = plain_mlp(context, weights, shape=shape)
        return DecoderLayer(context, weights, shape=shape, attention=block, mlp=mlp)

    return HybridDecoder(context, shape(context.config), layer=layer, names=NAMES, rotates=False)
