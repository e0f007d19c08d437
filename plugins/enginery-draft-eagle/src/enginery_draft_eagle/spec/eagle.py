"""What config.json says of a head, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from enginery.api import (
    CheckpointError,
    DecoderShape,
    DrafterSpec,
    Model,
    ModelContext,
    ModelFacts,
    ModelSpec,
    WeightSource,
    read_decoder_shape,
    whole_number,
)


def one_layer(config: Mapping[str, Any]) -> DecoderShape:
    """Of a head's only layer. Raises `CheckpointError` for several."""
    if (count := whole_number(config, "num_hidden_layers")) != 1:
        raise CheckpointError(f"config.json of the head has {count} layers (num_hidden_layers); a head has 1")
    bias = bool(config.get("attention_bias", False))
    qkv_bias = bias or bool(config.get("qkv_bias", False))
    return read_decoder_shape(config, qkv_bias=qkv_bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def with_stored_biases(shape: DecoderShape, layer: WeightSource) -> DecoderShape:
    """With biases of queries, keys and values where the layer has them: config.json of a head for Qwen2 need not say so."""
    return dataclasses.replace(shape, qkv_bias=shape.qkv_bias or layer.has("self_attn.q_proj.bias"))


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return one_layer(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_draft_eagle.model import EagleHead

    return EagleHead(context, one_layer(context.config))


EAGLE = DrafterSpec(
    name="eagle",
    api=(2, 0),
    summary="an EAGLE head: one layer that guesses the target's next hidden state",
    most=8,
    takes_features=True,
    model=ModelSpec(
        name="eagle",
        api=(2, 0),
        architectures=("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"),
        describe=describe,
        build=build,
        ignored_weights=("embed_tokens.weight", "lm_head.weight", "*.rotary_emb.inv_freq"),
    ),
)
