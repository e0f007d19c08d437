"""Falcon-H1: in each layer a Mamba2 mixer and attention side by side, and factors at every product."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from enginery.api import (
    CheckpointError,
    DecoderShape,
    Model,
    ModelContext,
    ModelFacts,
    NormNames,
    WeightSource,
    read_decoder_shape,
    rotating_whole_heads,
)
from enginery_model_mamba.mixers import MixerKeys, MixerShape, memory_of, read_mixer, stated, with_memory

if TYPE_CHECKING:
    from enginery.nn.decoder import DecoderLayer

KEYS: Final = MixerKeys(inner="mamba_d_ssm", out_bias="projectors_bias")
# transformers' FalconH1Config, for files that leave them out
DEFAULTS: Final[dict[str, Any]] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_rms_norm": False,
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
NAMES: Final = {"model.norm": "model.final_layernorm"}


def _complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """With defaults. `mamba_d_ssm` that is null means `mamba_expand`, one that is left out 1024."""
    whole = {**DEFAULTS, "mamba_d_ssm": None if "mamba_d_ssm" in config else 1024, **stated(config)}
    for key, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        numbers = whole[key] if isinstance(whole[key], list | tuple) else ()
        if len(numbers) != count or not all(isinstance(number, int | float) for number in numbers):
            raise CheckpointError(f"config.json has {key} {whole[key]!r}, which must be {count} numbers; the file is damaged")
    return whole


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """The decoder around the mixers. The keys' factor is in the scale of q . k."""
    whole = _complete(config)
    bias = bool(whole.get("attention_bias", False))
    plain = read_decoder_shape(whole, qkv_bias=bias, out_bias=bias, mlp_bias=bool(whole.get("mlp_bias", False)))
    rotating_whole_heads(plain)
    return dataclasses.replace(
        plain,
        norms=NormNames(mlp="pre_ff_layernorm"),
        embedding_scale=float(whole["embedding_multiplier"]),
        attention_scale=plain.head_dim**-0.5 * float(whole["key_multiplier"]),
    )


def read_falcon_mixer(config: Mapping[str, Any]) -> MixerShape:
    """Its mixer, with the factors of what `in_proj` gives.

    `mamba_norm_before_gate` that is null means false, as in transformers.
    """
    whole = _complete(config)
    return dataclasses.replace(
        read_mixer(whole, KEYS),
        has_norm=bool(whole["mamba_rms_norm"]),
        gate_first=not config.get("mamba_norm_before_gate", True),
        multipliers=tuple(map(float, whole["ssm_multipliers"])),
    )


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with: each layer keeps states, and keys and values."""
    memory, facts = memory_of(read_falcon_mixer(config).facts), shape(config).facts()
    return with_memory(facts, [[memory, layer] for layer in facts.layers])


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery.nn.attention import SelfAttention
    from enginery.nn.decoder import DecoderLayer
    from enginery_model_mamba.blocks import HybridDecoder, Mamba2Mixer
    from enginery_model_mamba.factors import Multiplied
    from enginery_model_mamba.feed_forwards import SideBySide, plain_mlp

    config, mixer_shape = _complete(context.config), read_falcon_mixer(context.config)
    gate_factor, down_factor = config["mlp_multipliers"]
    factors = {
        "out_proj": float(config["ssm_out_multiplier"]),
        "o_proj": float(config["attention_out_multiplier"]),
        "gate_proj": float(gate_factor),
        "down_proj": float(down_factor),
    }
    inputs = {"in_proj": float(config["ssm_in_multiplier"]), "q_proj": float(config["attention_in_multiplier"])}

    def layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
        scale, multiplied = shape.attention_scale, Multiplied(weights, factors, inputs=inputs)
        assert scale is not None, "it is stated"
        first, second = context.stage.specs(index, scale=scale)
        first = dataclasses.replace(first, scale=1.0)
        mixer = Mamba2Mixer(context, multiplied.scope("mamba"), spec=first, shape=mixer_shape)
        attention = SelfAttention(
            context,
            multiplied.scope("self_attn"),
            spec=second,
            qkv_bias=shape.qkv_bias,
            out_bias=shape.out_bias,
            qk_norm_eps=None,
        )
        mlp = plain_mlp(context, multiplied, shape=shape)
        return DecoderLayer(context, weights, shape=shape, attention=SideBySide(mixer, attention), mlp=mlp)

    scale = float(config["lm_head_multiplier"])
    return HybridDecoder(context, shape(context.config), layer=layer, names=NAMES, logit_scale=scale)
