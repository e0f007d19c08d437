"""The heavy part: norms over all heads, lightning attention, and a residual stream that is scaled.

T tokens, C hidden size, H query heads, K KV heads, D dims of a head.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F

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
from enginery.nn.attention import SelfAttention, take_out
from enginery.nn.decoder import AttentionBlock, Decoder, DecoderLayer, layer_attention
from enginery.nn.moe import layer_mlp
from enginery.nn.norm import GroupedNorm
from enginery.nn.recurrent import gather_parts, recurrent_facts
from enginery_model_minimax.spec import Residual, TextShape, m2_shape, text_shape

LIGHTNING_NORM_EPS: Final = 1e-6  # `rms_norm_eps` is for the others (modeling_minimax.py)


def build_m2(context: ModelContext) -> Model:
    """A MiniMax-M2 from its weights."""
    return Decoder(context, m2_shape(context.config), layer=_m2_layer)


def build_text(context: ModelContext) -> Model:
    """A MiniMax-Text-01 from its weights."""
    text = text_shape(context.config)
    return Decoder(context, text.decoder, layer=partial(_text_layer, text=text))


def _m2_layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    spec = context.stage.spec(index, scale=shape.head_dim**-0.5)
    attention = WidelyNormedAttention(context, weights.scope("self_attn"), spec=spec, norm_eps=shape.rms_eps)
    mlp = layer_mlp(context, weights, shape=shape, index=index)
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp)


def _text_layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int, text: TextShape) -> DecoderLayer:
    attention: AttentionBlock
    if text.linear[index]:
        attention = LightningAttention(
            context, weights.scope("self_attn"), spec=context.stage.spec(index, scale=1.0), log_decay=text.log_decay(index)
        )
    else:
        attention = layer_attention(context, weights, shape=shape, index=index)
    layer = ScaledLayer(
        context,
        weights,
        shape=shape,
        attention=attention,
        mlp=layer_mlp(context, weights, shape=shape, index=index),
    )
    layer.attention_residual = text.linear_residual if text.linear[index] else text.full_residual
    layer.mlp_residual = text.mlp_residual
    return layer


class WidelyNormedAttention(SelfAttention):
    """Attention whose queries, and keys, are normed over all heads at once: over those of all ranks."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, spec: LayerSpec, norm_eps: float) -> None:
        """spec: with this rank's heads."""
        super().__init__(context, weights, spec=spec, qkv_bias=False, out_bias=False, qk_norm_eps=None)
        of, dim, mine = context.facts.layers[spec.global_id], spec.facts.head_dim, spec.facts
        self.q_norm, self.k_norm = (
            weights.take(f"{name}_norm.weight", (heads * dim,), cut=Cut.ROWS, unit=dim)
            for name, heads in (("q", of.num_heads), ("k", of.num_kv_heads))
        )
        copies = of.num_heads * mine.num_kv_heads / (mine.num_heads * of.num_kv_heads)  # ranks that have the same key head
        self.counts = 1 / (of.num_heads * dim), 1 / (of.num_kv_heads * dim * copies)
        self.eps, self.comm = norm_eps, context.comm

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C], cos_sin: [T, R]. Returns [T, C]: with several ranks a partial sum."""
        made = self.qkv(x)  # [T, (H + 2 K) D]
        q, k = made[:, : self.q_norm.shape[0]], made[:, self.q_norm.shape[0] :][:, : self.k_norm.shape[0]]
        parts = [part.float().square().sum(-1, keepdim=True) * count for part, count in zip((q, k), self.counts, strict=True)]
        of_q, of_k = torch.split((self.comm.sum(torch.cat(parts, dim=-1)) + self.eps).rsqrt(), 1, dim=-1)  # [T, 1] each
        q.copy_((q * of_q).to(x.dtype) * self.q_norm)
        k.copy_((k * of_k).to(x.dtype) * self.k_norm)
        qkv = made.view(len(x), -1, self.head_dim)  # [T, H + 2 K, D]
        keys, values = self.memory
        slots = batch.slots_for(self.spec)
        self.qk_norm_rotary_write(qkv, None, self.norm_eps, cos_sin, keys=keys, values=values, slots=slots)
        queries, new_keys, new_values = qkv.tensor_split((self.num_heads, self.num_rotated), dim=1)
        attended = torch.empty_like(queries)
        self.attend(queries, new_keys, new_values, self.spec, batch, attended)
        return self.out(attended.view(len(x), -1))


class LightningAttention:
    """Linear attention with a constant decay; its output is normed over all heads and gated by a sigmoid.

    `qkv_proj` has each head's query, key and value side by side; they pass a SiLU.
    """

    def __init__(self, context: ModelContext, weights: WeightSource, *, spec: LayerSpec, log_decay: tuple[float, ...]) -> None:
        """spec: with this rank's heads, without `recurrent`, which is made here. log_decay: of each head of all ranks."""
        of, facts = recurrent_facts(context, spec)
        heads, dim, hidden = of.value_heads, facts.value_dim, context.facts.hidden_size
        self.entry = self.projected = weights.linear(
            LinearShape(
                names=("qkv_proj", "output_gate"),
                rows=(3 * heads * dim, heads * dim),
                columns=hidden,
                cut=Cut.ROWS,
                unit=(3 * dim, dim),
                order=(gather_parts(facts.value_heads, (dim, dim, dim)), None),
            )
        )
        self.norm = GroupedNorm(context, weights, "norm", size=heads * dim, groups=1, unit=dim, eps=LIGHTNING_NORM_EPS)
        self.out = take_out(weights, "out_proj", hidden=hidden, heads=heads, dim=dim)
        own = weights.share(heads)
        decays = torch.tensor(log_decay[own.start : own.stop], dtype=torch.float32, device=context.device)
        self.spec, self.facts = dataclasses.replace(spec, recurrent=RecurrentWeights(log_decay=decays)), facts
        self.advance = context.advance

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C]. Returns [T, C]: with several ranks a partial sum. It has no positions."""
        facts = self.facts
        mixed, gate = torch.split(self.projected(x), [facts.mixed_width, facts.value_heads * facts.value_dim], dim=-1)
        out = torch.empty((len(x), facts.value_heads, facts.value_dim), dtype=x.dtype, device=x.device)  # [T, H, D]
        self.advance(F.silu(mixed), x[:, :0], self.spec, batch, out)
        return self.out(self.norm(out.view(gate.shape), gate, "sigmoid"))


class ScaledLayer(DecoderLayer):
    """The residual stream becomes the normed input of each block, times alpha; what the block gives is added, times beta."""

    attention_residual: Residual
    mlp_residual: Residual

    def attention_input(self, delta: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Adds `delta`, the last layer's output, to the residual stream in place, and norms and scales it: all [T, C]."""
        x = super().attention_input(delta, residual)
        torch.mul(x, self.attention_residual.alpha, out=residual)
        return x

    def feed_forward(self, delta: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The same with attention's output, and the experts' on the norm of it, scaled: all [T, C]."""
        x = self.comm.add_rms_norm(delta * self.attention_residual.beta, residual, self.mlp_norm, self.eps)
        torch.mul(x, self.mlp_residual.alpha, out=residual)
        return self.mlp(self.comm.all_rows(x)) * self.mlp_residual.beta
