"""Requests of a batch that begin with the same pages, as the prefix cache lets them: found from their page tables alone.

    request 0   [ 7 | 3 | 9 | 4 ]
    request 1   [ 7 | 3 | 9 | 8 | 5 ]      0 and 1 share three pages, 2 shares none
    request 2   [ 6 | 2 ]

For attention backends, which import it from here. B requests, P columns of the page table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests [first, first + count) begin with the same `num_pages` pages, and none of them ends in one of those."""

    first: int
    count: int
    num_pages: int

    @property
    def saved_pages(self) -> int:
        return (self.count - 1) * self.num_pages


def shared_prefixes(page_table: Ints, kv_lens: Ints, *, page_size: int, min_tokens: int, min_requests: int) -> list[SharedPrefix]:
    """Disjoint runs of at least `min_requests` (2 or more) adjacent requests that share at least `min_tokens`, in order.

    page_table: [B, P], of which what lies past a request's last page is not read. kv_lens: [B].
    Together they save at least as many reads as any single run would. About 5 us where nothing is shared.
    """
    least = max(1, -(-min_tokens // page_size))
    if len(kv_lens) < min_requests or page_table.shape[1] < least:
        return []
    probed = page_table[:, least - 1]
    linked = probed[1:] == probed[:-1]
    if not linked.any():
        return []
    usable = (kv_lens - 1) // page_size
    usable = np.minimum(usable[1:], usable[:-1])
    linked &= usable >= least
    if not linked.any():
        return []
    columns = int(usable[linked].max())
    same = page_table[1:, :columns] == page_table[:-1, :columns]  # [B - 1, columns]
    alike = same.argmin(1)
    alike = np.where(same[np.arange(len(same)), alike], columns, alike)
    common = np.zeros(len(kv_lens), dtype=np.int64)
    common[:-1] = np.where(linked & (alike >= least), np.minimum(alike, usable), 0)
    return _best_runs(common, min_requests=min_requests)


def _best_runs(common: npt.NDArray[np.int64], *, min_requests: int) -> list[SharedPrefix]:
    """common: [B], pages that each request shares with the next; 0 where too few.

    All requests of a stretch share what its least alike pair does. A stretch is one run, or the best of what is left when it is cut
    at its least alike pairs, whichever saves more; one pass with a stack of the stretches that have not ended.
    """
    stack: list[tuple[int, int, list[SharedPrefix]]] = [(0, 0, [])]  # least pages of a pair, first request, runs found
    changes = np.flatnonzero(np.diff(common, prepend=-1))
    for pair, num_pages in zip(changes.tolist(), common[changes].tolist(), strict=True):
        first, runs = pair, list[SharedPrefix]()
        while stack[-1][0] > num_pages:
            pages, first, inside = stack.pop()
            runs = inside + runs
            whole = SharedPrefix(first, pair - first + 1, pages)
            if whole.count >= min_requests and whole.saved_pages >= sum(run.saved_pages for run in runs):
                runs = [whole]
        if stack[-1][0] < num_pages:
            stack.append((num_pages, first, runs))
        else:
            stack[-1][2].extend(runs)
    return stack[0][2]
