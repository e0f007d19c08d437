"""A plugin of the tests, as an outside author would write it: Gemma 2 and 3 from the core's blocks, without a block of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from enginery.api import (
    Activation,
    DecoderShape,
    Model,
    ModelContext,
    ModelFacts,
    ModelSpec,
    NormNames,
    hookimpl,
    read_decoder_shape,
    read_rope,
)

NORMS = NormNames(
    attention="input_layernorm",
    attention_out="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)


def shape(config: Mapping[str, Any]) -> DecoderShape:
    is_third = "Gemma3ForCausalLM" in config["architectures"]
    ropes = config["rope_parameters"]
    if is_third:
        config = {**config, "rope_parameters": ropes["full_attention"]}
    windows = tuple(config["sliding_window"] if kind == "sliding_attention" else None for kind in config["layer_types"])
    plain = read_decoder_shape(
        {**config, "hidden_act": config["hidden_activation"]},
        windows,
        qk_norm=is_third,
        activations={"gelu_pytorch_tanh": Activation(kind="gelu_tanh")},
    )
    local = {**config, "rope_parameters": ropes["sliding_attention"]} if is_third else None
    return dataclasses.replace(
        plain,
        norms=NORMS,
        norm_offset=1.0,
        embedding_scale=plain.hidden_size**0.5,
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        softcap=config.get("attn_logit_softcapping"),
        logit_cap=config.get("final_logit_softcapping"),
        window_rope=None if local is None else read_rope(local, plain.head_dim),
    )


def describe(config: Mapping[str, Any]) -> ModelFacts:
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    from enginery.nn.decoder import Decoder

    return Decoder(context, shape(context.config))


@hookimpl
def register_models() -> list[ModelSpec]:
    architectures = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
    return [ModelSpec(name="gemma", api=(2, 0), architectures=architectures, describe=describe, build=build)]
