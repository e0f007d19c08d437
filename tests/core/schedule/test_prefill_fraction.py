"""How many prompt tokens join decoding requests: a part of those that wait; of few, equal parts that make steps of up to 512 rows;
and what fills a tile of 128 rows."""

import pytest

from enginery.contracts.step import RunSizes, Way
from enginery.schedule import planner
from enginery.schedule.planner import BatchPlanner
from enginery.schedule.step import agreed

from .device import FakeDevice, asked_of, run_step, scheduler_of

LARGE = {"page_size": 64, "num_pages": 1024, "max_model_len": 32768, "max_batch_tokens": 8192, "max_batch_requests": 256}


def beside_a_stream(*prompt_lens, streams=1, **changes):
    """Prompt tokens of each step from when the prompts arrive until the last one's first token."""
    scheduler, device = scheduler_of(**(LARGE | changes)), FakeDevice(LARGE["page_size"])
    for number in range(streams):
        scheduler.submit(asked_of(f"stream {number}", [number], max_tokens=1000))
    if streams:
        run_step(scheduler, device)
    for number, length in enumerate(prompt_lens):
        scheduler.submit(asked_of(f"prompt {number}", range(1000 * number, 1000 * number + length), max_tokens=1000))
    taken = []
    while sum(taken) < sum(prompt_lens):
        step, _ = run_step(scheduler, device)
        assert step.num_decode >= streams, "a stream stands still"
        assert sum(taken) + step.num_prefill_tokens == sum(prompt_lens) or not streams or step.num_tokens % 128 == 0
        taken.append(step.num_prefill_tokens)
    return taken


def test_a_long_prompt_joins_in_parts_that_shrink_with_what_is_left_of_it():
    taken = beside_a_stream(16384, streams=3, prefill_fraction=0.25)
    left, parts = 16384, []
    while left:
        equal = -(-left // -(-left // 509))
        rows = (left // 4 if left // 4 > 509 else equal) + 3
        parts.append(min(left, -(-rows // 128) * 128 - 3))
        left -= parts[-1]
    assert taken == parts
    assert taken[0] == 4096 + 125
    assert taken[-2] == 512 - 3


def test_prompts_in_the_queue_count_as_those_in_progress_do():
    assert beside_a_stream(*[1024] * 8, prefill_fraction=0.25)[0] == beside_a_stream(8192, prefill_fraction=0.25)[0] == 2175


def test_short_prompts_join_at_once():
    assert beside_a_stream(100, 200, 207, streams=5, prefill_fraction=0.125) == [507]


def test_few_prompt_tokens_join_in_equal_parts_of_steps_that_are_not_long():
    assert beside_a_stream(512, streams=5, prefill_fraction=0.125) == [379, 133]
    assert beside_a_stream(400, 400, streams=100, prefill_fraction=0.125) == [412, 388]


def test_many_that_decode_leave_room_for_prompts(monkeypatch):
    monkeypatch.setattr(planner, "MIXED_ROWS", 100)
    assert beside_a_stream(1000, streams=90, prefill_fraction=0.01)[0] == 3 * 128 - 90, "256, and what fills a tile"


@pytest.mark.parametrize(("streams", "fraction"), [(0, 0.125), (3, 1.0)])
def test_the_whole_budget_is_taken_where_nobody_decodes_or_the_fraction_is_one(streams, fraction):
    assert beside_a_stream(8192 - streams, 300, streams=streams, prefill_fraction=fraction)[0] == 8192 - streams


def test_the_budget_of_a_step_holds_for_any_fraction():
    assert beside_a_stream(2000, streams=3, prefill_fraction=1.0, max_batch_tokens=128)[0] == 125


def test_rows_that_verify_guesses_fill_tiles_with_the_prompt_and_run_in_pieces_with_it():
    """Those of padding too: all have as many as the one with most guesses."""
    scheduler, device = scheduler_of(**LARGE, prefill_fraction=0.05), FakeDevice(LARGE["page_size"])
    for number in range(3):
        scheduler.submit(asked_of(f"stream {number}", [number], max_tokens=1000))
    run_step(scheduler, device)
    scheduler.submit(asked_of("prompt", range(2000)))
    built = BatchPlanner(scheduler.table, scheduler.settings, {"stream 0": (7, 8, 9), "stream 1": (7,)}).fill()
    step = scheduler.begin(built, agreed([built], RunSizes(graphs=(4,), pieces=(384, 511, 512, 768), verified_rows=16)))
    assert step.decode_len * step.num_decode == 12
    assert (step.num_tokens, int(step.rows.sum())) == (512 - 5, 512)
    assert (step.run.way, step.run.size) == (Way.PIECES, 512)
