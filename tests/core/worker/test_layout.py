"""Steps as values: packed, unpacked and laid out by a worker that has seen nothing else, they give what whole page tables gave."""

from __future__ import annotations

import dataclasses
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from core.schedule.device import Scheduled, asked_of, output_of, run_step, scheduler_of
from core.schedule.test_random_use import RandomUse
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import examples

from enginery.attention.axes import pad, token_fields
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, STATE, WINDOW, ForwardBatch, Phase
from enginery.contracts.step import Item, NewPages, Run, RunSizes, StepInput, Way, pack, unpack
from enginery.errors import Unsupported
from enginery.schedule import planner
from enginery.schedule.step import choose_way
from enginery.worker.layout import KNOWN, has_pending, lay_out, sampled_seats, token_sources
from enginery.worker.page_tables import PageTables

SEEN = Counter()
GEOMETRY = KVGeometry(pages={FULL: 9}, page_size=4, layers=(), dtype="float32", num_seats=4)


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


# What a worker does with a step


def step_of(*items: Item, number: int = 0, pages: dict[str, NewPages] | None = None, **changes: object) -> StepInput:
    ids = np.arange(100, 100 + sum(item.num_tokens for item in items), dtype=np.int32)
    fields = {"phase": Phase.PREFILL, "items": np.array(items, np.int32).tobytes(), "input_ids": ids.tobytes(), **changes}
    return StepInput(number=number, pages=pages or {}, **fields)


def new_pages(*rows: tuple[int, int, int, list[int]]) -> dict[str, NewPages]:
    """Seat, first column, drop before column, pages."""
    head = np.array([(seat, first, drop, len(pages)) for seat, first, drop, pages in rows], np.int32)
    return {FULL: NewPages(head.tobytes(), np.array([page for *_, pages in rows for page in pages], np.int32).tobytes())}


@pytest.fixture
def tables() -> PageTables:
    return PageTables(dataclasses.replace(GEOMETRY, pages={FULL: 50}, num_seats=3))


def item(seat: int, start: int, num_tokens: int, **changes: int) -> Item:
    usual = {"first_write": start, "num_logits": 1, "samples": 1}
    return Item(seat=seat, start=start, num_tokens=num_tokens, **usual | changes)


def test_rows_whose_page_is_shared_already_write_to_scratch_and_read_it(tables: PageTables) -> None:
    step = step_of(item(1, 2, 5, first_write=5), pages=new_pages((1, 0, 0, [7, 9])))
    tables.take(step)
    batch = lay_out(step, tables)
    assert batch.pages.slots.tolist() == [50 * 4 + 2, 50 * 4 + 3, 50 * 4 + 0, 9 * 4 + 1, 9 * 4 + 2]
    assert batch.page_table_cpu.tolist() == [[7, 9]]
    assert batch.positions.tolist() == [2, 3, 4, 5, 6]


def test_a_first_column_of_0_begins_a_request_anew_and_released_seats_are_empty(tables: PageTables) -> None:
    tables.take(step_of(number=0, pages=new_pages((0, 0, 0, [1, 2, 3]), (1, 0, 0, [4, 5]))))
    tables.take(step_of(number=1, pages=new_pages((0, 0, 0, [6]))))
    assert tables.full.of(np.array([0, 1, 2]), 3).tolist() == [[6, 50, 50], [4, 5, 50], [50, 50, 50]]
    tables.take(step_of(number=2, released=np.array([1], np.int32).tobytes()))
    assert tables.full.of(np.array([1]), 3).tolist() == [[50, 50, 50]]


def test_pages_that_are_given_up_are_scratch_from_then_on(tables: PageTables) -> None:
    tables.take(step_of(number=0, pages=new_pages((0, 0, 0, [1, 2, 3]))))
    tables.take(step_of(number=1, pages=new_pages((0, 3, 2, [8]))))
    assert tables.full.of(np.array([0]), 5).tolist() == [[50, 50, 3, 8, 50]]


def test_tables_widen_with_the_longest_request(tables: PageTables) -> None:
    pages = list(range(300))
    tables.take(step_of(number=0, pages=new_pages((2, 0, 0, pages))))
    assert tables.full.of(np.array([2]), 300).tolist() == [pages]
    assert tables.full.of(np.array([0]), 900).tolist() == [[50] * 900]


@pytest.mark.parametrize("window", [None, 7])
def test_the_step_of_a_lane_without_work_is_all_padding(window: int | None) -> None:
    """Which has a page table, so that what it is given to attend can be read."""
    pages = {FULL: 9, STATE: 4} if window is None else {FULL: 9, WINDOW: 7, STATE: 4}
    geometry = dataclasses.replace(GEOMETRY, pages=pages)
    tables = PageTables(geometry)
    batch = lay_out(StepInput(number=0, phase=Phase.IDLE, padded=(2, 5)), tables)
    assert (batch.num_requests, batch.num_tokens, batch.phase) == (0, 0, Phase.IDLE)
    padded = pad(batch, num_requests=2, num_tokens=5, geometry=geometry)
    for kind in pages.keys() - {STATE}:
        view = padded.views[kind]
        assert view.page_table_cpu.tolist() == [[pages[kind]]] * 2
        assert view.slots.tolist() == [pages[kind] * 4] * 5
    assert padded.q_lens_cpu.tolist() == [0, 0]
    assert padded.seats_cpu.tolist() == [GEOMETRY.num_seats] * 2


def test_a_step_that_is_not_the_next_one_is_refused(tables: PageTables) -> None:
    tables.take(step_of(number=0))
    for wrong in (0, 2):
        with pytest.raises(AssertionError, match=f"step {wrong} came where step 1 was expected"):
            tables.take(step_of(number=wrong))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"adapter": 0}, "adapters"),
        ({"parents": b"\0\0\0\0"}, "tree parents"),
    ],
    ids=str,
)
def test_what_this_worker_does_not_run_is_refused_by_name(tables: PageTables, changes: dict[str, object], named: str) -> None:
    asked = item(0, 0, 2, adapter=changes.pop("adapter", -1))
    step = step_of(asked, pages=new_pages((0, 0, 0, [1])), **changes)
    tables.take(step)
    with pytest.raises(Unsupported, match=named):
        lay_out(step, tables)


def test_a_prompt_s_state_is_kept_amid_it_as_the_step_says(tables: PageTables) -> None:
    step = step_of(item(0, 0, 2), pages=new_pages((0, 0, 0, [1])), states=np.array([7, 3, 5, 1], "<i4").tobytes())
    tables.take(step)
    states = lay_out(step, tables).states
    assert (states.checkpoints_cpu, states.checkpoint_rows_cpu) != (None, None)
    assert [each.tolist() for each in (states.reads_cpu, states.writes_cpu)] == [[7], [3]]
    assert [states.checkpoints_cpu.tolist(), states.checkpoint_rows_cpu.tolist()] == [[5], [1]]


def test_another_kind_of_memory_is_refused_by_name(tables: PageTables) -> None:
    with pytest.raises(Unsupported, match="'window'"):
        tables.take(step_of(pages={"window": NewPages(b"", b"")}))


# How a step runs


SIZES = RunSizes(graphs=(1, 4, 8), pieces=(64, 128))


@pytest.mark.parametrize(
    ("phase", "count", "tokens", "embeds", "expected"),
    [
        (Phase.DECODE, 3, 3, False, (Way.GRAPH, 4)),
        (Phase.DECODE, 8, 8, False, (Way.GRAPH, 8)),
        (Phase.DECODE, 9, 9, False, (Way.EAGER, 0)),
        (Phase.DECODE, 3, 3, True, (Way.EAGER, 0)),
        (Phase.MIXED, 3, 65, False, (Way.PIECES, 128)),
        (Phase.PREFILL, 1, 64, True, (Way.PIECES, 64)),
        (Phase.PREFILL, 1, 129, False, (Way.EAGER, 0)),
    ],
)
def test_the_smallest_graph_that_is_enough_is_chosen(
    phase: Phase, count: int, tokens: int, *, embeds: bool, expected: tuple[Way, int]
) -> None:
    assert choose_way(phase, count, tokens, sizes=SIZES, embeds=embeds) == expected
    assert choose_way(phase, count, tokens, sizes=RunSizes(), embeds=embeds) == (Way.EAGER, 0)


def test_a_step_says_how_far_it_is_padded() -> None:
    scheduler = scheduler_of()
    for name in "abc":
        scheduler.submit(asked_of(name, [1, 2, 3], temperature=0))
    prefill = scheduler.next_step(SIZES)
    assert (prefill.value.run, prefill.value.padded) == (Run(Way.PIECES, 64, True, True), (3, 64))
    scheduler.complete(prefill, [1, 1, 1])
    decode = scheduler.next_step(SIZES)
    assert (decode.value.run, decode.value.padded) == (Run(Way.GRAPH, 4, True, True), (4, 4))
    scheduler.complete(decode, [1, 1, 1])
    eager = scheduler.next_step()
    assert (eager.value.run, eager.value.padded) == (Run(Way.EAGER, 0, True, True), (3, 3))


def test_a_step_says_whether_anything_but_tokens_is_asked_for() -> None:
    for params, expected in (({}, True), ({"logprobs": 0}, False), ({"prompt_logprobs": 0}, False), ({"temperature": 1}, False)):
        scheduler = scheduler_of()
        scheduler.submit(asked_of("a", [1, 2, 3], **{"temperature": 0, **params}))
        assert scheduler.next_step(SIZES).value.run.tokens_only is expected


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({"temperature": 0}, [True, True, True]),
        ({"temperature": 1}, [False, False, False]),
        ({"temperature": 0, "frequency_penalty": 0.5}, [False, False, False]),
        ({"temperature": 0, "logit_bias": {5: 1.0}}, [False, False, False]),
        ({"temperature": 0, "min_tokens": 2}, [False, False, True]),
    ],
    ids=str,
)
def test_a_step_says_whether_every_token_is_simply_the_best(params: dict[str, object], greedy: list[bool]) -> None:
    scheduler = scheduler_of()
    scheduler.submit(asked_of("a", [1, 2, 3], **params))
    scheduler.submit(asked_of("b", [4, 5, 6], temperature=0))
    said = []
    for _ in greedy:
        step = scheduler.next_step()
        said.append(step.value.run.greedy)
        scheduler.complete(step, [1, 1])
    assert said == greedy


# Results


def test_several_tokens_of_one_item_end_with_the_one_that_ends_the_request() -> None:
    from enginery.schedule.scheduler import Scheduler

    scheduler = scheduler_of()
    scheduler.submit(asked_of("a", [1, 2, 3], max_tokens=5))
    scheduler.submit(asked_of("b", [1, 2, 4], stop_token_ids=(9,)))
    scheduler.submit(asked_of("c", [1, 2, 5]))
    step = scheduler.next_step()
    output = output_of(step.value, [None] * 3)
    output.token_ids[:] = [(7, 7, 7, 7, 7, 7), (8, 9, 8), ()]
    first, second = Scheduler.complete(scheduler, step.value, output)
    assert (first.request_id, first.token_ids, first.finish_reason) == ("a", (7, 7, 7, 7, 7), "length")
    assert (second.request_id, second.token_ids, second.finish_reason, second.stop_token_id) == ("b", (8, 9), "stop", 9)


def test_seats_that_are_given_back_are_told_once() -> None:
    from core.schedule.device import EOS, FakeDevice

    scheduler, device = scheduler_of(), FakeDevice(4)
    scheduler.submit(asked_of("a", [1, 2, 3]))
    scheduler.submit(asked_of("b", [1, 2, 4], ignore_eos=True))
    told = [step.value.released for step, _ in (run_step(scheduler, device, EOS) for _ in range(3))]
    assert [np.frombuffer(seats, np.int32).tolist() for seats in told] == [[], [0], []]
