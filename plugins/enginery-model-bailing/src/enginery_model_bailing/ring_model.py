"""The heavy part of Ring-2.5: lightning attention with positions, or latents, in each layer.

T tokens, C hidden size, H heads, D dims of a head, G groups of the output's norm.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Final

import torch

from enginery.api import (
    Cut,
    DecoderShape,
    ForwardBatch,
    LayerSpec,
    LinearShape,
    Model,
    ModelContext,
    RecurrentWeights,
    WeightSource,
)
from enginery.nn.attention import take_out
from enginery.nn.decoder import AttentionBlock, Decoder, DecoderLayer
from enginery.nn.latent_attention import LatentSelfAttention
from enginery.nn.moe import layer_mlp
from enginery.nn.norm import GroupedNorm
from enginery.nn.recurrent import recurrent_facts
from enginery_model_bailing.spec.ring import RingShape
from enginery_model_bailing.spec.ring import shape as read_shape

LATENT_NORM_EPS: Final = 1e-6  # of the norms inside latent attention


def build_decoder(context: ModelContext) -> Model:
    """A Ring-2.5 from its weights."""
    ring = read_shape(context.config)
    return Decoder(context, ring.decoder, layer=partial(_layer, ring=ring))


def _layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int, ring: RingShape) -> DecoderLayer:
    attention: AttentionBlock
    if ring.linear[index]:
        spec = context.stage.spec(index, scale=shape.head_dim**-0.5)
        attention = RotatedLightningAttention(context, weights.scope("attention"), spec=spec, ring=ring, layer=index)
    else:
        attention = LatentSelfAttention(
            context,
            weights.scope("attention"),
            spec=context.stage.spec(index, scale=ring.scale),
            q_rank=ring.q_rank,
            bias=False,
            norm_eps=LATENT_NORM_EPS,
            out_name="dense",
        )
    mlp = layer_mlp(context, weights, shape=shape, index=index)
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp)


class RotatedLightningAttention:
    """Linear attention with a constant decay on normed, rotated queries and keys.

    Its output is normed over each of some groups of heads, and gated by a sigmoid.
    """

    def __init__(self, context: ModelContext, weights: WeightSource, *, spec: LayerSpec, ring: RingShape, layer: int) -> None:
        """spec: with this rank's heads, without `recurrent`, which is made here."""
        of, facts = recurrent_facts(context, spec)
        dim, hidden, width = facts.value_dim, context.facts.hidden_size, of.value_heads * facts.value_dim
        names = ("query_key_value",) * 3 + ("g_proj",)
        self.entry = self.projected = weights.linear(
            LinearShape(names=names, rows=(width,) * 4, columns=hidden, cut=Cut.ROWS, unit=dim)
        )
        norms = torch.empty(2, facts.value_heads, dim, dtype=context.dtype, device=context.device)
        norms[0], norms[1] = (weights.take(f"{name}_layernorm.weight", (dim,)) for name in ("query", "key"))
        self.head_norms, self.eps = norms.flatten(0, 1), ring.decoder.rms_eps  # [2 H, D]
        self.norm = GroupedNorm(context, weights, "g_norm", size=width, groups=ring.num_groups, unit=dim, eps=self.eps)
        self.out = take_out(weights, "dense", hidden=hidden, heads=of.value_heads, dim=dim)
        own = weights.share(of.value_heads)
        decays = torch.tensor(ring.log_decay(layer)[own.start : own.stop], dtype=torch.float32, device=context.device)
        self.spec, self.facts = dataclasses.replace(spec, recurrent=RecurrentWeights(log_decay=decays)), facts
        self.qk_norm_rotary, self.advance = context.ops.qk_norm_rotary, context.advance

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C], cos_sin: [T, R]. Returns [T, C]: with several ranks a partial sum."""
        heads, dim = self.facts.value_heads, self.facts.value_dim
        mixed, gate = torch.split(self.projected(x), [3 * heads * dim, heads * dim], dim=-1)
        qkv = mixed.contiguous().view(len(x), -1, dim)  # [T, 3 H, D]
        self.qk_norm_rotary(qkv[:, : 2 * heads], self.head_norms, self.eps, cos_sin)
        out = torch.empty((len(x), heads, dim), dtype=x.dtype, device=x.device)  # [T, H, D]
        self.advance(qkv.view(len(x), -1), x[:, :0], self.spec, batch, out)
        return self.out(self.norm(out.view(gate.shape), gate, "sigmoid"))
