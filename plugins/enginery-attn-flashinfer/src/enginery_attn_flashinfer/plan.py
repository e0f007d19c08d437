"""Planning of one batch: wrappers are leased, and planned from the batch's host tensors.

requests   [ 0 .. decoding, one row each .. | others, as long as they have rows | empty ones ]
kernels    [ decode                         | prefill, see `prefill.py`         ]
or, of requests whose drafts are verified, with as many rows each
kernels    [ verify                         | prefill ]
or, with shared pages          [ prefix: rows 4 .. 9 over pages that all of them have, merged with what decode finds in the rest ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from enginery.api import ForwardBatch, ForwardPlan, PlanKey, WorkspaceArena
from enginery.kv.shared_prefixes import Ints, SharedPrefix, shared_prefixes
from enginery_attn_flashinfer.contract import Kernels, KernelSettings, RaggedWrapper, Wrapper
from enginery_attn_flashinfer.cuts import Cut
from enginery_attn_flashinfer.leases import Lease, Pool
from enginery_attn_flashinfer.pages import PageLists, Rows, page_lists
from enginery_attn_flashinfer.prefill import PrefillPart, PrefillPlanner, planned

MIN_SHARING: Final = 4  # requests


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedPart:
    """prefix: rows [first, last) over pages that groups of them share. decode: all rows over their other pages. scratch: uint8."""

    first: int
    last: int
    prefix: Lease[Wrapper]
    decode: Lease[Wrapper]
    scratch: torch.Tensor


Front = Lease[Wrapper] | SharedPart


@dataclass(frozen=True, kw_only=True, eq=False)
class CutPlan:
    """What runs for one cut. front: for the decoding rows. prefill: for the others."""

    front: Front | None
    prefill: PrefillPart | None


@dataclass(frozen=True, kw_only=True, eq=False)
class FlashInferPlan(ForwardPlan):
    """num_decoding, num_rows: the rows at the front, which decode or verify drafts, and all that belong to a request."""

    cuts: Mapping[Cut, CutPlan]
    num_decoding: int
    num_rows: int


class StreamWrappers:
    """The wrappers that share one workspace."""

    def __init__(self, kernels: Kernels, workspace: torch.Tensor) -> None:
        self.decode: Pool[Wrapper] = Pool(lambda: kernels.decode(workspace))
        self.verify: Pool[Wrapper] = Pool(lambda: kernels.verify(workspace))
        self.prefill: Pool[Wrapper] = Pool(lambda: kernels.prefill(workspace))
        self.ragged: Pool[RaggedWrapper] = Pool(lambda: kernels.ragged(workspace))
        self.prefix: Pool[Wrapper] = Pool(lambda: kernels.prefix(workspace))


class Planner:
    """Plans eager batches. cuts: of the model's layers, each once. shared_tokens, gather_bytes: see `FlashInferOptions`."""

    def __init__(
        self,
        kernels: Kernels,
        cuts: Sequence[Cut],
        settings: KernelSettings,
        *,
        arena: WorkspaceArena,
        shared_tokens: int,
        gather_bytes: int,
    ) -> None:
        self.kernels = kernels
        self.cuts = tuple(cuts)
        self.arena = arena
        self.page_size = settings.page_size
        self.pinned = settings.device.type == "cuda"
        self.shared_tokens = shared_tokens
        self.prefill = PrefillPlanner(kernels, cuts, settings, arena=arena, gather_bytes=gather_bytes)
        self._streams: dict[int, StreamWrappers] = {}

    def plan(self, batch: ForwardBatch, key: PlanKey, workspace: torch.Tensor) -> FlashInferPlan:
        """workspace: of the stream that will run it."""
        wrappers = self._streams.get(workspace.data_ptr())
        if wrappers is None:
            wrappers = self._streams[workspace.data_ptr()] = StreamWrappers(self.kernels, workspace)
        q_lens, kv_lens, table = batch.q_lens_cpu.numpy(), batch.kv_lens_cpu.numpy(), batch.page_table_cpu.numpy()
        count = batch.num_decode_requests
        leading = Rows(q_lens=q_lens[:count], kv_lens=kv_lens[:count], table=table[:count])
        front = self._front(wrappers, leading) if batch.decode_len == 1 else self._verified(wrappers, leading)
        others = np.flatnonzero(q_lens[count:]) + count  # requests that only pad a batch may be empty
        prefill: dict[Cut, PrefillPart] = {}
        if len(others):
            rows = Rows(q_lens=q_lens[others], kv_lens=kv_lens[others], table=table[others])
            prefill = self.prefill.plan(wrappers.prefill, wrappers.ragged, rows)
        cuts = {cut: CutPlan(front=front.get(cut), prefill=prefill.get(cut)) for cut in self.cuts}
        return FlashInferPlan(key=key, cuts=cuts, num_decoding=count * batch.decode_len, num_rows=int(q_lens.sum()))

    def lists(self, rows: Rows) -> PageLists:
        """On the host."""
        return page_lists(rows, page_size=self.page_size, pinned=self.pinned)

    def groups(self, rows: Rows) -> list[SharedPrefix]:
        """Of decoding requests."""
        if not self.shared_tokens:
            return []
        return shared_prefixes(
            rows.table, rows.kv_lens, page_size=self.page_size, min_tokens=self.shared_tokens, min_requests=MIN_SHARING
        )

    def _verified(self, wrappers: StreamWrappers, rows: Rows) -> dict[Cut, Front]:
        """Of requests whose drafts are verified."""
        if not len(rows.q_lens):
            return {}
        lists = self.lists(rows)
        return {cut: planned(wrappers.verify, cut, lists) for cut in self.cuts}

    def _front(self, wrappers: StreamWrappers, rows: Rows) -> dict[Cut, Front]:
        """A window may hide a part of the shared pages, so layers with one decode as usual."""
        if not len(rows.q_lens):
            return {}
        groups = self.groups(rows)
        sharing = [cut for cut in self.cuts if cut.window is None] if groups else []
        whole = self.lists(rows) if len(sharing) < len(self.cuts) else None
        found: dict[Cut, Front] = {}
        if whole is not None:
            found |= {cut: planned(wrappers.decode, cut, whole) for cut in self.cuts if cut not in sharing}
        return found | self._shared(wrappers, rows, groups, sharing)

    def _shared(
        self, wrappers: StreamWrappers, rows: Rows, groups: Sequence[SharedPrefix], cuts: Sequence[Cut]
    ) -> dict[Cut, SharedPart]:
        if not cuts:
            return {}
        first, last = groups[0].first, groups[-1].first + groups[-1].count
        prefix_rows, first_pages = split_off(rows, groups, page_size=self.page_size, first=first, last=last)
        prefix, rest = self.lists(prefix_rows), self.lists(replace(rows, first_pages=first_pages))
        num_bytes = max(scratch_bytes(cut, shared=last - first, decoding=len(rows.q_lens)) for cut in cuts)
        scratch = self.arena.take("attention over shared pages", num_bytes, may_move=True)
        return {
            cut: SharedPart(
                first=first,
                last=last,
                prefix=planned(wrappers.prefix, cut, prefix),
                decode=planned(wrappers.decode, cut, rest),
                scratch=scratch,
            )
            for cut in cuts
        }


def split_off(
    rows: Rows, groups: Sequence[SharedPrefix], *, page_size: int, first: int, last: int, num_requests: int = 0
) -> tuple[Rows, Ints]:
    """One request per group, all its rows over its shared pages, one without keys for rows in no group; first_pages of the rest.

    Together they are the rows [first, last), and there are `num_requests` at least, the last ones empty.
    """
    first_pages = np.zeros_like(rows.kv_lens)
    parts: list[tuple[int, int, int]] = []  # first row, rows, pages
    end = first
    for group in (*groups, SharedPrefix(first=last, count=0, num_pages=0)):
        if group.first > end:
            parts.append((end, group.first - end, 0))
        end = group.first + group.count
        if group.count:
            parts.append((group.first, group.count, group.num_pages))
            first_pages[group.first : end] = group.num_pages
    parts += [(0, 0, 0)] * (num_requests - len(parts))
    starts, counts, pages = (np.array(column, dtype=np.int32) for column in zip(*parts, strict=True))
    return Rows(q_lens=counts, kv_lens=pages * np.int32(page_size), table=rows.table[starts]), first_pages


def scratch_bytes(cut: Cut, *, shared: int, decoding: int) -> int:
    """Of what `scratch_views` makes, with results of at most two bytes a value."""
    return cut.num_heads * (2 * cut.head_dim * shared + 4 * (decoding + shared))


def scratch_views(
    scratch: torch.Tensor, cut: Cut, *, shared: int, decoding: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result over shared pages [shared, H, D], log-sum-exps of decoding [decoding, H] and of the shared pages [shared, H]."""
    heads, values = cut.num_heads, shared * cut.num_heads * cut.head_dim * dtype.itemsize
    out = scratch[:values].view(dtype).view(shared, heads, cut.head_dim)
    lse = scratch[values : values + 4 * heads * (decoding + shared)].view(torch.float32).view(decoding + shared, heads)
    return out, lse[:decoding], lse[decoding:]
