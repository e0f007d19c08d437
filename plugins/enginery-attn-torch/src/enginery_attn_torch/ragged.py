"""MLA prefills over keys and values that are given, piece by piece, request by request.

S rows of the batch, L keys of a piece, H heads, D dim of a key, V of a value.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from enginery.api import ChunkPlan, ForwardBatch, KVPiece, LayerSpec, PlanKey

SCORES_AT_ONCE = 1 << 24  # elements of a score matrix in memory


@dataclass(frozen=True, kw_only=True, eq=False)
class RaggedRange:
    """One request in one piece: its rows, its keys, and which of them each row sees: [rows, keys] bool, None for all."""

    rows: slice
    keys: slice
    seen: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchChunkPlan(ChunkPlan):
    """By the index of the piece, what each request sees of it."""

    pieces: tuple[tuple[RaggedRange, ...], ...]


@dataclass(frozen=True, kw_only=True)
class RaggedAttention:
    """Plans pieces and attends them."""

    device: torch.device

    def plan(self, batch: ForwardBatch, chunks: tuple[KVPiece, ...], *, own: bool, key: PlanKey) -> TorchChunkPlan:
        """own: besides the chunks, the step's own tokens are a piece, the last."""
        q_lens = batch.q_lens_cpu.tolist()
        lens = [(chunk.lens_cpu.tolist(), chunk.causal) for chunk in chunks]
        if own:
            lens.append((q_lens, True))
        pieces = tuple(self._ranges(q_lens, kv_lens, causal=causal) for kv_lens, causal in lens)

        def attend(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: LayerSpec,
            piece: KVPiece,
            out: torch.Tensor,
            lse: torch.Tensor | None,
        ) -> None:
            _attend(q, k, v, ranges=pieces[piece.index], scale=layer.scale, out=out, lse=lse)

        return TorchChunkPlan(key=key, attend=attend, pieces=pieces)

    def _ranges(self, q_lens: list[int], kv_lens: list[int], *, causal: bool) -> tuple[RaggedRange, ...]:
        rows, keys = (itertools.accumulate(lens, initial=0) for lens in (q_lens, kv_lens))
        ranges = []
        for row, key, q_len, kv_len in zip(rows, keys, q_lens, kv_lens, strict=False):
            seen = None
            if causal and q_len > 1:
                seen = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len).to(self.device, non_blocking=True)
            ranges.append(RaggedRange(rows=slice(row, row + q_len), keys=slice(key, key + kv_len), seen=seen))
        return tuple(ranges)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    ranges: tuple[RaggedRange, ...],
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """See `RaggedAttendFn`."""
    for each in ranges:
        rows, keys, values = (part.transpose(0, 1) for part in (q[each.rows], k[each.keys], v[each.keys]))  # [H, S or L, D or V]
        if lse is None:
            width = max(keys.shape[-1], values.shape[-1])  # torch's fused kernels want them equally wide
            q_wide, k_wide, v_wide = (_widened(part, width)[None] for part in (rows, keys, values))
            attended = F.scaled_dot_product_attention(q_wide, k_wide, v_wide, attn_mask=each.seen, scale=scale)[0]
            out[each.rows] = attended[..., : values.shape[-1]].transpose(0, 1)
        else:
            attended, sums = _with_lse(rows, keys, values, each.seen, scale=scale)
            out[each.rows], lse[each.rows] = attended.transpose(0, 1).to(out.dtype), sums.transpose(0, 1)


def _widened(part: torch.Tensor, width: int) -> torch.Tensor:
    """[.., width], with zeros at the end."""
    return part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1]))


def _with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in float32, some heads at a time: [H, S, V] and the natural log-sum-exp [H, S]."""
    num_heads, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    if num_keys == 0:
        return v.new_zeros((num_heads, num_queries, v.shape[-1])), q.new_full((num_heads, num_queries), -math.inf).float()
    at_once = max(1, SCORES_AT_ONCE // max(1, num_queries * num_keys))
    outs, sums = [], []
    for heads in range(0, num_heads, at_once):
        part = slice(heads, heads + at_once)
        scores = torch.einsum("hsd,hld->hsl", q[part].float(), k[part].float()) * scale
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1)  # [h, S]
        outs.append(torch.einsum("hsl,hlv->hsv", (scores - lse[..., None]).exp(), v[part].float()))
        sums.append(lse)
    return torch.cat(outs), torch.cat(sums)
