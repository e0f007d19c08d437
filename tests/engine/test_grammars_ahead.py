"""What a grammar says behind a draft counts if the draft was right, and only then: else it is as if nobody had asked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from engine.test_speculation import with_drafter
from integrity import check_scheduler
from offers import offering
from pairwise import in_turn

from enginery.config.schema import EngineOptions
from enginery.contracts.drafting import DraftAsk
from enginery.contracts.grammars import Grammar, GrammarKind, GrammarSpec
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.contracts.versions import HookGroup
from enginery.engine import grammar_budget
from enginery.engine.engine import Engine
from enginery.engine.grammar_budget import BoundedState, RevocableBoundedState
from enginery.engine.grammars_ahead import ALL, DraftMasks
from enginery.errors import RequestError
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry

PROMPT = tuple(range(10, 30))
ASKED = EngineOptions(num_pages=200, num_threads=1, dtype="float32")
TRAPS = ["raises", "refuses", "takes long", "has no mask"]


class Fussy:
    """Every token fits, but for what comes of one of them. After a failure it says nothing but that, until it has gone back."""

    def __init__(self, kind: str, trap: int) -> None:
        self.kind, self.trap = kind, trap
        self.taken: list[int] = []
        self.has_failed = False
        self.is_finished = False

    def fill_mask(self, row: np.ndarray) -> None:
        row[:] = -1
        is_trapped = self.trap in self.taken
        self.has_failed |= is_trapped and self.kind == "raises"
        if self.has_failed:
            raise RequestError("it cannot go on", param="grammar")
        if is_trapped and self.kind == "has no mask":
            row[:] = 0
        if is_trapped and self.kind == "takes long":
            until = time.thread_time() + 1.5 * grammar_budget.SPARE_S
            while time.thread_time() < until:
                pass

    def accept(self, token_id: int) -> bool:
        self.has_failed |= token_id == self.trap and self.kind == "refuses"
        if not self.has_failed:
            self.taken.append(token_id)
        return not self.has_failed

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]
        self.has_failed = False


class Grammars:
    """Compiles all to one kind of state."""

    def __init__(self, kind: str, trap: int) -> None:
        self.kind, self.trap = kind, trap

    def compile(self, grammar: Grammar) -> Grammars:
        return self

    def start(self) -> Fussy:
        return Fussy(self.kind, self.trap)

    def offered(self) -> Offer[GrammarSpec]:
        spec = GrammarSpec(
            name="fussy",
            api=(2, 0),
            priority=1,
            summary="",
            kinds=frozenset(GrammarKind),
            refuse=lambda needs: [],
            load=lambda tokens: self,
        )
        return Offer(spec=spec, group=HookGroup.GRAMMAR, name="fussy", plugin="p", distribution="enginery-p", version="1")


class Guesses:
    """The same after each token: these, where the answer has got so far. asked: how many tokens there were at each call."""

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        self.drafts = drafts
        self.asked: list[int] = []

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        (ask,) = asks
        self.asked.append(len(ask.token_ids) - len(PROMPT))
        return [self.drafts.get(self.asked[-1], [])[: ask.most]]

    def forget(self, key: str) -> None:
        pass


def with_guesses(registry: Registry, guesses: Guesses) -> Registry:
    return with_drafter(registry, lambda _: guesses)


def answer(
    kind: str, trap: int, guesses: Guesses | None, *, offer: Callable[[Registry, Guesses], Registry] = with_guesses
) -> tuple[list[int], str | None]:
    """What one request is told, and the error that ends it."""
    registry, asked = Registry.load(), ASKED
    registry = offering(registry, GrammarSpec, Grammars(kind, trap).offered())
    if guesses is not None:
        registry = offer(registry, guesses)
        asked = dataclasses.replace(asked, drafter="scripted", draft_length="4")
    engine = Engine.build(asked, registry)
    grammar = Grammar(kind=GrammarKind.REGEX, source="x")
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=5, ignore_eos=True, grammar=grammar)
    engine.submit(GenerationRequest(request_id="r", prompt_token_ids=PROMPT, params=params))
    told, error = list[int](), None
    while engine.has_work:
        for output in engine.step():
            told += output.token_ids
            error = output.error or error
        check_scheduler(engine._scheduler)
    return told, error


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """What it is told where nothing fails."""
    return answer("none", -1, None)[0]


@pytest.mark.parametrize("kind", TRAPS)
def test_a_grammar_that_fails_behind_a_wrong_draft_harms_nobody(plain: list[int], kind: str) -> None:
    trap = next(token for token in range(3, 256) if token not in plain)
    guesses = Guesses({at: [*plain[at : at + 1], trap, *plain[at + 2 : at + 4]] for at in range(16)})
    assert answer(kind, trap, guesses) == (plain, None)
    assert len(guesses.asked) == 1, "it is not asked again about what may not come"


@in_turn(("kind", TRAPS), ("place", [3, 6]))
def test_a_grammar_that_fails_behind_a_right_draft_ends_the_answer_where_plain_decoding_ends_it(
    plain: list[int], kind: str, place: int
) -> None:
    trap = plain[place]
    assert trap not in plain[:place]
    expected = answer(kind, trap, None)
    assert expected[0] == plain[: place if kind == "refuses" else place + 1]
    assert expected[1]
    for length in (1, 2, 4):
        assert answer(kind, trap, Guesses({at: plain[at : at + length] for at in range(16)})) == expected


def test_what_is_asked_about_drafts_has_a_bound_of_its_own() -> None:
    state, row = BoundedState.of(Fussy("takes long", 7), "plugin p"), np.zeros(1, np.int32)
    assert isinstance(state, RevocableBoundedState)
    state.fill_mask(row)

    def ask_ahead() -> None:
        with state.ahead(2):
            assert state.accept(7)
            try:
                state.fill_mask(row)
            finally:
                state.rollback(1)

    with pytest.raises(RequestError, match="too much time"):
        ask_ahead()
    state.fill_mask(row)
    state.fill_mask(row)


def test_a_state_that_fails_on_its_way_back_ends_its_answer_alone(plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(state: Fussy, count: int) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Fussy, "rollback", fail)
    told, error = answer("none", -1, Guesses({at: plain[at : at + 2] for at in range(16)}))
    assert told == plain[: len(told)]
    assert len(told) < len(plain)
    assert error is not None
    assert "plugin p (enginery-p==1) failed in the answer's grammar: KeyError: 'a bug'" in error


def test_what_fails_behind_a_wrong_draft_is_forgotten_with_it() -> None:
    class EndsBadly(Fussy):
        @property
        def is_finished(self) -> bool:
            assert 7 not in self.taken
            return False

        @is_finished.setter
        def is_finished(self, value: bool) -> None: ...

    state, row = BoundedState.of(EndsBadly("none", -1), "plugin p"), np.zeros(1, np.int32)
    assert isinstance(state, RevocableBoundedState)
    assert state.accept(7)
    assert not state.is_finished
    with pytest.raises(RequestError, match="plugin p failed"):
        state.fill_mask(row)
    state.rollback(1)
    state.fill_mask(row)


def test_a_draft_that_the_grammar_forbids_is_no_failure_of_the_grammar() -> None:
    """Rows before it have their masks, nobody reaches those behind it. For a failure the request would be drafted no more."""
    evens = 0x55555555

    class Even(Fussy):
        def fill_mask(self, row: np.ndarray) -> None:
            row[:] = evens

        def accept(self, token_id: int) -> bool:
            return token_id % 2 == 0 and super().accept(token_id)

    inner = Even("none", -1)
    state = BoundedState.of(inner, "plugin p")
    assert isinstance(state, RevocableBoundedState)
    masks = DraftMasks(state, (4, 7, 8))
    assert [int(masks.behind(count, 1)[0]) for count in range(4)] == [evens, evens, ALL, ALL]
    assert inner.taken == []


def test_a_state_that_cannot_go_back_is_bounded_all_the_same() -> None:
    class Forward:
        is_finished = False

        def fill_mask(self, row: np.ndarray) -> None:
            row[:] = -1

        def accept(self, token_id: int) -> bool:
            return True

    assert not isinstance(BoundedState.of(Forward(), "plugin p"), RevocableBoundedState)
