"""What config.json says, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from enginery.api import (
    Activation,
    CheckpointError,
    DecoderShape,
    Model,
    ModelContext,
    ModelFacts,
    NormNames,
    check_served,
    read_decoder_shape,
    read_rope,
    read_windows,
    rotating_whole_heads,
    whole_number,
)

NORMS: Final = NormNames(
    attention="input_layernorm",
    attention_out="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
GELU: Final = {"gelu_pytorch_tanh": Activation(kind="gelu_tanh")}  # Gemma 1's files say "gelu" and mean the same
WINDOW, EVERYTHING = "sliding_attention", "full_attention"

# For files that leave them out: the defaults of transformers' GemmaConfig, Gemma2Config and Gemma3TextConfig.
FIRST: Final[dict[str, Any]] = {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
COMMON: Final[dict[str, Any]] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
SECOND: Final = COMMON | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2}
THIRD: Final = COMMON | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
BESIDE_IMAGES: Final[dict[str, Any]] = {  # whose files on the hub leave these out too
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """Gemma's shape: norms with 1 + w and a scaled embedding; but for the first, more norms, and windows between other layers.

    Where Gemma 3 is beside a model for images, `text_config` has it, and its weights have longer names.
    """
    architectures, stem = config["architectures"], "model"
    is_first, is_third = "GemmaForCausalLM" in architectures, "Gemma2ForCausalLM" not in architectures
    if "text_config" in config:
        outer = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}  # the head is that of both
        config, stem = {**BESIDE_IMAGES, **config["text_config"], **outer}, "language_model.model"
    if config.get("use_bidirectional_attention"):
        raise CheckpointError("config.json has use_bidirectional_attention; attention is served in one direction, as for text")
    bias = bool(config.get("attention_bias", False))
    if is_first:
        config = {**FIRST, **config}
        first = read_decoder_shape(config, qkv_bias=bias, out_bias=bias, activations=GELU | {"gelu": GELU["gelu_pytorch_tanh"]})
        rotating_whole_heads(first)
        return dataclasses.replace(first, norm_offset=1.0, embedding_scale=first.hidden_size**0.5)
    config = {**(THIRD if is_third else SECOND), **config}
    local = {**config, "rope_theta": config["rope_local_base_freq"], "rope_scaling": None} if is_third else None
    if local is not None and (ropes := config.get("rope_parameters")):  # as transformers 5 writes it
        if not {EVERYTHING, WINDOW} & set(ropes):
            raise CheckpointError(f"config.json has rope_parameters {ropes!r}; it needs those of {EVERYTHING!r} and of {WINDOW!r}")
        local["rope_parameters"] = ropes.get(WINDOW)
        config["rope_parameters"] = ropes.get(EVERYTHING)
    check_served(config, "hidden_activation", GELU)
    if is_third and config.get("attn_logit_softcapping") is not None:  # transformers has the key here, and caps nothing
        stated = config["attn_logit_softcapping"]
        raise CheckpointError(f"config.json has attn_logit_softcapping {stated!r}; Gemma 3 is served without such a cap only")
    plain = read_decoder_shape(
        {**config, "hidden_act": config["hidden_activation"]},
        _windows(config),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=is_third,
        activations=GELU,
    )
    rotating_whole_heads(plain)
    return dataclasses.replace(
        plain,
        norms=NORMS,
        norm_offset=1.0,
        embedding_scale=plain.hidden_size**0.5,
        attention_scale=whole_number(config, "query_pre_attn_scalar") ** -0.5,
        softcap=_cap(config, "attn_logit_softcapping"),
        logit_cap=_cap(config, "final_logit_softcapping"),
        stem=stem,
        window_rope=None if local is None else read_rope(local, plain.head_dim),
    )


def _cap(config: Mapping[str, Any], key: str) -> float | None:
    """Null for none."""
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise CheckpointError(f"config.json has {key} {value!r}, which must be a number above 0, or null; the file is damaged")
    return value


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Files without `layer_types` have every `sliding_window_pattern`-th layer see everything."""
    every = whole_number(config, "sliding_window_pattern")
    return read_windows(config, lambda index: (index + 1) % every != 0)


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_gemma.model import build_decoder

    return build_decoder(context)
