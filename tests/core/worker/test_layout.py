"""What a worker does with a step: its rows, page tables and seats, and how far it is padded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from core.schedule.device import asked_of, output_of, run_step, scheduler_of
from core.worker.step_values import GEOMETRY, item, new_pages, step_of

from enginery.attention.axes import pad
from enginery.contracts.batch import FULL, STATE, WINDOW, Phase
from enginery.contracts.step import NewPages, Run, RunSizes, StepInput, Way
from enginery.errors import Unsupported
from enginery.schedule.step import choose_way
from enginery.worker.layout import lay_out
from enginery.worker.page_tables import PageTables


@pytest.fixture
def tables() -> PageTables:
    return PageTables(dataclasses.replace(GEOMETRY, pages={FULL: 50}, num_seats=3))


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
