"""The heavy part of Ling-3.0: Kimi delta attention, or latents with a gate for each head, in each layer.

T tokens, C hidden size, H heads, V value dim.
"""

from __future__ import annotations

from functools import partial

import torch

from enginery.api import Cut, DecoderShape, ForwardBatch, LayerSpec, LinearShape, Model, ModelContext, WeightSource
from enginery.nn.channel_delta import KimiDeltaAttention
from enginery.nn.decoder import AttentionBlock, Decoder, DecoderLayer
from enginery.nn.latent_attention import LatentSelfAttention
from enginery.nn.moe import layer_mlp
from enginery_model_bailing.ring_model import LATENT_NORM_EPS
from enginery_model_bailing.spec.ling3 import LingShape
from enginery_model_bailing.spec.ling3 import shape as read_shape


def build_decoder(context: ModelContext) -> Model:
    """A Ling-3.0 from its weights."""
    ling = read_shape(context.config)
    return Decoder(context, ling.decoder, layer=partial(_layer, ling=ling))


def _layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int, ling: LingShape) -> DecoderLayer:
    attention: AttentionBlock
    if ling.linear[index]:
        attention = KimiDeltaAttention(
            context,
            weights.scope("attention"),
            spec=context.stage.spec(index, scale=ling.rule.key_dim**-0.5),
            norm_eps=shape.rms_eps,
            rank=None,
            decay_shape=(ling.rule.value_heads,),
        )
    else:
        spec = context.stage.spec(index, scale=ling.scale)
        attention = GatedLatentAttention(context, weights.scope("attention"), spec=spec, q_rank=ling.q_rank)
    mlp = layer_mlp(context, weights, shape=shape, index=index)
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp)


class GatedLatentAttention:
    """Latent attention, each of whose heads is weighted by a sigmoid before the last product."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, spec: LayerSpec, q_rank: int | None) -> None:
        """spec: without `latent`, which is taken here."""
        self.attention = LatentSelfAttention(context, weights, spec=spec, q_rank=q_rank, bias=False, norm_eps=LATENT_NORM_EPS)
        heads, hidden = context.facts.layers[spec.global_id].num_heads, context.facts.hidden_size
        self.gate = weights.linear(LinearShape(names=("g_proj",), rows=(heads,), columns=hidden, cut=Cut.ROWS))
        self.out, self.attention.out = self.attention.out, Unchanged(self.attention.out.rows)

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C], cos_sin: [T, P]. Returns [T, C]: with several ranks a partial sum."""
        gate = self.gate(x).float().sigmoid().to(x.dtype)  # [T, H]
        attended = self.attention(x, cos_sin, batch).view(*gate.shape, -1)  # [T, H, V]
        return self.out((attended * gate[..., None]).view(len(x), -1))


class Unchanged:
    """A `Linear` that gives what it is given."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, H V]."""
        return x
