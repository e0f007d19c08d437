"""What config.json says, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from enginery.api import (
    Activation,
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

NAMES: Final = ExpertNames(gate="gate_up_proj", up="gate_up_proj", router="router")

# Files have the experts of a layer in one tensor: plain ones as `gate_up_proj`, those in MXFP4 as `_blocks` and `_scales`.
STACKED: Final[Mapping[str, tuple[str, ...]]] = {
    f".experts.{name}{end}": (f".experts.{{}}.{name}{ours}",)
    for name in (NAMES.gate, NAMES.down)
    for end, ours in (("", ".weight"), ("_bias", ".bias"), ("_blocks", "_blocks"), ("_scales", "_scales"))
}

# For files that leave them out: the defaults of transformers' GptOssConfig.
DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": 64,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """Sinks in every layer, biases everywhere, and experts whose router takes the softmax of those that it chose."""
    stated = {key: value for key, value in config.items() if value is not None}
    config = {**DEFAULTS, **stated}
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_parameters"] = YARN
    bias, count = bool(config["attention_bias"]), whole_number(config, "num_hidden_layers")
    experts = MixtureShape(
        layers=frozenset(range(count)),
        num_experts=whole_number(config, "num_local_experts"),
        inner_size=whole_number(config, "intermediate_size"),
        routing=Routing(top_k=whole_number(config, "num_experts_per_tok"), renormalise=True),
        router_bias=True,
        expert_bias=True,
        order="interleaved",
        turned=True,
        activation=_activation(config),
        names=NAMES,
    )
    windows = read_windows(config, lambda index: index % 2 == 0)  # in every other layer, the first one with it
    plain = rotating_whole_heads(read_decoder_shape(config, windows, qkv_bias=bias, out_bias=bias, experts=experts))
    return dataclasses.replace(plain, sinks=frozenset(range(count)))


def _activation(config: Mapping[str, Any]) -> Activation:
    alpha, limit = config["swiglu_alpha"], config["swiglu_limit"]
    for key, value in (("swiglu_alpha", alpha), ("swiglu_limit", limit)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"config.json has {key} {value!r}, which must be a number above 0; the file is damaged")
    return Activation(kind="clamped_swiglu", alpha=float(alpha), limit=float(limit))


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_gpt_oss.model import build_decoder

    return build_decoder(context)
