"""Steps as values: packed, unpacked and laid out by a worker that has seen nothing else, they give what whole page tables gave."""

from __future__ import annotations

import dataclasses
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from core.schedule.device import Scheduled, asked_of, scheduler_of
from core.schedule.test_random_use import RandomUse
from core.worker.step_values import GEOMETRY
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import examples

from enginery.attention.axes import token_fields
from enginery.contracts.batch import FULL, ForwardBatch, Phase
from enginery.contracts.step import Item, NewPages, Run, StepInput, Way, pack, unpack
from enginery.schedule import planner
from enginery.worker.layout import KNOWN, has_pending, lay_out, sampled_seats, token_sources
from enginery.worker.page_tables import PageTables

SEEN = Counter()


def from_whole_tables(step: Scheduled, *, page_size: int, scratch_page: int) -> dict[str, list[object]]:
    """The batch as it was laid out from requests: every page table whole, every token from its request."""
    items, ids, positions, slots, sources = step.items, [], [], [], []
    kv_lens = [item.start + item.num_tokens for item in items]
    columns = -(-max(kv_lens) // page_size)
    for item, kv_len in zip(items, kv_lens, strict=True):
        pages, tokens = item.request.kv.pages, item.request.token_ids
        for position in range(item.start, kv_len):
            ids.append(0 if item.input_pending else tokens[position])
            positions.append(position)
            slots.append(pages[position // page_size] * page_size + position % page_size)
            sources.append(item.request.kv.seat if item.input_pending else KNOWN)
    return {
        "input_ids": ids,
        "positions": positions,
        "slots": slots,
        "q_lens_cpu": [item.num_tokens for item in items],
        "kv_lens_cpu": kv_lens,
        "page_table_cpu": [
            [*pages[:columns], *[scratch_page] * (columns - len(pages))] for pages in (item.request.kv.pages for item in items)
        ],
        "num_logits_cpu": [item.num_logits for item in items],
        "seats_cpu": [item.request.kv.seat for item in items],
        "sources": sources,
        "sampling": [index for index, item in enumerate(items) if item.samples],
        "sampled_seats": [item.request.kv.seat for item in items if item.samples],
    }


def laid_out(step: StepInput, tables: PageTables) -> dict[str, list[object]]:
    batch = lay_out(step, tables)
    per_request = ("q_lens_cpu", "kv_lens_cpu", "page_table_cpu", "num_logits_cpu", "seats_cpu")
    per_token = zip(("input_ids", "positions", "slots"), token_fields(batch), strict=True)
    fields: dict[str, torch.Tensor] = {**dict(per_token), **{name: vars_of(batch, name) for name in per_request}}
    assert batch.states.reads_cpu.tolist() == batch.states.writes_cpu.tolist() == batch.seats_cpu.tolist()
    assert all(values.dtype == (torch.int32 if name.endswith("_cpu") else torch.int64) for name, values in fields.items())
    assert batch.phase is step.phase
    return {
        **{name: values.tolist() for name, values in fields.items()},
        "sources": token_sources(step, width=1).tolist(),
        "sampling": step.sampling.tolist(),
        "sampled_seats": sampled_seats(step).tolist(),
    }


def vars_of(batch: ForwardBatch, name: str) -> torch.Tensor:
    return dict(zip([name], [getattr(batch, name)], strict=True))[name]


class LaidOut(RandomUse):
    """Each step also goes to a worker, as bytes."""

    def __init__(self, seed: int, depth: int) -> None:
        super().__init__(seed, depth)
        self.tables = PageTables(
            dataclasses.replace(
                GEOMETRY, pages={FULL: self.num_pages}, page_size=self.page_size, num_seats=self.limits["max_batch_requests"]
            )
        )
        self.seats_begun: Counter[int] = Counter()

    def check_step(self, step: Scheduled, running: list[object]) -> None:
        super().check_step(step, running)
        if not step.items:
            return
        value = unpack(pack(step.value))
        self.tables.take(value)
        expected = from_whole_tables(step, page_size=self.page_size, scratch_page=self.num_pages)
        assert laid_out(value, self.tables) == expected
        assert has_pending(value) == any(item.input_pending for item in step.items)
        if new := value.pages.get(FULL):
            for seat, first, *_ in np.frombuffer(new.rows, np.int32).reshape(-1, 4).tolist():
                SEEN["seat used again"] += first == 0 and self.seats_begun[seat] > 0
                SEEN["grown"] += first > 0
                self.seats_begun[seat] += first == 0
        SEEN["preempted"] += len(step.preempted)
        SEEN["pending"] += has_pending(value)
        SEEN["mixed"] += value.phase is Phase.MIXED

    def abort(self) -> None:
        SEEN["aborted"] += 1
        super().abort()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_as_deltas_lay_out_like_whole_tables(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()

    @settings(max_examples=examples(60), deadline=None)
    @given(seed=st.integers(0, 2**32), headroom=st.sampled_from([0, 32]))
    def run(seed: int, headroom: int) -> None:
        monkeypatch.setattr(planner, "HEADROOM_TOKENS", headroom)
        monkeypatch.setattr(planner, "MIN_PREFILL_TOKENS", 2)
        monkeypatch.setattr(planner, "MIXED_ROWS", 2)
        use = LaidOut(seed, depth)
        for _ in range(100):
            use.act()
        use.finish()

    seldom = ["seat used again", "grown", "preempted", "aborted", "mixed", *(["pending"] if depth > 1 else [])]
    for _ in range(5):  # chance may leave one of them out
        run()
        if all(SEEN[what] for what in seldom):
            return
    pytest.fail(f"not all of {seldom} came about: {SEEN}")


ITEMS = st.lists(st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * len(Item._fields)), max_size=5)
BYTES = st.binary(max_size=12)


@given(
    items=ITEMS,
    number=st.integers(0, 2**40),
    phase=st.sampled_from(Phase),
    run=st.builds(Run, st.sampled_from(Way), st.integers(0, 9), st.booleans()),
    pages=st.dictionaries(st.text(max_size=6), st.builds(NewPages, BYTES, BYTES), max_size=2),
    inputs=st.dictionaries(st.text(max_size=6), BYTES, max_size=2),
    rest=st.tuples(*[BYTES] * 5),
)
def test_a_step_comes_back_as_it_was_packed(
    items: list[tuple[int, ...]],
    number: int,
    phase: Phase,
    run: Run,
    pages: dict[str, NewPages],
    inputs: dict[str, bytes],
    rest: tuple[bytes, ...],
) -> None:
    states, released, embedding, parents, input_ids = rest
    step = StepInput(
        number=number,
        phase=phase,
        run=run,
        padded=(3, 4),
        num_decode=2,
        items=np.array(items, np.int32).tobytes(),
        input_ids=input_ids,
        pages=pages,
        states=states,
        released=released,
        embedding=embedding,
        parents=parents,
        inputs=inputs,
    )
    again = unpack(pack(step))
    assert msgspec.structs.astuple(again) == msgspec.structs.astuple(step)
    assert again.each() == [Item(*row) for row in items]
    assert again.num_items == len(items)


def test_what_is_no_step_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        unpack(b"\x93\x01\x02\x03")


def test_a_step_of_256_decoding_requests_takes_about_10_kB() -> None:
    scheduler = scheduler_of(
        num_pages=8192, page_size=16, max_model_len=4096, max_batch_tokens=8192, max_batch_requests=256, max_queued_requests=300
    )
    for number in range(256):
        scheduler.submit(asked_of(f"r{number}", range(number, number + 20), max_tokens=100))
    step, frames = scheduler.next_step(), []
    for _ in range(40):
        following = scheduler.next_step()  # its inputs are pending
        frames.append(len(pack(following.value)))
        scheduler.complete(step, [1 if item.samples else None for item in step.items])
        step = following
    assert step.num_decode == 256
    assert sorted(frames)[len(frames) // 2] < 10_000
    assert max(frames) < 15_000  # all requests begin a page at once
