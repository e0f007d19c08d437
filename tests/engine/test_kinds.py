"""Models with windows through the real engine: pages behind a window are freed and reused, and no token changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from engine.rank_threads import on_threads
from engine.test_kinds_at_random import CONFIGS as OF_KINDS
from pairwise import crossed, in_turn
from parity.engine_driver import assert_greedy, generate, greedy, options
from parity.oracle import Oracle, shape
from transformers import Gemma2Config, MistralConfig

from enginery.contracts.batch import FULL, STATE, WINDOW
from enginery.engine import build
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.memory_plan import MemoryPlan

CONFIGS = {
    "gemma": Gemma2Config(
        **shape(head_dim=16, sliding_window=16, query_pre_attn_scalar=24, layer_types=["sliding_attention", "full_attention"] * 2)
    ),
    "mistral": MistralConfig(**shape(sliding_window=12)),
}


@pytest.fixture(params=sorted(CONFIGS))
def oracle(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle(f"window {request.param}", CONFIGS[request.param])


def with_windows(patch: pytest.MonkeyPatch, num_pages: int) -> None:
    """So many window pages, whatever memory there is."""
    original = build.plan_memory

    def plan(*args: object, **kwargs: object) -> MemoryPlan:
        return dataclasses.replace(original(*args, **kwargs), window_pages=num_pages)  # type: ignore[arg-type]

    patch.setattr(build, "plan_memory", plan)


@in_turn(
    ("page_size, chunk", crossed([1, 16], [16, 4096])),
    ("overlap, micro_batches", [(False, False), (True, True), (True, False), (False, True)]),
)
def test_64_greedy_tokens_are_equal_the_first_time_and_again(
    write_oracle: Callable[..., Oracle], registry: Registry, *, page_size: int, chunk: int, overlap: bool, micro_batches: bool
) -> None:
    oracle = write_oracle("window gemma", CONFIGS["gemma"])
    asked = options(
        oracle,
        page_size=page_size,
        num_pages=6400 // page_size,
        max_batch_tokens=chunk,
        max_batch_requests=7,
        overlap=overlap,
        micro_batches=micro_batches,
    )
    engine = Engine.build(asked, registry)
    for _ in range(2):
        assert_greedy(oracle, generate(engine, oracle.prompts))
    pages = engine.meter.stats().pages[WINDOW]
    assert pages.free + pages.cached == pages.total


def test_the_same_prompt_goes_on_from_its_last_page_and_a_next_turn_from_its_answers(oracle: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(oracle, overlap=True), registry)
    prompt, found = oracle.prompts[5], []
    answer: list[int] = []
    for ids in (prompt, prompt):
        engine.submit(greedy("a", ids))
        outputs = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
        answer = [token for output in outputs for token in output.token_ids]
        assert_greedy(oracle, [answer], [ids])
        found.append(outputs[-1].num_cached_tokens)
    assert found == [0, (len(prompt) - 1) // 16 * 16]
    turn = [*prompt, *answer, 7, 8]
    engine.submit(greedy("a", turn, max_tokens=1))
    outputs = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
    assert outputs[-1].num_cached_tokens == (len(prompt) + len(answer) - 1) // 16 * 16


def test_few_window_pages_preempt_and_change_no_token(oracle: Oracle, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    with_windows(monkeypatch, 9)
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    asked = options(oracle, max_batch_tokens=64, max_batch_requests=7, prefix_cache=False)
    engine = Engine.build(asked, registry)
    assert_greedy(oracle, generate(engine, oracle.prompts))
    stats = engine.meter.stats()
    assert stats.pages[WINDOW].total == 9
    assert stats.num_preempted > 0


def test_a_long_request_holds_no_more_than_its_window(oracle: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(oracle, page_size=4, max_batch_tokens=8, prefix_cache=False), registry)
    engine.submit(greedy("a", oracle.prompts[5], max_tokens=100))
    most = 0
    while engine.has_work:
        engine.step()
        pages = engine.meter.stats().pages[WINDOW]
        most = max(most, pages.total - pages.free)
    assert 0 < most <= 4 + 2 + 2  # in reach, around the chunk, the chunk


@pytest.mark.parametrize(("name", "kind"), [("kimi_linear", STATE), ("gemma2", WINDOW)])
def test_stages_that_lack_a_kind_of_memory_leave_the_others_as_many_pages(
    write_oracle: Callable[..., Oracle], registry: Registry, name: str, kind: str
) -> None:
    """Four stages of a layer each, in memory of one kind; then the same prompts from the cache."""
    oracle, totals = write_oracle(f"random {name}", OF_KINDS[name]), []
    for stages in (1, 4):
        with on_threads(options(oracle, num_pages=60, pp=stages), registry) as (engine, _):
            prompts = oracle.prompts[4:6]
            for _ in range(2):
                told = generate(engine, prompts, max_tokens=6)
                assert told == [oracle.continue_greedily(prompt, 6, each) for prompt, each in zip(prompts, told, strict=True)]
            totals.append({kind: pages.total for kind, pages in engine.meter.stats().pages.items()})
            engine._scheduler.check_idle()
    assert totals[0] == totals[1]
    assert set(totals[0]) == {FULL, kind}
