"""The heavy part: the core's decoder in MiMo's shape.

T tokens, C hidden size, R rotary dim.
"""

from __future__ import annotations

import torch

from enginery.api import DecoderShape, ForwardBatch, Model, ModelContext, WeightSource
from enginery.nn.decoder import AttentionBlock, Decoder, DecoderLayer, layer_attention
from enginery.nn.moe import layer_mlp
from enginery_model_mimo.spec import shape, value_scale


class ScaledAttention:
    """Attention whose values are scaled: its output is, for that is linear in them and has no bias."""

    def __init__(self, attention: AttentionBlock, scale: float) -> None:
        self._attention, self._scale = attention, scale

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [T, C], cos_sin [T, R] -> [T, C]."""
        return self._attention(x, cos_sin, batch).mul_(self._scale)


def build_decoder(context: ModelContext) -> Model:
    """A MiMo-V2-Flash from its weights."""
    return Decoder(context, shape(context.config), layer=scaled_layer)


def scaled_layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    """A layer: attention with scaled values, and experts where it has them."""
    attention: AttentionBlock = layer_attention(context, weights, shape=shape, index=index)
    if (scale := value_scale(context.config)) != 1.0:
        attention = ScaledAttention(attention, scale)
    mlp = layer_mlp(context, weights, shape=shape, index=index)
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp)
