"""Rows that the device moves to where they begin are laid out as they would be, had the host known."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enginery.attention.axes import renewed
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, Phase
from enginery.contracts.step import INT, NewPages, StepInput
from enginery.worker.layout import lay_out
from enginery.worker.page_tables import PageTables
from enginery.worker.paths.captured_step import at_the_earliest, move_on

PAGE_SIZE, NUM_PAGES = 4, 60


def step_of(starts: list[int], length: int) -> StepInput:
    """A verification of these requests, by seat, all of whose tokens are pending."""
    items = [(seat, start, length, start, length, 1, length - 1, length, -1) for seat, start in enumerate(starts)]
    return StepInput(
        number=0,
        phase=Phase.VERIFY,
        num_decode=len(starts),
        items=np.array(items, INT).tobytes(),
        decode_len=length,
    )


@settings(max_examples=60)
@given(
    length=st.integers(2, 5),
    starts=st.lists(st.integers(5, 30), min_size=1, max_size=4),
    wrong=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    data=st.data(),
)
def test_rows_lie_as_if_the_host_had_known(length: int, starts: list[int], wrong: list[int], data: st.DataObject) -> None:
    behind = data.draw(st.integers(0, length - 1))
    missed = np.minimum(wrong[: len(starts)], behind)
    tables = PageTables(KVGeometry(pages={FULL: NUM_PAGES}, page_size=PAGE_SIZE, layers=(), dtype="float32", num_seats=len(starts)))
    order, held = data.draw(st.permutations(range(NUM_PAGES))), [-(-(start + length) // PAGE_SIZE) for start in starts]
    rows = np.array([(seat, 0, 0, count) for seat, count in enumerate(held)], INT).tobytes()
    tables.full.add(NewPages(rows, np.array(order[: sum(held)], INT).tobytes()))
    known = lay_out(step_of([int(start - count) for start, count in zip(starts, missed, strict=True)], length), tables)
    batch, later = at_the_earliest(lay_out(step_of(starts, length), tables), behind, page_size=PAGE_SIZE)
    assert (batch.kv_lens_cpu >= known.kv_lens_cpu).all(), "it is planned for the longest"
    moved, begins = torch.empty(len(starts), dtype=torch.int64), torch.full((len(starts),), behind)
    batch = renewed(batch, kv_lens=torch.zeros(len(starts), dtype=torch.int32))
    move_on(batch, later, behind=begins, wrong=torch.from_numpy(missed), out=moved, most_positions=1000)
    assert moved.tolist() == [behind - count for count in missed.tolist()]
    assert batch.positions.tolist() == known.positions.tolist()
    assert batch.views[FULL].slots.tolist() == known.views[FULL].slots.tolist()
    assert batch.kv_lens.tolist() == known.kv_lens_cpu.tolist()


def test_a_request_that_is_where_it_begins_is_not_moved_and_none_goes_too_far() -> None:
    """Whatever its seat has of a step that is long told; positions behind the last one are those of rows that nobody is told."""
    tables = PageTables(KVGeometry(pages={FULL: NUM_PAGES}, page_size=PAGE_SIZE, layers=(), dtype="float32", num_seats=2))
    batch = renewed(lay_out(step_of([6, 9], 3), tables), kv_lens=torch.zeros(2, dtype=torch.int32))
    behind, moved = torch.tensor([0, 0]), torch.ones(2, dtype=torch.int64)
    move_on(batch, torch.zeros(6, dtype=torch.int64), behind=behind, wrong=torch.tensor([2, 0]), out=moved, most_positions=11)
    assert (moved.tolist(), batch.positions.tolist()) == ([0, 0], [6, 7, 8, 9, 10, 10])
