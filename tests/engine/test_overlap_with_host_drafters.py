"""With a drafter of the host, steps overlap as without one for as long as it finds nothing; then the next one verifies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from engine.test_speculation import GRAMMARS, Scripted, answers_of, with_drafter
from parity.engine_driver import options
from parity.oracle import FAMILIES, Oracle

from enginery.config.schema import EngineOptions
from enginery.contracts.drafting import DraftAsk
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.contracts.step import StepInput
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.speculate.length import HOST_LENGTHS
from enginery.worker.paths.path import Launched

TOKENS = 24


class Later(Scripted):
    """Guesses nothing before a request has so many tokens of its answer, then what comes. asked: with how many, each time."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], *, begins: int) -> None:
        super().__init__("right", answers)
        self.begins, self.asked = begins, list[int]()

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        found = super().propose(asks)
        told = [
            next(len(ask.token_ids) - len(each) for each in self.answers if tuple(ask.token_ids)[: len(each)] == each)
            for ask in asks
        ]
        self.asked += told
        return [guess if count >= self.begins else [] for guess, count in zip(found, told, strict=True)]


def request(name: str, prompt: Sequence[int], **params: object) -> GenerationRequest:
    asked = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **params}
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), params=SamplingParams(**asked))  # type: ignore[arg-type]


def launches(engine: Engine) -> list[tuple[int, bool, bool]]:
    """Of each step from now on: its requests, whether it verifies, and whether it is launched before the one before is told."""
    launch, found = engine._runner.launch, list[tuple[int, bool, bool]]()

    def noting(step: StepInput) -> Launched:
        is_ahead = any("_output" not in vars(flight.running) for flight in engine._in_flight)
        found.append((step.num_items, step.verifies, is_ahead))
        return launch(step)

    engine._runner.launch = noting  # type: ignore[method-assign]
    return found


def told_by(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, tuple[list[int], object]]:
    return {about: (each.tokens, each.reason) for about, each in answers_of(engine, requests).items()}


def beside_plain(
    asked: EngineOptions, requests: Sequence[GenerationRequest], *, begins: int, again: bool = False
) -> tuple[list[tuple[int, bool, bool]], list[tuple[int, bool, bool]], Later]:
    """The launches without and with such a drafter, whose tokens are the same. again: the second time, with grammars there."""
    registry = Registry.load()
    plain = Engine.build(asked, registry)
    if again:
        told_by(plain, requests)
    without, expected = launches(plain), told_by(plain, requests)
    later = Later({each.prompt_token_ids: expected[each.request_id][0] for each in requests}, begins=begins)
    drafting = dataclasses.replace(asked, drafter="scripted", draft_length="3")
    engine = Engine.build(drafting, with_drafter(registry, lambda _: later))
    if again:
        told_by(engine, requests)
    found = launches(engine)
    assert told_by(engine, requests) == expected
    return without, found, later


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_overlap_as_without_a_drafter_while_it_finds_nothing(write_oracle: Callable[..., Oracle], *, overlap: bool) -> None:
    """Prompts come in chunks beside requests that decode, which end one after the other."""
    oracle = write_oracle("llama", FAMILIES["llama"])
    requests = [request(f"{at}", (3 + at, *oracle.prompts[at][: 9 + 9 * at]), max_tokens=TOKENS - at) for at in range(3)]
    without, found, later = beside_plain(options(oracle, overlap=overlap, max_batch_tokens=24), requests, begins=99)
    assert found == without
    assert sum(is_ahead for *_, is_ahead in found) == (len(found) - 1 if overlap else 0)
    assert {*range(1, TOKENS - 2)} <= {*later.asked}


@pytest.mark.parametrize("overlap", [True, False])
def test_what_it_finds_is_verified_in_the_next_step(write_oracle: Callable[..., Oracle], *, overlap: bool) -> None:
    """It is asked behind each told step, and anew when all is told: the guesses are then of the tokens that are there."""
    oracle = write_oracle("llama", FAMILIES["llama"])
    _, found, later = beside_plain(options(oracle, overlap=overlap), [request("r", oracle.prompts[0])], begins=8)
    assert later.asked[: 8 + 2 * overlap] == ([*range(10)] if overlap else [*range(1, 9)])
    assert later.asked == sorted(later.asked)
    first = [verifies for _, verifies, _ in found].index(True)
    plain, others = found[:first], found[first:]
    assert len(plain) == 8 + overlap, "the prompt's, and each told token's up to those that were in flight"
    assert all(is_ahead == overlap for *_, is_ahead in plain[1:])
    assert len(others) < 6
    assert not any(is_ahead for *_, is_ahead in others)


@pytest.mark.parametrize("begins", [0, 6])
@pytest.mark.parametrize("overlap", [True, False])
def test_so_are_those_of_requests_that_read_their_tokens(begins: int, *, overlap: bool) -> None:
    """Grammars and penalties wait for the token before, as without a drafter."""
    asked = EngineOptions(num_pages=200, num_threads=1, dtype="float32", overlap=overlap)
    ways = [
        *({"grammar": grammar, "ignore_eos": False} for grammar in GRAMMARS.values()),
        {"presence_penalty": 0.4, "repetition_penalty": 1.2},
        {"temperature": 0.9, "seed": 3},
    ]
    requests = [request(f"{at}", [9 + at, *range(5, 20 + at)], **way) for at, way in enumerate(ways)]
    without, found, _ = beside_plain(asked, requests, begins=begins, again=True)
    first = [verifies for _, verifies, _ in found].index(True)
    assert found[:first] == without[:first]
    assert sum(verifies for _, verifies, _ in found) > 2


def test_a_guess_that_is_gone_when_all_is_told_costs_no_token(write_oracle: Callable[..., Oracle]) -> None:
    """By the known tokens there was one; behind the token that was in flight there is none."""
    oracle = write_oracle("llama", FAMILIES["llama"])
    registry, asked, ask = Registry.load(), options(oracle, overlap=True), request("r", oracle.prompts[0])
    expected = told_by(Engine.build(asked, registry), [ask])

    class Fleeting(Later):
        def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
            found = super().propose(asks)
            return found if self.asked[-1] % 4 == 1 else [() for _ in asks]

    fleeting = Fleeting({ask.prompt_token_ids: expected["r"][0]}, begins=0)
    drafting = dataclasses.replace(asked, drafter="scripted", draft_length="3")
    engine = Engine.build(drafting, with_drafter(registry, lambda _: fleeting))
    found = launches(engine)
    assert told_by(engine, [ask]) == expected
    assert not any(verifies for _, verifies, _ in found)
    waited = [not is_ahead for *_, is_ahead in found]
    assert 4 < sum(waited) < 0.5 * len(waited)


def test_by_itself_the_engine_verifies_what_pays(write_oracle: Callable[..., Oracle]) -> None:
    """Times are said: a step that verifies takes a tenth longer, or ten times as long. Right guesses pay, or are tried twice."""
    oracle = write_oracle("llama", FAMILIES["llama"])
    registry, asked = Registry.load(), options(oracle)
    requests = [request("r", oracle.prompts[0], max_tokens=60)]
    expected = told_by(Engine.build(asked, registry), requests)
    verified = []
    for takes_s in (1.1, 10.0):
        later = Later({requests[0].prompt_token_ids: expected["r"][0]}, begins=0)
        engine = Engine.build(dataclasses.replace(asked, drafter="scripted"), with_drafter(registry, lambda _, it=later: it))
        found, told_at = launches(engine), [0.0]

        def clock(found: list[tuple[int, bool, bool]] = found, told_at: list[float] = told_at, takes_s: float = takes_s) -> float:
            told_at[0] += takes_s if found[-1][1] else 1.0
            return told_at[0]

        assert engine._drafting is not None
        engine._drafting._clock = clock
        assert told_by(engine, requests) == expected
        verified.append(sum(verifies for _, verifies, _ in found))
        assert {*engine._drafting.lengths._loads[0].seconds} <= {*HOST_LENGTHS}, "no other length is captured"
    assert verified[0] > 6
    assert verified[1] == 2
