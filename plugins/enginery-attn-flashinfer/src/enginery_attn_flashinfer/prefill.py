"""From where prefill reads keys and values, and the plans for it.

own        no request of the step has cached tokens, so the step's own keys and values are all there are
copied     each layer's pages are gathered into one piece first, in the model's dtype
in place   pages where they are: where few rows would read the copy or it would be too large, and under a window

FlashAttention-3 has keys and values in one piece loaded by the copy engine, which the pages of a request cannot be; over float8 it
does not run at all. B requests, T rows of the step, L tokens of all requests, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from enginery.api import LayerKV, WorkspaceArena
from enginery_attn_flashinfer.contract import Kernels, KernelSettings, RaggedWrapper, Wrapper
from enginery_attn_flashinfer.cuts import Cut
from enginery_attn_flashinfer.leases import Lease, Pool
from enginery_attn_flashinfer.pages import GatherLists, PageLists, Rows, gather_lists, page_lists, pinned_indptr

# A key is copied if so many rows of query heads read it on average. Measured on an H200, see the README.
LEAST_READERS: Final = 1536
LEAST_READERS_OF_FLOAT8: Final = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class Gathering:
    """Copies of pages, made anew by each layer. into: [L, K, D] each, shared with every other plan of the stream."""

    lists: GatherLists
    into: LayerKV


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillPart:
    """own: reads the step's own keys and values. gathering: reads that copy. Neither: reads pages."""

    wrapper: Lease[Wrapper] | Lease[RaggedWrapper]
    own: bool = False
    gathering: Gathering | None = None


class PrefillPlanner:
    """gather_bytes: the most that copies may take, 0 makes none. least_readers: see `LEAST_READERS`."""

    def __init__(
        self, kernels: Kernels, cuts: Sequence[Cut], settings: KernelSettings, *, arena: WorkspaceArena, gather_bytes: int
    ) -> None:
        self.kernels = kernels
        self.cuts = tuple(cuts)
        self.settings = settings
        self.arena = arena
        self.gather_bytes = gather_bytes
        self.has_model_dtype = settings.kv_dtype == settings.dtype
        self.least_readers = LEAST_READERS if self.has_model_dtype else LEAST_READERS_OF_FLOAT8

    def plan(self, pages: Pool[Wrapper], ragged: Pool[RaggedWrapper], rows: Rows) -> dict[Cut, PrefillPart]:
        """rows: all have new tokens. One part for each cut."""
        if self.has_model_dtype and np.array_equal(rows.q_lens, rows.kv_lens):
            indptr = pinned_indptr(rows.q_lens, pinned=self.settings.device.type == "cuda")
            return {cut: PrefillPart(wrapper=_planned_ragged(ragged, cut, indptr, indptr), own=True) for cut in self.cuts}
        lists = page_lists(rows, page_size=self.settings.page_size, pinned=self.settings.device.type == "cuda")
        copied = [cut for cut in self.cuts if self._copies(rows, cut)]
        found = {cut: PrefillPart(wrapper=planned(pages, cut, lists)) for cut in self.cuts if cut not in copied}
        if not copied:
            return found
        where, kv_indptr = gather_lists(lists, page_size=self.settings.page_size, device=self.settings.device)
        scratch = self.arena.take("keys and values of prefill", self.gather_bytes)
        for cut in copied:
            gathering = Gathering(lists=where, into=self._views(scratch, cut, int(kv_indptr[-1])))
            wrapper = _planned_ragged(ragged, cut, lists.q_indptr, kv_indptr)
            found[cut] = PrefillPart(wrapper=wrapper, gathering=gathering)
        return found

    def _copies(self, rows: Rows, cut: Cut) -> bool:
        """Whether copying first is possible and pays."""
        q_lens, kv_lens = rows.q_lens.astype(np.int64), rows.kv_lens.astype(np.int64)
        num_keys = int(kv_lens.sum())
        seen = int((q_lens * (2 * kv_lens - q_lens)).sum()) // 2  # pairs of a row and a key
        fits = num_keys * self._row_bytes(cut) * 2 <= self.gather_bytes
        return cut.window is None and fits and seen * cut.group >= self.least_readers * num_keys

    def _row_bytes(self, cut: Cut) -> int:
        return cut.num_kv_heads * cut.head_dim * self.settings.dtype.itemsize

    def _views(self, scratch: torch.Tensor, cut: Cut, num_keys: int) -> LayerKV:
        size, shape = num_keys * self._row_bytes(cut), (num_keys, cut.num_kv_heads, cut.head_dim)
        k, v = (scratch[at : at + size].view(self.settings.dtype).view(shape) for at in (0, size))
        return LayerKV(k, v)


def planned(pool: Pool[Wrapper], cut: Cut, pages: PageLists) -> Lease[Wrapper]:
    """A wrapper with that plan."""
    lease = pool.lease()
    lease.item.plan(cut, pages)
    return lease


def _planned_ragged(pool: Pool[RaggedWrapper], cut: Cut, q_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> Lease[RaggedWrapper]:
    lease = pool.lease()
    lease.item.plan(cut, q_indptr, kv_indptr)
    return lease
