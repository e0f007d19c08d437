"""What config.json says, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginery.api import DecoderShape, Model, ModelContext, ModelFacts, read_decoder_shape

QWEN3_HEAD_DIM = 128  # transformers' Qwen3Config, for files that leave it out


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """Qwen2's or Qwen3's shape with its windows."""
    windows = _windows(config)
    if "Qwen2ForCausalLM" in config["architectures"]:
        return read_decoder_shape(config, windows, qkv_bias=True)
    bias = bool(config.get("attention_bias", False))
    return read_decoder_shape({"head_dim": QWEN3_HEAD_DIM, **config}, windows, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on have the window, if it is switched on; `layer_types` overrides that."""
    num_layers = int(config["num_hidden_layers"])
    window = int(config.get("sliding_window") or 4096) if config.get("use_sliding_window", False) else None
    first = int(config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or [
        "sliding_attention" if index >= first else "full_attention" for index in range(num_layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_qwen.model import build_decoder

    return build_decoder(context)
