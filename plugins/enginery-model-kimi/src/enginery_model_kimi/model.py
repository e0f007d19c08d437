"""The heavy part: the core's decoder, with Kimi delta attention or latents in each layer."""

from __future__ import annotations

from functools import partial
from typing import Final

from enginery.api import DecoderShape, Model, ModelContext, WeightSource
from enginery.nn.channel_delta import KimiDeltaAttention
from enginery.nn.decoder import AttentionBlock, Decoder, DecoderLayer
from enginery.nn.latent_attention import LatentSelfAttention
from enginery.nn.moe import layer_mlp
from enginery_model_kimi.spec import KimiShape
from enginery_model_kimi.spec import shape as read_shape

LATENT_NORM_EPS: Final = 1e-6  # of the norms inside latent attention; `rms_norm_eps` is for the others (modeling_kimi_linear.py)


def build_decoder(context: ModelContext) -> Model:
    """A Kimi-Linear from its weights."""
    kimi = read_shape(context.config)
    return Decoder(context, kimi.decoder, layer=partial(_layer, kimi=kimi))


def _layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int, kimi: KimiShape) -> DecoderLayer:
    attention: AttentionBlock
    if kimi.linear[index]:
        attention = KimiDeltaAttention(
            context,
            weights.scope("self_attn"),
            spec=context.stage.spec(index, scale=kimi.rule.key_dim**-0.5),
            norm_eps=shape.rms_eps,
            rank=kimi.rule.key_dim,
            decay_shape=(1, 1, kimi.rule.value_heads, 1),
        )
    else:
        attention = LatentSelfAttention(
            context,
            weights.scope("self_attn"),
            spec=context.stage.spec(index, scale=(kimi.latent.nope_dim + kimi.latent.rope_dim) ** -0.5),
            q_rank=kimi.q_rank,
            bias=kimi.bias,
            norm_eps=LATENT_NORM_EPS,
        )
    mlp = layer_mlp(context, weights, shape=shape, index=index)
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp)
