"""What config.json says, without torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from enginery.api import (
    CheckpointError,
    DecoderShape,
    ExpertNames,
    MixtureShape,
    Model,
    ModelContext,
    ModelFacts,
    Routing,
    read_decoder_shape,
    read_windows,
    rotating_whole_heads,
    whole_number,
)

MISTRAL: Final = {"sliding_window": 4096}  # for files that leave it out: the defaults of transformers' MistralConfig
MIXTRAL: Final = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}  # and MixtralConfig
PHI3: Final = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}  # and Phi3Config
SMOLLM3: Final = {"rope_theta": 2e6, "tie_word_embeddings": True}  # and SmolLM3Config
MIXTRAL_NAMES: Final = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """As the first of the architectures has it that is known here; Llama's for other plugins' models that have it.

    But for Phi 3, transformers rotates whole heads whatever `partial_rotary_factor` says.
    """
    name = next((name for name in config["architectures"] if name in READERS), "LlamaForCausalLM")
    found = READERS[name](config)
    return found if name == "Phi3ForCausalLM" else rotating_whole_heads(found)


def _llama(config: Mapping[str, Any], windows: tuple[int | None, ...] | None = None) -> DecoderShape:
    bias, mlp_bias = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    return read_decoder_shape(config, windows, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: Mapping[str, Any]) -> DecoderShape:
    """With a window, and no biases, as transformers has none whatever `attention_bias` and `mlp_bias` say.

    Of files with `layer_types` (Ministral-8B), some layers have it; transformers calls those Ministral and saves them so.
    """
    config = {**MISTRAL, **config}
    alternates = config.get("layer_types") is not None
    return read_decoder_shape(config, read_windows(config, lambda _: True) if alternates else _windows(config))


def _mixtral(config: Mapping[str, Any]) -> DecoderShape:
    """With experts in every layer."""
    config = {**MIXTRAL, **config}
    return read_decoder_shape(config, _windows(config), experts=_experts(config))


def _phi3(config: Mapping[str, Any]) -> DecoderShape:
    """With queries, keys and values in one piece, as gate and up are; LongRoPE under the names that it had before, too.

    Newer files state a window that no context fills, which is none.
    """
    config, key = {**PHI3, **config}, "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if {rope.get("type"), rope.get("rope_type")} & {"su", "yarn"}:
        config[key] = {**rope, "rope_type": "longrope"}
    is_filled = (config.get("sliding_window") or math.inf) < whole_number(config, "max_position_embeddings")
    return dataclasses.replace(read_decoder_shape(config, _windows(config) if is_filled else None), packed_mlp=True)


def _smollm3(config: Mapping[str, Any]) -> DecoderShape:
    """With layers without positions (see `unrotated`), which may have a window."""
    config = {**SMOLLM3, **config}
    has_windows = config.get("use_sliding_window") and config.get("sliding_window")
    return _llama(config, read_windows(config, unrotated(config).__contains__) if has_windows else None)


def _granite(config: Mapping[str, Any]) -> DecoderShape:
    """With factors of embeddings and of scores; for others see `multipliers`."""
    scale = float(config.get("attention_multiplier", 1.0))
    return dataclasses.replace(_llama(config), embedding_scale=config.get("embedding_multiplier"), attention_scale=scale)


READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], DecoderShape]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MinistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "SmolLM3ForCausalLM": _smollm3,
    "GraniteForCausalLM": _granite,
}


def unrotated(config: Mapping[str, Any]) -> frozenset[int]:
    """Layers whose attention has no positions: `no_rope_layers` has 0 for them; in files without it, every fourth (SmolLM3)."""
    count = whole_number(config, "num_hidden_layers")
    every = whole_number(config, "no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [int((index + 1) % every != 0) for index in range(count)]
    if len(rotated) != count or set(rotated) - {0, 1}:
        raise CheckpointError(f"config.json has no_rope_layers {rotated!r}; it needs 0 or 1 for each of {count} layers")
    return frozenset(index for index, rotates in enumerate(rotated) if not rotates)


def multipliers(config: Mapping[str, Any]) -> tuple[float, float]:
    """Of what attention and MLP return before it is added, and of logits (Granite)."""
    return float(config.get("residual_multiplier", 1.0)), 1.0 / float(config.get("logits_scaling", 1.0))


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    """The same on every layer."""
    window = config.get("sliding_window")
    return (whole_number(config, "sliding_window"),) * whole_number(config, "num_hidden_layers") if window else None


def _experts(config: Mapping[str, Any]) -> MixtureShape:
    return MixtureShape(
        layers=frozenset(range(whole_number(config, "num_hidden_layers"))),
        num_experts=whole_number(config, "num_local_experts"),
        inner_size=whole_number(config, "intermediate_size"),
        routing=Routing(top_k=whole_number(config, "num_experts_per_tok"), renormalise=True),
        names=MIXTRAL_NAMES,
    )


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_llama.model import build_decoder

    return build_decoder(context)
