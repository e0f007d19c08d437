"""Lists of pages as FlashInfer's kernels read them, made on the host. B requests, C columns of a page table, N pages of them all.

q_indptr     [ 0 | 1 | 2 | 9 ]            request b has rows [q_indptr[b], q_indptr[b + 1])
kv_indptr    [ 0 | 3 | 4 | 9 ]            and the pages indices[kv_indptr[b] : kv_indptr[b + 1]]
indices      [ 7 3 9 | 4 | 1 2 5 6 8 ]
kv_lens      [ 40 | 2 | 75 ]              tokens on them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Ints = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PageLists:
    """q_indptr [B + 1], kv_indptr [B + 1], kv_lens [B], indices [N]: int32, host. causal: False where every request has one row."""

    causal: bool
    q_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What requests do: q_lens [B] new rows, the last of kv_lens [B] tokens on the pages of a table [B, C]. first: of all rows."""

    q_lens: Ints
    kv_lens: Ints
    table: Ints
    first: int

    @property
    def place(self) -> slice:
        """Of these rows in the batch."""
        return slice(self.first, self.first + int(self.q_lens.sum()))


def cut_rows(rows: Rows, most: int) -> Iterator[Rows]:
    """Parts of at most so many rows, of requests or of pieces of requests. Requests without rows are in none."""
    ends = rows.q_lens.cumsum()
    starts = ends - rows.q_lens
    for first in range(0, int(rows.q_lens.sum()), most):
        low, high = (np.clip(edge, starts, ends) for edge in (first, first + most))
        some = np.flatnonzero(high > low)
        kv_lens = (rows.kv_lens - (ends - high))[some].astype(np.int32)
        yield Rows(q_lens=(high - low)[some].astype(np.int32), kv_lens=kv_lens, table=rows.table[some], first=rows.first + first)


def padded(rows: Rows, *, num_rows: int, num_requests: int) -> Rows:
    """So many rows, and so many requests at least. Rows of nobody are of a request without keys, for which kernels write zeros."""
    more = np.zeros(max(1, num_requests - len(rows.q_lens)), dtype=np.int32)
    q_lens, kv_lens = (np.concatenate([lens, more]) for lens in (rows.q_lens, rows.kv_lens))
    q_lens[len(rows.q_lens)] = num_rows - rows.q_lens.sum()
    return Rows(q_lens=q_lens, kv_lens=kv_lens, table=np.pad(rows.table, ((0, len(more)), (0, 0))), first=rows.first)


def page_lists(rows: Rows, *, page_size: int, pinned: bool, causal: bool = False) -> PageLists:
    """pinned: in pinned memory, so that copies to the device need not be waited for. causal: even if every request has one row."""
    counts = -(-rows.kv_lens // page_size)  # [B]
    parts = [row[:count] for row, count in zip(rows.table, counts.tolist(), strict=True)]
    lists = (starts_of(rows.q_lens), starts_of(counts), rows.kv_lens, np.concatenate(parts) if parts else counts)
    q_indptr, kv_indptr, kv_lens, indices = on_host(*lists, pinned=pinned)
    masked = causal or int(q_indptr[-1]) != len(kv_lens)
    return PageLists(causal=masked, q_indptr=q_indptr, kv_indptr=kv_indptr, kv_lens=kv_lens, indices=indices)


def starts_of(counts: Ints) -> Ints:
    """[B + 1]: 0 and the sums so far."""
    found = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=found[1:])
    return found


def on_host(*lists: Ints, pinned: bool) -> tuple[torch.Tensor, ...]:
    """As int32 tensors in one piece of memory."""
    sizes = [len(each) for each in lists]
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=pinned)
    np.concatenate(lists, out=packed.numpy(), casting="same_kind")
    return torch.split(packed, sizes)
