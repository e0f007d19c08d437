"""What config.json says, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginery.api import DecoderShape, Model, ModelContext, ModelFacts, read_decoder_shape


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """Llama's shape; Mistral's is the same with a window, whose default is the one of transformers' MistralConfig."""
    is_mistral = "MistralForCausalLM" in config["architectures"]
    window = config.get("sliding_window", 4096) if is_mistral else None
    bias = bool(config.get("attention_bias", False)) and not is_mistral
    return read_decoder_shape(
        config,
        (window,) * int(config["num_hidden_layers"]) if window else None,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_llama.model import build_decoder

    return build_decoder(context)
