"""Bamba and Granite: in each layer a Mamba2 mixer or attention, and an MLP or experts."""

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
    Routing,
    WeightSource,
    read_decoder_shape,
    rotating_whole_heads,
    whole_number,
)
from enginery_model_mamba.mixers import MixerKeys, layer_kinds, memory_of, read_mixer, stated, with_memory

if TYPE_CHECKING:
    from enginery.nn.decoder import DecoderLayer

KEYS: Final = MixerKeys()
# What transformers' BambaConfig and GraniteMoeHybridConfig have in common, for files that leave it out
COMMON: Final[dict[str, Any]] = {
    "num_attention_heads": 32,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
BAMBA: Final = COMMON | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
GRANITE: Final = COMMON | {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "attention_multiplier": 1.0,
}
BAMBA_NAMES: Final = {"model.norm": "model.final_layernorm"}
EXPERTS: Final = ExpertNames(block="block_sparse_moe")
SHARED_NAMES: Final = {"down_proj": "output_linear"}
STACKED: Final = {
    ".block_sparse_moe.input_linear.weight": (
        ".block_sparse_moe.experts.{}.gate_proj.weight",
        ".block_sparse_moe.experts.{}.up_proj.weight",
    ),
    ".block_sparse_moe.output_linear.weight": (".block_sparse_moe.experts.{}.down_proj.weight",),
    ".block_sparse_moe.router.weight": (".block_sparse_moe.router.layer.weight",),
}
MIXER, ATTENTION = "mamba", "attention"
KINDS: Final = {"mamba": MIXER, "linear_attention": MIXER, "attention": ATTENTION, "full_attention": ATTENTION}


def _is_granite(config: Mapping[str, Any]) -> bool:
    return "GraniteMoeHybridForCausalLM" in config["architectures"]


def _complete(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**(GRANITE if _is_granite(config) else BAMBA), **stated(config)}


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """The decoder around the mixers: Bamba rotates half of each head's dims, Granite all of them or none."""
    whole = _complete(config)
    bias, mlp_bias = bool(whole.get("attention_bias", False)), bool(whole.get("mlp_bias", False))
    if not _is_granite(config):
        plain = read_decoder_shape(whole | {"partial_rotary_factor": 0.5}, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
        return dataclasses.replace(plain, norms=NormNames(mlp="pre_ff_layernorm"))
    if not rotates(config):
        # the factor that YaRN has for attention would stay
        whole |= {"rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": None}
    plain = rotating_whole_heads(read_decoder_shape(whole, qkv_bias=bias, out_bias=bias, experts=_experts(whole)))
    return dataclasses.replace(
        plain, embedding_scale=whole.get("embedding_multiplier"), attention_scale=float(whole["attention_multiplier"])
    )


def _experts(config: Mapping[str, Any]) -> MixtureShape | None:
    """Every layer has them, beside an MLP that every token has, or of size 0; with none of them that MLP is all."""
    if not config["num_local_experts"]:
        whole_number(config, "shared_intermediate_size")
        return None
    return MixtureShape(
        layers=frozenset(range(whole_number(config, "num_hidden_layers"))),
        num_experts=whole_number(config, "num_local_experts"),
        inner_size=whole_number(config, "intermediate_size"),
        routing=Routing(top_k=whole_number(config, "num_experts_per_tok"), renormalise=True, scale=_residual_factor(config)),
        names=EXPERTS,
    )


def _residual_factor(config: Mapping[str, Any]) -> float:
    """What Granite multiplies a block's output by before it is added; taken into its last product, or the experts' weights."""
    return float(config.get("residual_multiplier", 1.0)) if _is_granite(config) else 1.0


def rotates(config: Mapping[str, Any]) -> bool:
    """Whether attention has positions: of Granite, where `position_embedding_type` says so."""
    kind = config.get("position_embedding_type")
    if kind not in (None, "rope", "nope"):
        raise CheckpointError(f"config.json has position_embedding_type {kind!r}; served are 'rope' and 'nope'")
    return not _is_granite(config) or kind == "rope"


def _kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """By `layer_types`, which transformers 4 calls `layers_block_type`, or `attn_layer_indices`."""
    for key in ("layer_types", "layers_block_type"):
        if config.get(key) is not None:
            return layer_kinds(config, key, KINDS)
    attends = config.get("attn_layer_indices") or ()
    return tuple(ATTENTION if index in attends else MIXER for index in range(whole_number(config, "num_hidden_layers")))


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    mixer, facts = read_mixer(_complete(config), KEYS), shape(config).facts()
    rotates(config)
    memory = memory_of(mixer.facts)
    return with_memory(
        facts, [[memory if kind == MIXER else layer] for kind, layer in zip(_kinds(config), facts.layers, strict=True)]
    )


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery.nn.decoder import AttentionBlock, DecoderLayer, layer_attention
    from enginery_model_mamba.blocks import HybridDecoder, Mamba2Mixer
    from enginery_model_mamba.factors import Multiplied
    from enginery_model_mamba.feed_forwards import plain_mlp, shared_mlp

    config = _complete(context.config)
    mixer, granite = read_mixer(config, KEYS), _is_granite(config)
    factors = dict.fromkeys(("o_proj", "out_proj", "output_linear"), _residual_factor(config))

    def layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
        weights = Multiplied(weights, factors)
        block: AttentionBlock
        if context.stage.spec(index, scale=1.0).facts.recurrent is not None:
            block = Mamba2Mixer(context, weights.scope("mamba"), spec=context.stage.spec(index, scale=1.0), shape=mixer)
        else:
            block = layer_attention(context, weights, shape=shape, index=index)
        if not granite:
            return DecoderLayer(context, weights, shape=shape, attention=block, mlp=plain_mlp(context, weights, shape=shape))
        size = whole_number(config, "shared_intermediate_size", 0)
        mlp = shared_mlp(context, weights, shape=shape, shared_size=size, names=SHARED_NAMES)
        return DecoderLayer(context, weights, shape=shape, attention=block, mlp=mlp)

    scale = 1.0 / float(config.get("logits_scaling", 1.0)) if granite else 1.0
    names = {} if granite else BAMBA_NAMES
    return HybridDecoder(
        context, shape(context.config), layer=layer, names=names, logit_scale=scale, rotates=rotates(context.config)
    )
