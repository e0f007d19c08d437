"""Steps that decode or verify drafts in CUDA graphs: wrappers for each captured size and cut, page lists where they always are.

    int32, device    [ q_indptr | indptr | last_lens | indices ............................ ]    read by the graphs of all sizes
                       B + 1      B + 1    B           the largest page table, or what fits

Graphs run one at a time, each after the lists were copied for it, so all sizes share them. Where pages that requests share are read
once, a graph that decodes has the kernels for it always, and in a step where nothing is shared they are given no keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch

from enginery.api import Unsupported
from enginery_attn_flashinfer.contract import Wrapper
from enginery_attn_flashinfer.cuts import Cut, planned_requests
from enginery_attn_flashinfer.leases import Lease
from enginery_attn_flashinfer.pages import PageLists, Rows
from enginery_attn_flashinfer.plan import Front, Planner, SharedPart, scratch_bytes, split_off

MAX_INDICES: Final = 16 << 20  # 64 MiB
MAX_GROUPS: Final = 4
PREFIX_REQUESTS: Final = 2 * MAX_GROUPS + 1  # the groups and what is between them


class FixedLists:
    """Room for the lists of `max_requests` requests with `num_indices` pages."""

    def __init__(self, max_requests: int, num_indices: int, device: torch.device) -> None:
        self.num_indices = num_indices
        self._buffer = torch.zeros(3 * max_requests + 2 + num_indices, dtype=torch.int32, device=device)

    def of(self, num_requests: int) -> PageLists:
        """Views."""
        sizes = [num_requests + 1, num_requests + 1, num_requests, self.num_indices]
        packed = self._buffer[: sum(sizes)]
        q_indptr, indptr, last_lens, indices = torch.split(packed, sizes)
        return PageLists(q_indptr=q_indptr, indptr=indptr, last_lens=last_lens, indices=indices, packed=packed)

    def copy(self, pages: PageLists) -> None:
        """To where kernels read them."""
        if len(pages.indices) > self.num_indices:
            raise Unsupported(
                f"{pages.num_requests} requests with {len(pages.indices)} pages do not fit the page lists of captured steps, which "
                f"have {self.num_indices} entries; run this batch eagerly"
            )
        self._buffer[: len(pages.packed)].copy_(pages.packed, non_blocking=True)


class GraphState:
    """Memory for steps of up to `max_batch_size` requests and `max_rows` rows, and the wrappers of the sizes captured so far."""

    def __init__(
        self, planner: Planner, *, max_batch_size: int, max_rows: int, num_pages: int, device: torch.device, sharing: bool
    ) -> None:
        self.planner = planner
        self.max_batch_size, self.max_rows = max_batch_size, max_rows
        num_indices = min(max_batch_size * (num_pages + 1), MAX_INDICES)
        self._lists = FixedLists(max(max_batch_size, max_rows), num_indices, device)
        self._prefix: FixedLists | None = None
        if sharing and all(cut.window is None for cut in planner.cuts):
            self._prefix = FixedLists(PREFIX_REQUESTS, MAX_GROUPS * num_pages, device)
        sizes = [scratch_bytes(cut, shared=max_batch_size, decoding=max_batch_size) for cut in planner.cuts]
        self._scratch = torch.empty(max(sizes, default=0) if self._prefix else 0, dtype=torch.uint8, device=device)
        self._fronts: dict[tuple[int, int], dict[Cut, Front]] = {}

    def fronts(self, num_requests: int, length: int, workspace: torch.Tensor) -> dict[Cut, Front]:
        """Of that size, made at its first capture. length: rows of a request."""
        if num_requests > self.max_batch_size or num_requests * length > self.max_rows:
            raise Unsupported(
                f"a batch of {num_requests} requests of {length} rows is to be captured, but init_graph_state was told "
                f"{self.max_batch_size} requests and {self.max_rows} rows"
            )
        key = num_requests, length
        if key not in self._fronts:
            made = self._front if length == 1 else partial(self._verifying, length=length)
            self._fronts[key] = {cut: made(num_requests, workspace) for cut in self.planner.cuts}
        return self._fronts[key]

    def refresh(self, rows: Rows, length: int) -> None:
        """Copy the lists to where kernels read them, and plan again. length: rows of each request."""
        count, prefix = len(rows.q_lens), None
        fronts = self._fronts[count, length]
        if length > 1:
            rows = self._with_empty(rows, length)
        elif self._prefix is not None and _shares(count):
            groups = sorted(self.planner.groups(rows), key=lambda group: group.saved_pages)[-MAX_GROUPS:]
            groups.sort(key=lambda group: group.first)
            prefix_rows, first_pages = split_off(
                rows, groups, page_size=self.planner.page_size, first=0, last=count, num_requests=PREFIX_REQUESTS
            )
            rows, prefix = replace(rows, first_pages=first_pages), self.planner.lists(prefix_rows)
            self._prefix.copy(prefix)
        lists = self.planner.lists(rows)
        self._lists.copy(lists)
        for cut, front in fronts.items():
            if isinstance(front, SharedPart):
                assert prefix is not None
                front.prefix.item.plan(cut, prefix)
                front.decode.item.plan(cut, lists)
            else:
                front.item.plan(cut, lists)

    def _front(self, num_requests: int, workspace: torch.Tensor) -> Front:
        kernels = self.planner.kernels
        decode: Lease[Wrapper] = Lease(kernels.captured(workspace, self._lists.of(num_requests)))
        if self._prefix is None or not _shares(num_requests):
            return decode
        prefix: Lease[Wrapper] = Lease(kernels.captured_prefix(workspace, self._prefix.of(PREFIX_REQUESTS)))
        return SharedPart(first=0, last=num_requests, prefix=prefix, decode=decode, scratch=self._scratch)

    def _verifying(self, num_requests: int, workspace: torch.Tensor, *, length: int) -> Front:
        planned = planned_requests(self.planner.cuts, num_requests=num_requests, length=length)
        return Lease(self.planner.kernels.captured_verify(workspace, self._lists.of(planned)))

    def _with_empty(self, rows: Rows, length: int) -> Rows:
        """The requests, and behind them as many empty ones as the step is planned with."""
        count = len(rows.q_lens)
        more = planned_requests(self.planner.cuts, num_requests=count, length=length) - count
        q_lens, kv_lens = (np.pad(lens, (0, more)) for lens in (rows.q_lens, rows.kv_lens))
        return Rows(q_lens=q_lens, kv_lens=kv_lens, table=np.pad(rows.table, ((0, more), (0, 0))))


def _shares(num_requests: int) -> bool:
    """FlashInfer takes each request of a captured step to have a row."""
    return num_requests >= PREFIX_REQUESTS
