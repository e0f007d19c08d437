"""Lists of pages as FlashInfer's kernels read them, made on the host from a batch's tensors.

    indptr      [ 0 | 3 | 4 | 9 ]            request b has indices[indptr[b] : indptr[b + 1]]
    indices     [ 7 3 9 | 4 | 1 2 5 6 8 ]
    last_lens   [ 16 | 2 | 11 ]              tokens in a request's last page

B requests, P columns, N pages of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from enginery_attn_flashinfer.shared import Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class PageLists:
    """q_indptr [B + 1]: each request's rows. indptr [B + 1], indices [N], last_lens [B]. int32, host, parts of `packed`."""

    q_indptr: torch.Tensor
    indptr: torch.Tensor
    last_lens: torch.Tensor
    indices: torch.Tensor
    packed: torch.Tensor

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.last_lens)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What some requests do: q_lens [B] new rows, over pages first .. of a table [B, P] that hold keys up to kv_lens [B]."""

    q_lens: Ints
    kv_lens: Ints
    table: Ints
    first_pages: Ints | None = None


def page_lists(rows: Rows, *, page_size: int, pinned: bool) -> PageLists:
    """In one piece of pinned memory, from which the copies to the device need not be waited for.

    A request without keys has no pages. first_pages: so many at the front are left out; kv_lens counts them all the same.
    """
    ends = -(-rows.kv_lens // page_size)  # [B]
    firsts = np.zeros_like(ends) if rows.first_pages is None else rows.first_pages
    parts = [row[first:end] for row, first, end in zip(rows.table, firsts.tolist(), ends.tolist(), strict=True)]
    counts = ends - firsts
    return _packed(
        (
            _indptr(rows.q_lens),
            _indptr(counts),
            np.where(counts > 0, rows.kv_lens - (ends - 1) * page_size, 0),
            np.concatenate(parts) if parts else counts,
        ),
        pinned=pinned,
    )


def _indptr(counts: Ints) -> Ints:
    found = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=found[1:])
    return found


def _packed(arrays: Sequence[Ints], *, pinned: bool) -> PageLists:
    sizes = [array.size for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=pinned)
    np.concatenate(arrays, out=packed.numpy(), casting="same_kind")
    q_indptr, indptr, last_lens, indices = torch.split(packed, sizes)
    return PageLists(q_indptr=q_indptr, indptr=indptr, last_lens=last_lens, indices=indices, packed=packed)
