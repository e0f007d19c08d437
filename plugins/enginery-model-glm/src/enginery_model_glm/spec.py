"""What config.json says, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from enginery.api import (
    DecoderShape,
    Model,
    ModelContext,
    ModelFacts,
    NormNames,
    next_layers,
    next_token_drafter,
    num_next_layers,
    read_decoder_shape,
    read_grouped_experts,
)

# For files that leave it out: the defaults of transformers' Glm4Config and Glm4MoeConfig.
GLM4: Final = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
GLM4_MOE: Final = {
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
}


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether it is GLM-4.5 and not GLM-4."""
    return "Glm4MoeForCausalLM" in config["architectures"]


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """GLM-4's or GLM-4.5's shape. Both rotate half of each head; GLM-4 norms what attention and MLP return before it is added."""
    if not has_experts(config):
        config = {**GLM4, **config}
        decoder = read_decoder_shape(config, qkv_bias=bool(config["attention_bias"]))
        norms = NormNames(attention_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm")
        return dataclasses.replace(decoder, norms=norms, rotates_neighbours=True, packed_mlp=True)
    config = {**GLM4_MOE, **config}
    return read_decoder_shape(
        config,
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
        experts=read_grouped_experts(config, scoring="sigmoid"),
    )


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_glm.model import build_decoder

    return build_decoder(context)


def ignored_weights(config: Mapping[str, Any]) -> list[str]:
    """Of the layers behind the last, which only a drafter asks for; one may be there of which config.json says nothing."""
    return next_layers(config, least=1)


def module_shape(config: Mapping[str, Any]) -> DecoderShape:
    """Of the layers behind the last."""
    return shape(config).one_more(num_next_layers(config))


def build_module(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_glm.model import build_module

    return build_module(context)


MTP: Final = next_token_drafter("Glm4MoeForCausalLM", describe=lambda config: module_shape(config).facts(), build=build_module)
