"""The heavy part of Ling: the core's decoder, whose attention has other names here."""

from __future__ import annotations

from typing import Final

from enginery.api import DecoderShape, Model, ModelContext, WeightSource
from enginery.nn.attention import SelfAttention
from enginery.nn.decoder import Decoder, DecoderLayer, summed_early
from enginery.nn.moe import layer_mlp
from enginery.nn.next_token import NextTokenNames, modules_behind
from enginery_model_bailing.spec.ling import module_shape, shape

MODULE_NAMES: Final = NextTokenNames("enorm", "hnorm", "eh_proj", "final_layernorm")


class PackedAttention(SelfAttention):
    """Attention that is stored with queries, keys and values in one piece."""

    qkv_names = ("query_key_value",)
    out_name = "dense"
    norm_names = ("query_layernorm", "key_layernorm")


def build_decoder(context: ModelContext) -> Model:
    """A Ling from its weights."""
    return Decoder(context, shape(context.config), layer=_layer)


def _layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    attention = PackedAttention(
        context,
        weights.scope("attention"),
        spec=context.stage.spec(index, scale=shape.head_dim**-0.5),
        qkv_bias=shape.qkv_bias,
        out_bias=shape.out_bias,
        qk_norm_eps=shape.rms_eps if shape.qk_norm else None,
    )
    mlp = layer_mlp(context, weights, shape=shape, index=index)
    return summed_early(context, DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp))


def build_modules(context: ModelContext) -> Model:
    """The layers behind the last. Each is given, and leaves to the next, what is behind a norm."""
    return modules_behind(context, module_shape(context.config), _layer, carries_normed=True, names=MODULE_NAMES)
