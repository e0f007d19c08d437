"""The attention socket of MLA (DeepSeek-V2, arXiv:2405.04434): low-rank projections, rotary, latent write, output projection.

T tokens, H query heads, C hidden size, Q rank of the queries; R latent rank, P, N: head dims with and without rotary position,
V value dim. With several ranks each has some heads, and the latents whole. What becomes of the latents, absorbing or expanding
them, is decided behind `attend`.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from enginery.contracts.attention import LatentFacts, LatentWeights, LayerSpec
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.model import ModelContext, WeightSource
from enginery.contracts.parallel import Cut
from enginery.contracts.weights import LinearShape, RowOrder
from enginery.nn.attention import take_out

KV_DOWN: Final = "kv_a_proj_with_mqa"


def _query_shapes(
    facts: LatentFacts, heads: int, hidden: int, *, q_rank: int | None, bias: bool
) -> tuple[LinearShape, LinearShape | None]:
    """The product of x, with latents at its end, and that of low-rank queries. heads: of all ranks."""
    head_dim, row_dim = facts.nope_dim + facts.rope_dim, facts.rank + facts.rope_dim
    of_heads = RowOrder.split_pairs(head_dim, first=facts.nope_dim, count=facts.rope_dim)
    of_latent = RowOrder.split_pairs(row_dim, first=facts.rank, count=facts.rope_dim)
    if q_rank is None:
        down = LinearShape(
            names=("q_proj", KV_DOWN),
            rows=(heads * head_dim, row_dim),
            columns=hidden,
            cut=(Cut.ROWS, Cut.NONE),
            unit=(head_dim, 1),
            bias=(False, bias),
            order=(of_heads, of_latent),
        )
        return down, None
    down = LinearShape(names=("q_a_proj", KV_DOWN), rows=(q_rank, row_dim), columns=hidden, bias=bias, order=(None, of_latent))
    rows = (heads * head_dim,)
    return down, LinearShape(names=("q_b_proj",), rows=rows, columns=q_rank, cut=Cut.ROWS, unit=head_dim, order=of_heads)


class LatentSelfAttention:
    """Causal self-attention over latents, bound to its backend's `attend` when built.

    Checkpoints rotate pairs (2i, 2i + 1). Attention is the same for every order of the rotated dims that q and k share, so rows
    of the weights are put where `latent_norm_rotary_write` rotates pairs (i, i + P / 2).
    """

    def __init__(
        self,
        context: ModelContext,
        weights: WeightSource,
        *,
        spec: LayerSpec,
        q_rank: int | None,
        bias: bool,
        norm_eps: float,
        out_name: str = "o_proj",
    ) -> None:
        """spec: without `latent`, which is taken here. q_rank: Q, None for queries of full rank. bias: not of full-rank queries."""
        facts, hidden, ops = spec.facts.latent, context.facts.hidden_size, context.ops
        assert facts is not None, "the socket is for layers with latents"
        all_heads = context.facts.layers[spec.global_id].num_heads  # of all ranks
        self.num_heads, self.latents, self.norm_eps = spec.facts.num_heads, facts, norm_eps
        down, up = _query_shapes(facts, all_heads, hidden, q_rank=q_rank, bias=bias)
        self.entry = self.down = weights.linear(down)
        self.q_norm = None if q_rank is None else weights.take("q_a_layernorm.weight", (q_rank,))
        self.q_up = None if up is None else weights.linear(up)
        self.latent_norm = weights.take("kv_a_layernorm.weight", (facts.rank,))
        made = facts.nope_dim + facts.value_dim
        kv_b = weights.take("kv_b_proj.weight", (all_heads * made, facts.rank), cut=Cut.ROWS, unit=made)
        self.spec = dataclasses.replace(spec, latent=LatentWeights(kv_b=kv_b.view(-1, made, facts.rank)))
        self.out = take_out(weights, out_name, hidden=hidden, heads=all_heads, dim=facts.value_dim, bias=bias)
        self.rms_norm, self.latent_norm_rotary_write = ops.rms_norm, ops.latent_norm_rotary_write
        self.attend = context.attend
        self.stored = context.pool.by_slot(spec.local_id).k[:, 0]  # [slots, R + P]

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C], cos_sin: [T, P]. Returns [T, C]: with several ranks a partial sum."""
        facts, num_tokens = self.latents, x.shape[0]
        down = self.down(x)  # [T, Q + R + P], or [T, H (N + P) + R + P]
        q, latents = down[:, : -(facts.rank + facts.rope_dim)], down[:, -(facts.rank + facts.rope_dim) :]
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.rms_norm(q, self.q_norm, self.norm_eps))
        q = q.view(num_tokens, self.num_heads, facts.nope_dim + facts.rope_dim)
        self.latent_norm_rotary_write(
            q, latents, self.latent_norm, self.norm_eps, cos_sin, stored=self.stored, slots=batch.slots_for(self.spec)
        )
        latents = latents[:, None]  # [T, 1, R + P]
        attended = torch.empty((num_tokens, self.num_heads, facts.value_dim), dtype=q.dtype, device=q.device)
        self.attend(q, latents, latents, self.spec, batch, attended)
        return self.out(attended.view(num_tokens, -1))
