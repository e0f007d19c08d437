"""Who gets a thread to compile a grammar, how long who waits, and what is kept, with compilers that do as they are told."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from offers import offering

from enginery.contracts.grammars import CompiledGrammar, Grammar, GrammarKind, GrammarSpec, GrammarState, UnfinishedGrammar
from enginery.contracts.versions import HookGroup
from enginery.engine import grammar_budget
from enginery.engine import grammar_queue as grammars
from enginery.engine.grammar_budget import BoundedState
from enginery.engine.grammar_lanes import CompileJob, Lane
from enginery.engine.grammar_queue import USUAL, GrammarQueue
from enginery.errors import Overloaded, RequestError
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry

PATIENCE_S = 50


class Compiled:
    def start(self) -> BoundedState:
        return BoundedState(self, "plugin p")


class Compilers:
    """evil...: held until `go`. long...: unfinished, then held. bad...: refused. busy...: overloaded. Anything else: at once."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.counts: Counter[str] = Counter()
        self.at_work: Counter[str] = Counter()

    def choose(self, kind: GrammarKind) -> None:
        if kind is GrammarKind.CHOICE:
            raise RequestError("no plugin compiles it")

    def compile(self, grammar: Grammar) -> CompiledGrammar | UnfinishedGrammar:
        source = grammar.source
        self.counts[source] += 1
        if source.startswith("long"):
            return UnfinishedGrammar(finish=lambda: self._hold("long"))
        if source.startswith("bad"):
            raise RequestError("it is bad")
        if source.startswith("busy"):
            raise Overloaded("the machine is busy")
        if source.startswith("evil"):
            return self._hold("evil")
        return Compiled()

    def _hold(self, what: str) -> Compiled:
        self.at_work[what] += 1
        assert self.go.wait(PATIENCE_S)
        return Compiled()


@pytest.fixture
def compilers() -> Iterator[Compilers]:
    made = Compilers()
    yield made
    made.go.set()


@pytest.fixture
def queue(compilers: Compilers) -> GrammarQueue:
    return GrammarQueue(compilers)


def regex(source: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, source=source)


Found = dict[str, GrammarState | RequestError]


def settle(queue: GrammarQueue, until: Callable[[Found], object]) -> Found:
    found: Found = {}
    deadline = time.monotonic() + PATIENCE_S
    while not until(found):
        assert time.monotonic() < deadline, found
        found |= queue.settled(idle=True)
    return found


def ask(queue: GrammarQueue, source: str, client: str = "me") -> GrammarState | RequestError:
    """Wait for one."""
    name = f"{client}: {source}"
    queue.begin(name, regex(source), client)
    return settle(queue, lambda found: name in found)[name]


def test_one_client_cannot_have_all_threads(queue: GrammarQueue, compilers: Compilers) -> None:
    for number in range(8):
        queue.begin(f"evil {number}", regex(f"evil {number}"), "attacker")
    settle(queue, lambda _: compilers.at_work["evil"] == 3)
    for number in range(20):
        assert isinstance(ask(queue, f"fine {number}", "innocent"), BoundedState)
    assert compilers.at_work["evil"] == 3
    assert queue.num_waiting == 8


def test_who_asks_for_what_is_being_compiled_for_nobody_waits_for_that(queue: GrammarQueue, compilers: Compilers) -> None:
    queue.begin("gone", regex("evil"))
    settle(queue, lambda _: compilers.at_work["evil"] == 1)
    queue.drop("gone")
    queue.begin("here", regex("evil"))
    compilers.go.set()
    settle(queue, lambda found: "here" in found)
    assert compilers.counts["evil"] == 1


def test_clients_take_turns() -> None:
    lane, order = Lane(1, "test"), list[str]()

    def put(name: str, client: str, *, wanted: bool = True) -> None:
        work = lambda: order.append(name) or Compiled()  # noqa: E731
        lane.put(CompileJob(grammar=regex(name), client=client, work=work, lane=lane, num_waiting=int(wanted)), client)

    for number in range(3):
        put(f"a{number}", "a")
    put("nobody's", "a", wanted=False)
    put("b", "b")
    put("c", "c")
    deadline = time.monotonic() + PATIENCE_S
    while len(order) < 5 or lane._queues:
        lane.start()
        assert time.monotonic() < deadline
    assert order == ["a0", "b", "c", "a1", "a2"]


def test_long_compiles_hold_up_neither_short_ones_nor_their_own_sender(queue: GrammarQueue, compilers: Compilers) -> None:
    for number in range(8):
        queue.begin(f"long {number}", regex(f"long {number}"), "me")
    settle(queue, lambda _: compilers.at_work["long"] == 1 and sum(compilers.counts.values()) == 8)
    for number in range(20):
        assert isinstance(ask(queue, f"fine {number}", "me"), BoundedState)
    queue.begin("long other", regex("long other"), "other")
    settle(queue, lambda _: compilers.at_work["long"] == 2)
    compilers.go.set()
    found = settle(queue, lambda found: len(found) == 9)
    assert all(isinstance(state, BoundedState) for state in found.values())
    assert set(compilers.counts.values()) == {1}, "none is begun again"


def test_waiting_for_a_thread_is_no_compile_time(
    queue: GrammarQueue, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        queue.begin(f"evil {number}", regex(f"evil {number}"), "me")
    settle(queue, lambda _: compilers.at_work["evil"] == 3)
    queue.begin("fine", regex("fine"), "me")
    monkeypatch.setattr(grammars, "COMPILE_S", 0.05)
    found = settle(queue, lambda found: len(found) == 3)
    assert {str(error) for error in found.values()} == {"the grammar was not compiled within 0.05 s; make it smaller"}
    time.sleep(0.1)
    assert list(queue.settled(idle=True)) == []
    monkeypatch.setattr(grammars, "COMPILE_S", PATIENCE_S)
    compilers.go.set()
    assert isinstance(settle(queue, lambda found: found)["fine"], BoundedState)


@pytest.mark.parametrize("source", ["fine", "long"])
def test_who_waits_too_long_for_a_thread_is_told_that_the_server_is_busy(
    queue: GrammarQueue, compilers: Compilers, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    for number in range(3 if source == "fine" else 1):
        evil = f"{'evil' if source == 'fine' else 'long'} {number}"
        queue.begin(evil, regex(evil), "me")
    settle(queue, lambda _: sum(compilers.at_work.values()) == (3 if source == "fine" else 1))
    monkeypatch.setattr(grammars, "QUEUE_S", 0.05)
    error = ask(queue, source)
    assert isinstance(error, Overloaded)
    assert error.param == "grammar"
    assert "send the request again later" in str(error)
    assert queue.num_waiting == (3 if source == "fine" else 1), "those that are being compiled are not in a queue"
    monkeypatch.setattr(grammars, "QUEUE_S", PATIENCE_S)
    compilers.go.set()
    assert isinstance(ask(queue, source), BoundedState), "nobody was remembered as refused"


def test_a_grammar_that_another_client_queued_is_compiled_in_my_turn(queue: GrammarQueue, compilers: Compilers) -> None:
    for number in range(6):
        queue.begin(f"evil {number}", regex(f"evil {number}"), "attacker")
    queue.begin("theirs", regex("fine"), "attacker")
    assert isinstance(ask(queue, "fine", "innocent"), BoundedState)
    assert compilers.counts["fine"] == 1


def test_what_is_compiled_is_kept_whatever_is_refused_or_others_have_compiled(queue: GrammarQueue, compilers: Compilers) -> None:
    queue.prepare()
    mine = [f"mine {number}" for number in range(10)]
    for source in mine:
        ask(queue, source, "me")
    for number in range(grammars.MAX_CACHED * 2):
        assert isinstance(ask(queue, f"bad {number}", "attacker"), RequestError)
    for number in range(grammars.MAX_CACHED * 2):
        assert isinstance(ask(queue, f"theirs {number}", "attacker"), BoundedState)
    for source in mine:
        ask(queue, source, "another")
    queue.begin("usual", USUAL, "me")
    settle(queue, lambda found: "usual" in found)
    assert {compilers.counts[source] for source in [*mine, USUAL.source]} == {1}
    assert len(queue._kept) == len(queue._refused) == grammars.MAX_CACHED
    assert not queue._jobs


def test_nothing_is_left_of_requests_that_went_away(queue: GrammarQueue, compilers: Compilers) -> None:
    for number in range(3):
        queue.begin(f"evil {number}", regex(f"evil {number}"), "me")
    settle(queue, lambda _: compilers.at_work["evil"] == 3)
    for number in range(500):
        queue.begin("queued", regex(f"queued {number}"), "me")
        queue.drop("queued")
    assert sum(map(len, queue._quick._queues.values())) <= 65
    queue.begin("long", regex("long"), "other")
    settle(queue, lambda _: queue._jobs[regex("long")].future.done() or compilers.at_work["long"])
    queue.drop("long")
    compilers.go.set()
    for number in range(3):
        queue.drop(f"evil {number}")
    settle(queue, lambda _: not queue._jobs)
    assert queue._jobs == {}


def test_json_objects_never_wait(queue: GrammarQueue, compilers: Compilers) -> None:
    queue.prepare()
    settle(queue, lambda _: compilers.counts[""] and not queue._jobs)
    for number in range(8):
        queue.begin(f"evil {number}", regex(f"evil {number}"), f"attacker {number}")
    settle(queue, lambda _: compilers.at_work["evil"] == 4)
    queue.begin("usual", USUAL, "me")
    assert isinstance(dict(queue.settled(idle=False))["usual"], BoundedState)
    queue.prepare()
    assert compilers.counts[""] == 1


def test_without_a_compiler_of_json_objects_nothing_is_prepared(compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "USUAL", Grammar(kind=GrammarKind.CHOICE))
    queue = GrammarQueue(compilers)
    queue.prepare()
    assert not queue._jobs


def test_a_refusal_is_kept_and_a_busy_machine_is_not(queue: GrammarQueue, compilers: Compilers) -> None:
    for _ in range(3):
        assert str(ask(queue, "bad")) == "it is bad"
        assert isinstance(ask(queue, "busy"), Overloaded)
    assert compilers.counts == {"bad": 1, "busy": 3}


def test_where_no_thread_can_be_started_the_request_is_told_to_come_back(
    queue: GrammarQueue, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        found = ask(queue, "x")
    assert isinstance(found, Overloaded)
    assert "the system refuses a thread" in str(found)
    assert "can't start new thread" in str(found)
    assert isinstance(ask(queue, "x"), BoundedState)
    assert not queue.num_waiting
    assert compilers.counts == {"x": 1}


def test_what_a_plugin_breaks_with_while_it_finishes_names_it(registry_with: Callable[[object], GrammarQueue]) -> None:
    def finish() -> CompiledGrammar:
        raise ZeroDivisionError("a bug")

    queue = registry_with(UnfinishedGrammar(finish=finish))
    error = ask(queue, "x")
    assert "could not compile a regex: ZeroDivisionError: a bug" in str(error)


@pytest.fixture
def registry_with(compilers: Compilers) -> Callable[[object], GrammarQueue]:
    def build(result: object) -> GrammarQueue:
        class Fixed:
            def compile(self, grammar: Grammar) -> object:
                return result

        fields = {"name": "fixed", "api": (2, 0), "priority": 1, "summary": "", "kinds": frozenset(GrammarKind)}
        spec = GrammarSpec(**fields, refuse=lambda needs: [], load=lambda tokens: Fixed())
        offer = Offer(spec=spec, group=HookGroup.GRAMMAR, name="fixed", plugin="p", distribution="enginery-p", version="1")
        registry = offering(Registry.load(no_plugins=True), GrammarSpec, offer)

        class Words:
            vocab_size = 5
            eos_token_ids = frozenset({0})

            def tokens(self) -> None:
                return None

        return GrammarQueue(grammars.Compilers(registry, Words()))

    return build


class Costly:
    """A state whose masks take this long, of processor time."""

    is_finished = False

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def fill_mask(self, row: np.ndarray) -> None:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass

    def accept(self, token_id: int) -> bool:
        self.fill_mask(np.zeros(1))
        return True


@pytest.mark.parametrize("part", ["mask", "token"])
def test_an_answer_whose_grammar_holds_every_step_up_ends(part: str) -> None:
    state = BoundedState(Costly(0.03), "plugin p")
    row = np.zeros(1, dtype=np.int32)

    def go_on() -> None:
        for _ in range(20):
            if part == "token":
                state._state.seconds = 0.03
                state.accept(1)
                state._state.seconds = 0
            state.fill_mask(row)

    with pytest.raises(RequestError, match="too much time at every token") as caught:
        go_on()
    assert caught.value.param == "grammar"


def test_an_answer_may_take_long_once_and_little_often() -> None:
    once, often = (BoundedState(Costly(each), "plugin p") for each in (grammar_budget.SPARE_S * 0.6, 0.0002))
    row = np.zeros(1, dtype=np.int32)
    once.fill_mask(row)
    once._state.seconds = 0
    for _ in range(200):
        once.fill_mask(row)
        often.fill_mask(row)
        assert often.accept(1)
