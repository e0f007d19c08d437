"""Where the rows of a captured verification begin, where how many guesses of the step before are right is not told yet.

    host      lays each request out where it begins if all that may be wrong are: `behind` positions before the item's start
              slots     [ s0 s1 s2 s3 | s4 s5 s6 s7 ]   of its rows there, and of as many positions behind them
    device    moved     = behind - wrong                of the step before, by seat
              positions + moved, slots[moved : moved + L], kv_lens behind the last row

So such a step can be launched before the one in front of it is told. Its plan is for the longest lengths that there may be.

R requests of L rows each, T = R L; P columns of the page table.
"""

from __future__ import annotations

import numpy as np
import torch

from enginery.attention.axes import renewed
from enginery.contracts.batch import FULL, ForwardBatch, View


def at_the_earliest(batch: ForwardBatch, behind: int, *, page_size: int) -> tuple[ForwardBatch, torch.Tensor]:
    """A batch that verifies with its rows `behind` positions before where they are, and the slots behind those; host, [T] int64."""
    count, length, view = batch.num_requests, batch.decode_len, batch.pages
    begins = batch.kv_lens_cpu.numpy().astype(np.int64) - length - behind
    places = np.maximum(begins[:, None] + np.arange(2 * length), 0)
    columns, offsets = np.divmod(places, page_size)
    table = view.page_table_cpu.numpy()
    pages = table[np.arange(count)[:, None], np.minimum(columns, table.shape[1] - 1)].astype(np.int64)  # [R, 2 L]
    slots, later = np.split(pages * page_size + offsets, 2, axis=1)
    there = View(slots=torch.from_numpy(slots.ravel()), page_table_cpu=view.page_table_cpu)
    earlier = renewed(batch, positions=(batch.positions - behind).clamp(min=0), views={**batch.views, FULL: there})
    return earlier, torch.from_numpy(later.ravel())


def move_on(
    batch: ForwardBatch, later: torch.Tensor, *, behind: torch.Tensor, wrong: torch.Tensor, out: torch.Tensor, most_positions: int
) -> None:
    """Bring the batch's rows to where they begin: its positions, slots and `kv_lens` are written. Device work only.

    later: [T], see `at_the_earliest`. behind: [R] int64, 0 of a request that is where it begins. wrong: [R] int64, of its guesses
    in the step before. out: [R] int64, how far it was moved. most_positions: what lies further is a row that nobody is told.
    """
    shape = batch.num_requests, batch.decode_len
    slots, positions = batch.pages.slots.view(shape), batch.positions.view(shape)
    moved = torch.clamp(behind - wrong, min=0, out=out)[:, None]
    places = torch.arange(shape[1], device=moved.device) + moved
    torch.gather(torch.cat((slots, later.view(shape)), 1), 1, places, out=slots)
    positions.add_(moved).clamp_(max=most_positions - 1)
    torch.add(positions[:, 0], shape[1], out=batch.kv_lens)
