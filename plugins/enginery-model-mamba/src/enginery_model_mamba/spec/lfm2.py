"""LFM2: short convolutions with gates, and attention with norms of heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from enginery.api import (
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
    rotating_whole_heads,
    whole_number,
)
from enginery_model_mamba.mixers import layer_kinds, memory_of, stated, with_memory

if TYPE_CHECKING:
    from enginery.nn.decoder import DecoderLayer

# transformers' Lfm2Config, for files that leave them out
DEFAULTS: Final[dict[str, Any]] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "max_position_embeddings": 128000,
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_auto_adjust_ff_dim": True,
}
# and its Lfm2MoeConfig
MOE: Final[dict[str, Any]] = {
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
NAMES: Final = {"model.norm": "model.embedding_norm"}
MLP_NAMES: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
ATTENTION_NAMES: Final = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
EXPERTS: Final = ExpertNames(block="feed_forward", correction="expert_bias", gate="w1", up="w3", down="w2")
CONV, ATTENTION = "conv", "full_attention"


def _has_experts(config: Mapping[str, Any]) -> bool:
    return "Lfm2MoeForCausalLM" in config["architectures"]


def _complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """With defaults, and without the older spellings. Sizes of the MLP are as they are computed from, beside experts as stated."""
    whole = {**DEFAULTS, **(MOE if _has_experts(config) else {}), **stated(config)}
    whole["tie_word_embeddings"] = whole.get("tie_embedding", whole["tie_word_embeddings"])
    whole["intermediate_size"] = whole.get("block_ff_dim", whole["intermediate_size"])
    whole["rms_norm_eps"] = whole["norm_eps"]
    if whole.get("layer_types") is None:
        count = whole_number(whole, "num_hidden_layers")
        attends = whole["full_attn_idxs"] if whole.get("full_attn_idxs") is not None else range(count)
        whole["layer_types"] = [ATTENTION if index in attends else CONV for index in range(count)]
    if whole["block_auto_adjust_ff_dim"] and not _has_experts(config):
        inner = 2 * whole_number(whole, "intermediate_size") // 3
        if (factor := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
            multiple = whole_number(whole, "block_multiple_of")
            inner = -(-int(factor * inner) // multiple) * multiple
        whole["intermediate_size"] = inner
    return whole


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """The decoder around the convolutions."""
    whole = _complete(config)
    plain = read_decoder_shape(whole, qk_norm=True, experts=_experts(whole) if _has_experts(config) else None)
    return dataclasses.replace(rotating_whole_heads(plain), norms=NormNames(attention="operator_norm", mlp="ffn_norm"))


def _experts(whole: Mapping[str, Any]) -> MixtureShape:
    """In all but the first layers."""
    routing = Routing(
        top_k=whole_number(whole, "num_experts_per_tok"),
        scoring="sigmoid",
        renormalise=bool(whole["norm_topk_prob"]),
        scale=float(whole["routed_scaling_factor"]),
    )
    return MixtureShape(
        layers=frozenset(range(whole_number(whole, "num_dense_layers", 0), whole_number(whole, "num_hidden_layers"))),
        num_experts=whole_number(whole, "num_experts"),
        inner_size=whole_number(whole, "moe_intermediate_size"),
        routing=routing,
        correction_bias=bool(whole["use_expert_bias"]),
        names=EXPERTS,
    )


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    whole, facts = _complete(config), shape(config).facts()
    hidden = facts.hidden_size
    rule = RecurrentFacts(
        rule="conv",
        decay="constant",
        key_heads=1,
        value_heads=hidden,
        key_dim=1,
        value_dim=1,
        conv_kernel=whole_number(whole, "conv_L_cache"),
        conv_silu=False,
    )
    kinds = layer_kinds(whole, "layer_types", {CONV: CONV, ATTENTION: ATTENTION})
    return with_memory(
        facts, [[memory_of(rule) if kind == CONV else layer] for kind, layer in zip(kinds, facts.layers, strict=True)]
    )


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery.nn.attention import SelfAttention
    from enginery.nn.decoder import AttentionBlock, DecoderLayer, GatedMLP
    from enginery_model_mamba.blocks import HybridDecoder, Renamed
    from enginery_model_mamba.convolutions import ShortConvolution
    from enginery_model_mamba.feed_forwards import routed_experts

    bias = bool(context.config.get("conv_bias", False))

    def layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
        spec = context.stage.spec(index, scale=shape.head_dim**-0.5)
        block: AttentionBlock
        if spec.facts.recurrent is not None:
            block = ShortConvolution(context, weights.scope("conv"), spec=spec, bias=bias)
        else:
            names = Renamed(weights.scope("self_attn"), ATTENTION_NAMES)
            block = SelfAttention(context, names, spec=spec, qkv_bias=False, out_bias=False, qk_norm_eps=shape.rms_eps)
        if shape.experts is not None and index in shape.experts.layers:
            mlp = routed_experts(context, weights, experts=shape.experts, router=EXPERTS.router)
        else:
            names = Renamed(weights.scope("feed_forward"), MLP_NAMES)
            mlp = GatedMLP(context, names, intermediate_size=shape.intermediate_size, bias=False)
        return DecoderLayer(context, weights, shape=shape, attention=block, mlp=mlp)

    return HybridDecoder(context, shape(context.config), layer=layer, names=NAMES)
