"""The heavy part: the core's decoder in Qwen's shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from enginery.api import DecoderShape, Model, ModelContext, WeightSource
from enginery.nn.decoder import AttentionBlock, Decoder, DecoderLayer
from enginery.nn.moe import expert_layer, layer_mlp
from enginery.nn.next_token import NextTokenModule, NextTokenNames
from enginery.nn.recurrent import GatedDeltaNet
from enginery_model_qwen.gated_attention import GatedSelfAttention
from enginery_model_qwen.spec import is_35, is_next, module_shape, shape

MTP_NAMES = NextTokenNames("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
STEMS: Final = ("model.language_model", "model")  # beside a model for images, which files of the text alone may have left, and not


def build_decoder(context: ModelContext) -> Model:
    """A Qwen2, Qwen3, Qwen3-Next or Qwen3.5 from its weights, with or without experts."""
    decoder = shape(context.config)
    if not is_next(context.config):
        return Decoder(context, decoder, layer=expert_layer)
    stems = (stem for stem in STEMS if context.weights.has(f"{stem}.norm.weight"))
    return Decoder(context, dataclasses.replace(decoder, stem=next(stems, decoder.stem)), layer=hybrid_layer)


def hybrid_layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    """A layer of Qwen3-Next or Qwen3.5: a gated delta net or gated attention, and an MLP or experts."""
    facts = next(layer for layer in context.facts.layers if layer.decoder_layer == index)
    spec = context.stage.spec(index, scale=facts.head_dim**-0.5)
    attention: AttentionBlock
    if facts.recurrent is not None:
        apart = is_35(context.config)
        attention = GatedDeltaNet(context, weights.scope("linear_attn"), spec=spec, norm_eps=shape.rms_eps, apart=apart)
    else:
        attention = GatedSelfAttention(
            context,
            weights.scope("self_attn"),
            spec=spec,
            bias=shape.out_bias,
            norm_eps=shape.rms_eps,
            norm_offset=shape.norm_offset,
        )
    mlp = layer_mlp(context, weights, shape=shape, index=index)
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp)


def build_module(context: ModelContext) -> Model:
    """The module `mtp`. It takes and leaves hidden states that are behind a norm (llama.cpp #24025).

    Where it has several layers, each is a module, with norms and mix in common.
    """
    weights, decoder = context.weights.scope("mtp"), module_shape(context.config)

    def module(index: int, further: Sequence[Model] = ()) -> NextTokenModule:
        layer = hybrid_layer(context, weights.scope(f"layers.{index}"), shape=decoder, index=index)
        return NextTokenModule(context, weights, shape=decoder, layer=layer, carries_normed=True, names=MTP_NAMES, further=further)

    return module(0, [module(index) for index in range(1, len(decoder.windows))])
