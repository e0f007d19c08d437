"""The attention socket: merged QKV, optional head norms, rotary, KV write, a leaf's `attend`, output projection.

T tokens, H query heads, K KV heads, D head dim, V value dim.
"""

from __future__ import annotations

import torch

from enginery.contracts.attention import LayerSpec
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.model import ModelContext, WeightSource
from enginery.contracts.parallel import Cut
from enginery.contracts.weights import Linear, LinearShape, RowOrder
from enginery.nn.norm import take_norm


def take_out(weights: WeightSource, name: str, *, hidden: int, heads: int, dim: int, bias: bool = False) -> Linear:
    """The product of what the heads of all ranks give, [T, heads * dim], with several ranks a partial sum of [T, hidden]."""
    columns, rows = heads * dim, (hidden,)
    shape = LinearShape(names=(name,), rows=rows, columns=columns, cut=Cut.COLUMNS, unit=dim, bias=bias, complete=False)
    return weights.linear(shape)


class SelfAttention:
    """Causal self-attention over the paged KV memory, bound to its backend's `attend` when built.

    A family whose files have other names has a subclass with these; one name for queries, keys and values if they are in one piece.
    """

    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out_name: str = "o_proj"
    norm_names: tuple[str, str] = ("q_norm", "k_norm")

    def __init__(
        self,
        context: ModelContext,
        weights: WeightSource,
        *,
        spec: LayerSpec,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm_eps: float | None,
        norm_offset: float = 0.0,
        neighbours: int = 0,
    ) -> None:
        """spec: with this rank's heads. qk_norm_eps: None for no norms of heads. norm_offset: added to their weights.

        neighbours: of so many first dims of a head the checkpoint rotates pairs (2i, 2i + 1); their rows change places.
        """
        ops, of = context.ops, context.facts.layers[spec.global_id]  # `of`: of all ranks
        dim, value_dim, order = of.head_dim, of.value_dim, RowOrder.split_pairs(of.head_dim, first=0, count=neighbours)
        in_order = (order, order, None) if neighbours else None
        hidden, all_heads = context.facts.hidden_size, of.num_heads
        counts, units = (of.num_heads, of.num_kv_heads, of.num_kv_heads), (dim, dim, value_dim)
        rows = tuple(count * unit for count, unit in zip(counts, units, strict=True))
        self.entry = self.qkv = weights.linear(
            LinearShape(names=self.qkv_names, rows=rows, columns=hidden, cut=Cut.ROWS, unit=units, bias=qkv_bias, order=in_order)
        )
        self.out = take_out(weights, self.out_name, hidden=hidden, heads=all_heads, dim=value_dim, bias=out_bias)
        heads, kv_heads = spec.facts.num_heads, spec.facts.num_kv_heads
        self.spec, self.head_dim, self.value_dim = spec, dim, value_dim
        self.num_heads, self.num_rotated = heads, heads + kv_heads
        self.norm_weight: torch.Tensor | None = None
        if qk_norm_eps is not None:
            norms = torch.empty(self.num_rotated, dim, dtype=context.dtype, device=context.device)  # [H + K, D]
            norms[:heads], norms[heads:] = (take_norm(weights, name, dim, offset=norm_offset) for name in self.norm_names)
            self.norm_weight = norms[:, list(order.places)] if neighbours else norms
        self.norm_eps = qk_norm_eps or 0.0
        self.qk_norm_rotary, self.qk_norm_rotary_write = ops.qk_norm_rotary, ops.qk_norm_rotary_write
        self.pool = context.pool
        self.attend = context.attend
        self.memory = context.pool.by_slot(spec.local_id)

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, hidden], cos_sin: [T, R]. Returns [T, hidden]: with several ranks a partial sum."""
        num_tokens = x.shape[0]
        if self.value_dim != self.head_dim:
            q, k, v = self._write_apart(self.qkv(x), cos_sin, batch)
        else:
            qkv = self.qkv(x).view(num_tokens, -1, self.head_dim)  # [T, H + 2K, D]
            keys, values = self.memory
            slots = batch.slots_for(self.spec)
            self.qk_norm_rotary_write(qkv, self.norm_weight, self.norm_eps, cos_sin, keys=keys, values=values, slots=slots)
            q, k, v = qkv[:, : self.num_heads], qkv[:, self.num_heads : self.num_rotated], qkv[:, self.num_rotated :]
        attended = torch.empty((*q.shape[:2], self.value_dim), dtype=q.dtype, device=q.device)  # [T, H, V]
        self.attend(q, k, v, self.spec, batch, attended)
        return self.out(attended.view(num_tokens, -1))

    def _write_apart(
        self, qkv: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same without the fused write, which is for values as wide as keys: q [T, H, D], k [T, K, D], v [T, K, V]."""
        num_tokens, width = qkv.shape[0], self.num_rotated * self.head_dim
        rotated = qkv[:, :width].view(num_tokens, -1, self.head_dim)  # [T, H + K, D]
        v = qkv[:, width:].view(num_tokens, -1, self.value_dim)
        self.qk_norm_rotary(rotated, self.norm_weight, self.norm_eps, cos_sin)
        q, k = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        self.pool.write(self.spec.local_id, k, v, batch.slots_for(self.spec))
        return q, k, v
