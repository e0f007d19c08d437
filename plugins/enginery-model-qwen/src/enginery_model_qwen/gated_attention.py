"""Attention whose output is gated by a sigmoid, head dim by head dim (arXiv:2505.06708): Qwen3-Next's and Qwen3.5's.

T tokens, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import torch

from enginery.api import (
    AttnLayerFacts,
    Cut,
    ForwardBatch,
    LayerSpec,
    LinearShape,
    ModelContext,
    RowOrder,
    WeightSource,
)
from enginery.nn.attention import take_out
from enginery.nn.norm import take_norm


def _qkv_shape(of: AttnLayerFacts, hidden: int, *, heads: int, bias: bool) -> LinearShape:
    """Gates of all heads, then queries, keys, values. heads: of this rank."""
    dim = of.head_dim
    gates_first = [2 * head * dim + part * dim + row for part in (1, 0) for head in range(heads) for row in range(dim)]
    return LinearShape(
        names=("q_proj", "k_proj", "v_proj"),
        rows=(2 * of.num_heads * dim, of.num_kv_heads * dim, of.num_kv_heads * dim),
        columns=hidden,
        cut=Cut.ROWS,
        unit=(2 * dim, dim, dim),
        bias=bias,
        order=(RowOrder(tuple(gates_first)), None, None),
    )


class GatedSelfAttention:
    """Causal self-attention over the paged KV memory, with norms of heads. `q_proj` has each head's query, then its gate."""

    def __init__(
        self,
        context: ModelContext,
        weights: WeightSource,
        *,
        spec: LayerSpec,
        bias: bool,
        norm_eps: float,
        norm_offset: float = 0.0,
    ) -> None:
        """spec: with this rank's heads. norm_offset: added to the weights of the norms of heads."""
        of, dim = context.facts.layers[spec.global_id], spec.facts.head_dim
        heads, kv_heads = spec.facts.num_heads, spec.facts.num_kv_heads
        self.entry = self.qkv = weights.linear(_qkv_shape(of, context.facts.hidden_size, heads=heads, bias=bias))
        self.out = take_out(weights, "o_proj", hidden=context.facts.hidden_size, heads=of.num_heads, dim=dim, bias=bias)
        norms = torch.empty(heads + kv_heads, dim, dtype=context.dtype, device=context.device)
        norms[:heads], norms[heads:] = (take_norm(weights, f"{name}_norm", dim, offset=norm_offset) for name in ("q", "k"))
        self.spec, self.norm_weight, self.norm_eps, self.num_heads, self.num_rotated = spec, norms, norm_eps, heads, len(norms)
        self.qk_norm_rotary_write = context.ops.qk_norm_rotary_write
        self.attend, self.gated_sigmoid = context.attend, context.ops.gated_sigmoid
        self.memory = context.pool.by_slot(spec.local_id)

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, hidden], cos_sin: [T, R]. Returns [T, hidden]: with several ranks a partial sum."""
        dim, width = self.spec.facts.head_dim, self.num_heads * self.spec.facts.head_dim
        made = self.qkv(x)  # [T, (2 H + 2 K) D]: gates, q, k, v
        qkv = made[:, width:].contiguous().view(len(x), -1, dim)  # [T, H + 2 K, D]
        keys, values = self.memory
        slots = batch.slots_for(self.spec)
        self.qk_norm_rotary_write(qkv, self.norm_weight, self.norm_eps, cos_sin, keys=keys, values=values, slots=slots)
        q, k, v = qkv[:, : self.num_heads], qkv[:, self.num_heads : self.num_rotated], qkv[:, self.num_rotated :]
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # [T, H, D]
        self.attend(q, k, v, self.spec, batch, attended)
        return self.out(self.gated_sigmoid(attended.view(len(x), -1), made[:, :width]))
