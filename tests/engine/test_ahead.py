"""A verification that is scheduled while the one before it runs is the one that would have been scheduled afterwards."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
from engine.draft_models import SELVES, asking, assert_always_right, assert_told, by_itself, embedded, prompt_of
from engine.small_pair import small_model
from engine.test_device_drafts import MOST_ROWS, captured, requests_of, unread  # noqa: F401
from engine.test_speculation import Told, answers_of
from integrity import check_scheduler
from parity.engine_driver import options
from parity.oracle import Oracle

from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, RequestOutput
from enginery.contracts.step import Item, StepInput, StepOutput
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.schedule import ahead as scheduling
from enginery.schedule.request import Request
from enginery.worker.paths.path import Launched

SAID = ("Hello", "Tell me a story about a fox named Mia.", "Name three colours.", "What is 47 + 38?")
ASKED = {"drafter": "eagle", "draft_length": "3", "attention_backend": "torch", "num_pages": 120, "max_batch_requests": 16}


@pytest.fixture
def settled(unread: None, monkeypatch: pytest.MonkeyPatch) -> list[StepInput]:  # noqa: F811
    """The steps that were scheduled ahead, as they were launched."""
    found, settle = list[StepInput](), scheduling.settled

    def noting(ahead: StepInput, requests: list[Request], before: StepInput, output: StepOutput, *, is_launched: bool) -> StepInput:
        found.append(settle(ahead, requests, before, output, is_launched=is_launched))
        return found[-1]

    monkeypatch.setattr(scheduling, "settled", noting)
    return found


def overlapping(engine: Engine) -> Engine:
    """As on a device that is not the host."""
    engine._overlap = 1
    return engine


def built(asked: EngineOptions, registry: Registry, how: str) -> Engine:
    return overlapping(Engine.build(asked, registry) if how == "eager" else captured(asked, registry)[0])


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Greedy and drawn; some end at a stop token, others at their limits, of which one is the context's."""
    plain = requests_of([prompt_of(said) for said in SAID])
    drawn = asking("drawn", prompt_of(SAID[1]), temperature=0.8, seed=5, max_tokens=21)
    stops = asking("stops", prompt_of(SAID[2]), max_tokens=40)
    return [*plain, drawn, stops]


@pytest.fixture(scope="module")
def plainly(registry: Registry, requests: list[GenerationRequest]) -> dict[str, Told]:
    return answers_of(Engine.build(small_model(), registry), requests)


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_no_token_differs_and_most_steps_are_scheduled_ahead(
    settled: list[StepInput],
    registry: Registry,
    requests: list[GenerationRequest],
    plainly: dict[str, Told],
    *,
    how: str,
) -> None:
    engine = built(small_model(**ASKED), registry, how)
    assert_told(answers_of(engine, requests), plainly)
    assert len(settled) > 0.6 * engine.meter.num_steps
    assert engine.meter.stats().drafts.accepted > 0


def test_where_windows_have_pages_of_their_own_each_step_is_told_first(
    settled: list[StepInput], write_oracle: Callable[..., Oracle], registry: Registry
) -> None:
    """Which of those are needed follows from where a request goes on."""
    oracle = write_oracle("self gemma2", SELVES["gemma2"])
    requests = requests_of([oracle.prompts[index][:30] for index in (0, 5, 2)])
    engine = overlapping(Engine.build(by_itself(oracle, page_size=4, draft_length="3"), registry))
    assert_told(answers_of(engine, requests), answers_of(Engine.build(options(oracle), registry), requests))
    assert engine._scheduler._kv.finite.allocators
    assert engine.meter.stats().drafts.accepted > 0
    assert not settled


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_who_asks_for_no_guesses_has_none_ahead_either(settled: list[StepInput], registry: Registry, *, how: str) -> None:
    first, second = (asking(f"{at}", prompt_of(SAID[at]), max_tokens=20, speculation=at > 1) for at in (1, 2))
    expected = answers_of(Engine.build(small_model(), registry), [first, second])
    engine, told = built(small_model(**ASKED), registry, how), dict[str, list[RequestOutput]]()
    for each in (first, second):
        engine.submit(each)
    while engine.has_work:
        for output in engine.step():
            told.setdefault(output.request_id, []).append(output)
    assert len(settled) > 4
    assert {about: [token for each in found for token in each.token_ids] for about, found in told.items()} == {
        about: one.tokens for about, one in expected.items()
    }
    assert {about: sum(each.num_drafted for each in found) > 0 for about, found in told.items()} == {"1": False, "2": True}


@pytest.mark.parametrize("found_starts", [0, MOST_ROWS])
def test_right_guesses_are_right_at_the_end_of_a_context_too(
    settled: list[StepInput],
    write_oracle: Callable[..., Oracle],
    registry: Registry,
    *,
    found_starts: int,
) -> None:
    """Nothing lies behind the last position that there is, though a step is scheduled as if all before were right."""
    oracle = write_oracle("self llama", SELVES["llama"])
    requests = requests_of([oracle.prompts[index] for index in (0, 5, 2, 4)])
    longest = max(len(each.prompt_token_ids) + each.params.max_tokens for each in requests)
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    asked = by_itself(oracle, page_size=4, draft_length="3", num_pages=200, max_model_len=longest)
    engine, ran = overlapping(captured(asked, registry, found_starts=found_starts)[0]), list[int]()
    launch = engine._runner.launch

    def noting(step: StepInput) -> Launched:
        launched = launch(step)
        if launched.forwarded.captured is not None:
            ran.append(int(launched.forwarded.captured.batch.positions.max()))
        return launched

    engine._runner.launch = noting  # type: ignore[method-assign]
    assert_told(answers_of(engine, requests), expected)
    assert_always_right(engine)
    assert len(settled) > 4
    columns = Item._fields.index("start"), Item._fields.index("num_tokens")
    ends = [sum(item[column] for column in columns) for step in settled for item in step.each()]
    assert (max(ends) < longest) is (found_starts == 0)
    assert max(ran) < longest


def untold(engine: Engine) -> list[bool]:
    """Of each step that verifies, from now on, whether it is launched before the one before it is told."""
    launch, found = engine._runner.launch, list[bool]()

    def noting(step: StepInput) -> Launched:
        if step.verifies:
            found.append(any("_output" not in vars(flight.running) for flight in engine._in_flight))
        return launch(step)

    engine._runner.launch = noting  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("wrong", [(0,), (0, 0, 1), (1,), (0, 1, 0, 0, 0, 2)])
def test_most_steps_are_launched_before_the_one_before_is_told(
    unread: None,  # noqa: F811
    write_oracle: Callable[..., Oracle],
    registry: Registry,
    wrong: tuple[int, ...],
) -> None:
    """Whatever is right: the device finds where each request goes on, on which page too."""
    oracle, shifts = write_oracle("self llama", SELVES["llama"]), itertools.cycle(wrong)
    requests = requests_of([oracle.prompts[index] for index in (0, 5, 2, 4)])
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    built, _, drafts = captured(by_itself(oracle, page_size=4, draft_length="3", num_pages=200), registry)
    assert drafts is not None
    engine, guess = overlapping(built), drafts._model.guess
    drafts._model.guess = lambda *given: (guess(*given) + next(shifts)) % 250  # type: ignore[method-assign]
    found = untold(engine)
    assert_told(answers_of(engine, requests), expected)
    assert len(found) > 5
    assert sum(found) > 0.7 * len(found)
    check_scheduler(engine._scheduler)


def test_where_the_device_finds_where_one_begins_more_are_told_first(
    unread: None,  # noqa: F811
    registry: Registry,
) -> None:
    """As one backend verifies one request, and another, which plans by lengths, verifies more."""
    requests = [asking("first", prompt_of(SAID[1]), max_tokens=60), asking("second", prompt_of(SAID[2]), max_tokens=24)]
    engine, sizes = overlapping(captured(small_model(**ASKED), registry, found_starts=1)[0]), list[int]()
    found, launch = untold(engine), engine._runner.launch

    def noting(step: StepInput) -> Launched:
        sizes.extend([step.num_items] * step.verifies)
        return launch(step)

    engine._runner.launch = noting  # type: ignore[method-assign]
    assert_told(answers_of(engine, requests), answers_of(Engine.build(small_model(), registry), requests))
    early = {size: [ahead for ahead, each in zip(found, sizes, strict=True) if each == size] for size in (1, 2)}
    assert len(early[2]) > 3
    assert not any(early[2])
    assert sum(early[1]) > 0.7 * len(early[1]) > 2
    graphs = engine._runner.graphs
    assert graphs is not None
    assert {key.size for key, each in graphs.captured.items() if each.moved is not None} == {1}
    check_scheduler(engine._scheduler)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.1, "seed": 3},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.9},
        {"logprobs": 2},
        {"temperature": 0.9, "logprobs": 1},
    ],
)
def test_what_is_drawn_or_reported_is_launched_before_too(
    unread: None,  # noqa: F811
    registry: Registry,
    asked: dict[str, object],
) -> None:
    """With the numbers of positions that the device finds; some beside it take their best tokens."""
    requests = [asking(f"{at}", prompt_of(said), max_tokens=30 - 4 * at, **asked) for at, said in enumerate(SAID)]
    requests.append(asking("best", prompt_of(SAID[0]), max_tokens=20))
    engine = overlapping(captured(small_model(**ASKED), registry)[0])
    found = untold(engine)
    assert_told(answers_of(engine, requests), answers_of(Engine.build(small_model(), registry), requests))
    assert sum(found) > 0.6 * len(found)
    assert engine.meter.stats().drafts.accepted > 0


def test_what_needs_the_host_between_waits_for_it(
    unread: None,  # noqa: F811
    registry: Registry,
) -> None:
    """What a request has said changes its logits."""
    for asked in ({"presence_penalty": 0.4}, {"min_tokens": 8}, {"logit_bias": {5: 1.0}}):
        request = asking("it", prompt_of(SAID[1]), max_tokens=12, **asked)
        engine = overlapping(captured(small_model(**ASKED), registry)[0])
        found = untold(engine)
        assert_told(answers_of(engine, [request]), answers_of(Engine.build(small_model(), registry), [request]))
        assert found
        assert not any(found)


def test_it_is_the_step_that_is_scheduled_afterwards(
    settled: list[StepInput],
    registry: Registry,
    requests: list[GenerationRequest],
) -> None:
    """Of one request, all steps are alike, item by item, those of its last tokens too."""
    steps: dict[bool, list[tuple[object, ...]]] = {}
    for overlaps in (False, True):
        engine = captured(embedded(**ASKED), registry, found_starts=0)[0]
        engine._overlap, launch, noted = int(overlaps), engine._runner.launch, steps.setdefault(overlaps, [])

        def noting(step: StepInput, launch: Callable[..., object] = launch, noted: list[object] = noted) -> object:
            noted.append((step.each(), step.input_ids, step.phase, step.decode_len, step.draft_len, step.run))
            return launch(step)

        engine._runner.launch = noting  # type: ignore[method-assign, assignment]
        answers_of(engine, requests[1:2])
    assert len(settled) > 3
    assert steps[True] == steps[False]


def test_what_is_not_known_before_is_told_first(
    settled: list[StepInput],
    registry: Registry,
) -> None:
    """What requests have said changes what they say next, or how it is to be asked for."""
    requests = [
        asking("penalised", prompt_of(SAID[0]), repetition_penalty=1.3, max_tokens=12),
        asking("least", prompt_of(SAID[1]), min_tokens=6, max_tokens=12),
    ]
    expected = answers_of(Engine.build(small_model(), registry), requests)
    for request in requests:
        engine = overlapping(Engine.build(small_model(**ASKED), registry))
        assert_told(answers_of(engine, [request]), {request.request_id: expected[request.request_id]})
    assert not settled


@pytest.mark.parametrize(("seed", "how"), [*((seed, "eager") for seed in range(4)), *((seed, "captured") for seed in range(4))])
def test_requests_come_and_go_and_every_page_has_one_owner(
    settled: list[StepInput],
    registry: Registry,
    requests: list[GenerationRequest],
    plainly: dict[str, Told],
    monkeypatch: pytest.MonkeyPatch,
    *,
    seed: int,
    how: str,
) -> None:
    """Few pages, requests that come later, aborts; those that are not aborted are told what they would be alone."""
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    draw, asked = random.Random(seed), dataclasses.replace(small_model(**ASKED), num_pages=24, max_batch_requests=4)
    asked = dataclasses.replace(asked, page_size=asked.page_size if seed % 2 else 4)
    engine = built(asked, registry, how)
    waiting, aborted = draw.sample(requests, len(requests)), set[str]()
    told = {request.request_id: Told() for request in requests}
    while waiting or engine.has_work:
        if waiting and draw.random() < 0.3:
            engine.submit(waiting.pop())
        if draw.random() < 0.03 and engine._scheduler.table.running:
            gone = draw.choice(engine._scheduler.table.running).request_id
            aborted.add(gone)
            engine.abort(gone)
        for output in engine.step():
            told[output.request_id].tokens += output.token_ids
            told[output.request_id].reason = output.finish_reason
        check_scheduler(engine._scheduler)
    kept = told.keys() - aborted
    assert_told({each: told[each] for each in kept}, {each: plainly[each] for each in kept})
    assert settled
    assert_whole(engine)
    assert seed or engine.meter.stats().num_preempted > 0


def assert_whole(engine: Engine) -> None:
    """Nothing runs, and all pages and seats are there for others."""
    scheduler, pages = engine._scheduler, engine.meter.stats().pages["full"]
    assert not scheduler.table.leaving
    assert pages.free + pages.cached == pages.total
    assert sorted(scheduler._kv.free_seats) == list(scheduler._kv.seats)


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_where_all_end_with_a_step_none_follows_and_nothing_is_kept(
    settled: list[StepInput], registry: Registry, *, how: str
) -> None:
    """What was scheduled behind it is in no step that runs."""
    engine = built(small_model(**ASKED), registry, how)
    for place in range(3):
        answers_of(engine, [asking(f"{place}", prompt_of(SAID[place]), max_tokens=9 + place)])
        assert_whole(engine)
    assert settled


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_where_pages_run_out_nothing_is_scheduled_ahead(
    settled: list[StepInput], registry: Registry, monkeypatch: pytest.MonkeyPatch, *, how: str
) -> None:
    """Of two requests that go on until there is none for both."""
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    both = [asking(f"{place}", prompt_of(SAID[place]), max_tokens=26) for place in (1, 3)]
    num_pages = 4 + sum(len(each.prompt_token_ids) // 4 for each in both)
    asked = dataclasses.replace(small_model(**ASKED), num_pages=num_pages, page_size=4)
    engine = built(asked, registry, how)
    assert_told(answers_of(engine, both), answers_of(Engine.build(small_model(), registry), both))
    assert settled
    assert engine.meter.stats().num_preempted > 0
    assert_whole(engine)


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_who_comes_later_waits_for_no_answer(settled: list[StepInput], registry: Registry, *, how: str) -> None:
    """Steps are scheduled ahead of those that run alone."""
    engine = built(small_model(**ASKED), registry, how)
    engine.submit(asking("first", prompt_of(SAID[1]), max_tokens=100))
    while not settled:
        engine.step()
    engine.submit(asking("second", prompt_of(SAID[0]), max_tokens=20))
    told = [output.request_id for _ in range(4) for output in engine.step()]
    assert "second" in told
    assert engine._scheduler.num_running == 2


class Lost:
    """In place of a step that runs: what it told never comes."""

    def wait(self) -> StepOutput:
        raise TypeError("lost")


@pytest.mark.parametrize("how", ["eager", "captured"])
@pytest.mark.parametrize("fails", ["launch", "wait"])
def test_an_error_gives_up_both_steps(settled: list[StepInput], registry: Registry, *, fails: str, how: str) -> None:
    """Of the one that is scheduled ahead, and of the one that is waited for."""
    engine = built(small_model(**ASKED), registry, how)
    engine.submit(asking("first", prompt_of(SAID[1]), max_tokens=40))
    while not settled:
        engine.step()
    with pytest.MonkeyPatch.context() as patched:
        if fails == "launch":
            patched.setattr(engine._runner, "launch", None)
        else:
            engine._in_flight[0] = engine._in_flight[0]._replace(running=Lost())  # type: ignore[arg-type]
        with pytest.raises(TypeError) as raised:
            engine.step()
    (output,) = engine.recover(raised.value)
    assert (output.request_id, output.error is not None) == ("first", True)
    check_scheduler(engine._scheduler)
    assert not engine._scheduler.in_flight
    again = asking("again", prompt_of(SAID[1]), max_tokens=8)
    assert_told(answers_of(engine, [again]), answers_of(Engine.build(small_model(), registry), [again]))
