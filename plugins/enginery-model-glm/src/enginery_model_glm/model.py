"""The heavy part: the core's decoder, for GLM-4 with norms behind attention and MLP too.

T tokens, C hidden size, H query heads, K KV heads, D head dim, R rotary dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from enginery.api import DecoderShape, ForwardBatch, Model, ModelContext, WeightSource
from enginery.nn.decoder import Decoder, DecoderLayer, layer_attention
from enginery.nn.moe import expert_layer
from enginery_model_glm.spec import has_experts
from enginery_model_glm.spec import shape as read_shape


def build_decoder(context: ModelContext) -> Model:
    """A GLM-4 or GLM-4.5 from its weights."""
    layer = expert_layer if has_experts(context.config) else _glm4_layer
    return Decoder(context, read_shape(context.config), layer=layer)


@dataclass(frozen=True)
class NeighboursRotated:
    """The weights of an attention that rotates pairs (2i, 2i + 1), for one that rotates (i, i + R / 2).

    Attention is the same for every order of the rotated dims that q and k share, so the rows of their weights and biases change
    places.
    """

    source: WeightSource
    head_dim: int
    rotary_dim: int

    def scope(self, prefix: str) -> NeighboursRotated:
        """With longer names."""
        return NeighboursRotated(self.source.scope(prefix), self.head_dim, self.rotary_dim)

    def take(self, name: str, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As it is."""
        return self.source.take(name, shape, dtype=dtype)

    def merge(self, names: Sequence[str], shapes: Sequence[Sequence[int]], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """q, k and v: [(H + 2K) D, C], or without the C."""
        stacked = self.source.merge(names, shapes, dtype=dtype)
        rotated = stacked[: shapes[0][0] + shapes[1][0]].view(-1, self.head_dim, *shapes[0][1:])[:, : self.rotary_dim]
        rotated.copy_(torch.cat((rotated[:, 0::2], rotated[:, 1::2]), dim=1))
        return stacked


class PackedMLP:
    """`GatedMLP` for checkpoints that have gate and up in one piece."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, shape: DecoderShape) -> None:
        hidden, inner, ops = shape.hidden_size, shape.intermediate_size, context.ops
        self.gate_up = ops.bind_linear(weights.take("gate_up_proj.weight", (2 * inner, hidden)), None)
        self.down = ops.bind_linear(weights.take("down_proj.weight", (hidden, inner)), None)
        self.gated_silu = ops.gated_silu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return self.down(self.gated_silu(self.gate_up(x)))


def _glm4_layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    """What attention and MLP return is normed before it is added to the residual stream."""
    paired = NeighboursRotated(weights, shape.head_dim, shape.rope.rotary_dim)
    attend, mlp = layer_attention(context, paired, shape=shape, index=index), PackedMLP(context, weights.scope("mlp"), shape=shape)
    attention_norm = weights.take("post_self_attn_layernorm.weight", (shape.hidden_size,))
    mlp_norm = weights.take("post_mlp_layernorm.weight", (shape.hidden_size,))
    rms_norm, eps = context.ops.rms_norm, shape.rms_eps

    def normed_attention(x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return rms_norm(attend(x, cos_sin, batch), attention_norm, eps)

    def normed_mlp(x: torch.Tensor) -> torch.Tensor:
        return rms_norm(mlp(x), mlp_norm, eps)

    return DecoderLayer(context, weights, shape=shape, attention=normed_attention, mlp=normed_mlp)
