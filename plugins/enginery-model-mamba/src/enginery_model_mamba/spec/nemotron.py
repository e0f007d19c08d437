"""Nemotron-H: each layer is one block, a Mamba2 mixer, attention without positions, an MLP or experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from enginery.api import (
    CheckpointError,
    DecoderShape,
    Model,
    ModelContext,
    ModelFacts,
    Routing,
    WeightSource,
    check_served,
    read_decoder_shape,
    required,
    whole_number,
)
from enginery_model_mamba.mixers import MixerKeys, layer_kinds, memory_of, read_mixer, stated, with_memory

if TYPE_CHECKING:
    import torch

    from enginery.nn.decoder import AttentionBlock
    from enginery_model_mamba.blocks import OneBlockLayer

KEYS: Final = MixerKeys(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    groups="n_groups",
    state="ssm_state_size",
    conv="conv_kernel",
    expand=None,
    bias="use_bias",
    out_bias="use_bias",
    conv_bias="use_conv_bias",
    eps="layer_norm_epsilon",
)
# transformers' NemotronHConfig, for files that leave them out
DEFAULTS: Final[dict[str, Any]] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 21504,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
NAMES: Final = {"model.embed_tokens": "embeddings", "model.layers": "layers", "model.norm": "norm_f"}  # below the stem
# How transformers 5 has a layer's experts in memory
STACKED: Final[dict[str, tuple[str, ...]]] = {
    f".mixer.experts.{name}": (f".mixer.experts.{{}}.{name}.weight",) for name in ("up_proj", "down_proj")
}
MIXER, ATTENTION, MLP, EXPERTS = "mamba", "attention", "mlp", "moe"
KINDS: Final = {
    "mamba": MIXER,
    "linear_attention": MIXER,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
FEED_FORWARDS: Final = (MLP, EXPERTS)
LETTERS: Final = {"M": MIXER, "*": ATTENTION, "-": MLP, "E": EXPERTS}
ROPE_KEYS: Final = ("rope_parameters", "rope_scaling", "partial_rotary_factor", "hidden_act")  # nothing is rotated


def _complete(config: Mapping[str, Any]) -> dict[str, Any]:
    own = stated(config, *ROPE_KEYS)
    if "attention_head_dim" in own:  # as files of the hub have it
        own.setdefault("head_dim", own["attention_head_dim"])
    whole = {**DEFAULTS, **own}
    check_served(whole, "mlp_hidden_act", ("relu2",))
    check_served(whole, "mamba_hidden_act", ("silu", "swish"))
    if whole.get("sliding_window") is not None:
        raise CheckpointError("config.json has a sliding_window, which is not served for this architecture")
    if whole.get("moe_latent_size") is not None and whole.get("mlp_bias"):
        raise CheckpointError("config.json has moe_latent_size and mlp_bias, which are not served together")
    return whole


def kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Each layer's block: by `layers_block_type`, or by the letters of `hybrid_override_pattern`, as files of the hub have it."""
    for key in ("layers_block_type", "layer_types"):
        if config.get(key) is not None:
            return layer_kinds({key: config[key]}, key, KINDS)
    pattern = list(required(config, "hybrid_override_pattern"))
    return layer_kinds({"hybrid_override_pattern": pattern}, "hybrid_override_pattern", LETTERS)


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """The decoder around the blocks."""
    whole = _complete(config)
    bias = bool(whole.get("attention_bias", False))
    whole |= {"rms_norm_eps": whole["layer_norm_epsilon"], "num_hidden_layers": len(kinds(config))}
    return read_decoder_shape(whole, qkv_bias=bias, out_bias=bias, mlp_bias=bool(whole.get("mlp_bias", False)))


def routing(config: Mapping[str, Any]) -> Routing:
    """DeepSeek-V3's router."""
    whole = _complete(config)
    return Routing(
        top_k=whole_number(whole, "num_experts_per_tok"),
        scoring="sigmoid",
        num_groups=whole_number(whole, "n_group"),
        top_groups=whole_number(whole, "topk_group"),
        group_score="top2",
        renormalise=bool(whole["norm_topk_prob"]),
        scale=float(whole["routed_scaling_factor"]),
    )


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with. Layers without a mixer and without attention have no memory."""
    if set(kinds(config)) <= set(FEED_FORWARDS):
        raise CheckpointError("config.json has MLPs and experts alone in layers_block_type (or hybrid_override_pattern)")
    memory, facts = memory_of(read_mixer(_complete(config), KEYS).facts), shape(config).facts()
    places = {MIXER: [memory], ATTENTION: [facts.layers[0]]}
    return with_memory(facts, [places.get(kind, []) for kind in kinds(config)])


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery.nn.norm import take_norm
    from enginery_model_mamba.blocks import HybridDecoder, OneBlockLayer

    config, each = _complete(context.config), kinds(context.config)

    def layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> OneBlockLayer:
        norm, own = take_norm(weights, "norm", shape.hidden_size), weights.scope("mixer")
        behind_mlp, eps = index > 0 and each[index - 1] in FEED_FORWARDS, shape.rms_eps
        if each[index] in FEED_FORWARDS:
            mlp = _feed_forward(context, own, shape=shape, config=config, kind=each[index])
            return OneBlockLayer(context, norm, eps=eps, mlp=mlp, behind_mlp=behind_mlp)
        block = _block(context, own, shape=shape, config=config, index=index, kind=each[index])
        return OneBlockLayer(context, norm, eps=eps, block=block, behind_mlp=behind_mlp)

    stem = "model" if context.weights.has("model.embeddings.weight") else "backbone"  # in memory of transformers 5, or on the hub
    names = {name: f"{stem}.{own}" for name, own in NAMES.items()}
    return HybridDecoder(context, shape(context.config), layer=layer, names=names, rotates=False)


def _block(
    context: ModelContext, weights: WeightSource, *, shape: DecoderShape, config: Mapping[str, Any], index: int, kind: str
) -> AttentionBlock:
    from enginery.nn.attention import SelfAttention
    from enginery_model_mamba.blocks import Mamba2Mixer

    if kind == MIXER:
        return Mamba2Mixer(context, weights, spec=context.stage.spec(index, scale=1.0), shape=read_mixer(config, KEYS))
    spec, bias = context.stage.spec(index, scale=shape.head_dim**-0.5), shape.qkv_bias
    return SelfAttention(context, weights, spec=spec, qkv_bias=bias, out_bias=bias, qk_norm_eps=None)


def _feed_forward(
    context: ModelContext, weights: WeightSource, *, shape: DecoderShape, config: Mapping[str, Any], kind: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    from enginery_model_mamba.squared import SquaredExperts, SquaredMLP

    if kind == MLP:
        return SquaredMLP(context, weights, inner=shape.intermediate_size, bias=shape.mlp_bias)
    experts = SquaredExperts(
        context,
        weights,
        count=whole_number(config, "n_routed_experts"),
        inner=whole_number(config, "moe_intermediate_size"),
        latent=config.get("moe_latent_size"),
        routing=routing(config),
    )
    shared = SquaredMLP(
        context,
        weights.scope("shared_experts"),
        inner=whole_number(config, "moe_shared_expert_intermediate_size"),
        bias=shape.mlp_bias,
    )
    return lambda x: experts(x).add_(shared(x))
