"""While nothing is guessed a draft model follows no step; what it then lacks costs guesses, and teaches nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine.draft_models import SELVES, asking, assert_told, by_itself, counts_of, embedded, prompt_of
from engine.small_pair import small_model
from engine.test_speculation import Told, answers_of
from parity.engine_driver import options
from parity.oracle import Oracle

from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.speculate.length import DraftLength

LONG = "Make a JSON record of this person: Ada is 36 years old, a pilot from Redmill who likes chess."


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is guessed next, as the test says: its last entry, until it is changed."""
    wanted = [0]
    monkeypatch.setattr(DraftLength, "of", lambda self, num_requests: wanted[-1])
    return wanted


def count_forwards(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each forward of the draft model, as they come."""
    assert engine._runner.draft_model is not None
    (module,), rows = engine._runner.draft_model._modules, list[int]()
    forward = module.forward

    def counted(batch: object, arrived: object) -> object:
        rows.append(batch.num_tokens)  # type: ignore[attr-defined]
        return forward(batch, arrived)

    monkeypatch.setattr(module, "forward", counted)
    return rows


def test_what_was_not_followed_changes_no_token_and_no_guess_for_others(
    write_oracle: Callable[..., Oracle], registry: Registry, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model drafts for itself. First nothing is guessed; then there is one that was not followed, and others that were."""
    oracle = write_oracle("self llama", SELVES["llama"])
    first, second, *others = [asking(f"{at}", oracle.prompts[place][:40]) for at, place in enumerate((0, 5, 2, 4))]
    expected = answers_of(Engine.build(options(oracle), registry), [first, second, *others])
    asked = by_itself(oracle, draft_length="auto", page_size=4, max_batch_tokens=24, prefix_cache=False)
    engine = Engine.build(asked, registry)
    rows = count_forwards(engine, monkeypatch)
    assert_told(answers_of(engine, [first]), {"0": expected["0"]})
    assert rows == []
    told = {each.request_id: Told() for each in (second, *others)}
    engine.submit(second)
    for turn in range(200):
        if turn == 12:
            lengths.append(3)
        if turn == 14:
            assert rows == [], "the only request was not followed, so it is not drafted"
            for each in others:
                engine.submit(each)
        for output in engine.step():
            told[output.request_id].tokens += output.token_ids
            told[output.request_id].reason = output.finish_reason
    assert_told(told, {about: expected[about] for about in told})
    by_request = counts_of(engine)
    assert 0 < by_request.accepted < by_request.drafted
    engine = Engine.build(asked, registry)
    assert_told(answers_of(engine, others), {each.request_id: expected[each.request_id] for each in others})
    assert counts_of(engine).accepted == counts_of(engine).drafted > 0


@pytest.mark.parametrize("drafter", ["eagle", "standalone"])
def test_after_requests_that_were_not_followed_guesses_are_as_right_as_ever(
    registry: Registry, lengths: list[int], drafter: str
) -> None:
    """Seats and pages are the same ones, and prompts come in chunks."""
    asked = small_model(drafter=drafter, max_batch_tokens=16, max_batch_requests=2, num_pages=24, prefix_cache=False)
    few = [asking(f"{at}", prompt_of(said)) for at, said in enumerate((LONG, "Name three colours."))]
    lengths.append(3)
    engine = Engine.build(asked, registry)
    expected, wanted = answers_of(engine, few), counts_of(engine)
    engine = Engine.build(asked, registry)
    lengths.append(0)
    assert_told(answers_of(engine, few[::-1]), expected)
    lengths.append(3)
    assert_told(answers_of(engine, few), expected)
    assert (counts_of(engine).drafted, counts_of(engine).accepted) == (wanted.drafted, wanted.accepted)


def test_what_is_run_over_again_is_forgotten_with_a_step_that_is_not_followed(registry: Registry, lengths: list[int]) -> None:
    """The seat's next request would find another's rows in front of its own."""
    engine = Engine.build(embedded(drafter="eagle", max_batch_tokens=16), registry)
    assert engine._runner.draft_model is not None
    kept = engine._runner.draft_model._tails._by_seat
    lengths.append(3)
    engine.submit(asking("first", prompt_of(LONG)))
    engine.step()
    assert list(kept) == [0]
    engine.abort("first")
    lengths.append(0)
    engine.submit(asking("second", prompt_of(LONG)))
    engine.step()
    engine.step()
    assert not kept


def test_rows_of_who_had_the_seat_before_are_not_run_over_again_where_another_goes_on_from_the_same_place(
    registry: Registry, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other finds its first page in the prefix cache; a row in front of its own would be written there."""
    engine = Engine.build(embedded(drafter="eagle", max_batch_tokens=16, max_batch_requests=2), registry)
    lengths.append(3)
    known, other = prompt_of(LONG), prompt_of("Name three colours, and then some more that are like them.")
    assert known[:16] != other[:16]
    answers_of(engine, [asking("known", known[:20])])
    engine.submit(asking("first", other))
    engine.step()
    assert engine._runner.draft_model is not None
    ((seat, kept),) = engine._runner.draft_model._tails._by_seat.items()
    assert kept.ends == (16, 16)
    engine.abort("first")
    rows = count_forwards(engine, monkeypatch)
    engine.submit(asking("second", (*known[:16], 99, 98, 97)))
    engine.step()
    assert engine.meter.stats().pages["full"].held == 2
    assert engine._scheduler.table.by_id["second"].kv.seat == seat
    assert rows[0] == 3, "its own rows behind the cached page"


def test_prompts_that_are_not_followed_get_no_more_rows_than_without_a_draft_model(
    registry: Registry, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows the last attention is computed for the last row alone, where the draft model would take all."""
    engine = Engine.build(embedded(drafter="eagle"), registry)
    shapes, launch = list[tuple[int, bool]](), engine._runner.launch

    def noting(step: object) -> object:
        launched = launch(step)  # type: ignore[arg-type]
        rows, hidden = launched.forwarded.rows, launched.forwarded.hidden
        shapes.append((0 if rows is None else len(rows), hidden is not None))
        return launched

    monkeypatch.setattr(engine._runner, "launch", noting)
    for length in (0, 3):
        lengths.append(length)
        answers_of(engine, [asking(f"{length}", (9 + length, *prompt_of(LONG)), max_tokens=1)])
    assert shapes == [(1, False), (1, True)]


def test_prompts_of_a_burst_are_followed_as_pays_with_all_of_it(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step has two of eight prompts, and two requests would be guessed for."""
    monkeypatch.setattr("enginery.speculate.length.FIRST_ON", {"cpu": ((2, 3),)})
    prompts = [(9 + at, *prompt_of(LONG)) for at in range(8)]
    room = 2 * len(prompts[0])
    engine = Engine.build(small_model(drafter="eagle", max_batch_tokens=room, prefill_fraction=1.0, max_batch_requests=8), registry)
    rows = count_forwards(engine, monkeypatch)
    answers_of(engine, [asking(f"{at}", prompt, max_tokens=3) for at, prompt in enumerate(prompts)])
    assert rows == []
    answers_of(engine, [asking("alone", prompts[0], max_tokens=3)])
    assert rows


def test_who_is_computed_again_is_followed_from_its_start(
    write_oracle: Callable[..., Oracle], registry: Registry, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was not followed is preempted. When it comes again guesses pay, and are right: all that it said is followed."""
    oracle = write_oracle("self llama", SELVES["llama"])
    first, second = (asking(f"{at}", oracle.prompts[place][:20], max_tokens=40) for at, place in enumerate((0, 5)))
    expected = answers_of(Engine.build(options(oracle), registry), [first, second])
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    small = {"page_size": 4, "num_pages": 20, "max_batch_tokens": 64, "max_model_len": 72, "prefix_cache": False}
    engine = Engine.build(by_itself(oracle, draft_length="auto", overlap=False, **small), registry)
    told = {each.request_id: Told() for each in (first, second)}

    def step() -> None:
        for output in engine.step():
            told[output.request_id].tokens += output.token_ids
            told[output.request_id].reason = output.finish_reason

    for each in (first, second):
        engine.submit(each)
    preempted = engine._scheduler.table.by_id["1"]
    while not preempted.num_preemptions:
        step()
    assert len(told["1"].tokens) > 10
    assert preempted.num_unfollowed > 10, "none of what it said was followed"
    engine.abort("0")
    lengths.append(3)
    while engine.has_work:
        step()
    assert told["1"].tokens == expected["1"].tokens
    assert counts_of(engine).accepted == counts_of(engine).drafted > 6
