"""Grammars that take time to compile, and plugins of grammars that fail, refuse or are absent: nobody else waits for them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine.test_grammars import NOISE, asked, build, drain, regex, registry, run, schema, tokens
from offers import offering
from pairwise import in_turn

from enginery.config.schema import EngineOptions
from enginery.contracts.attention import Reason
from enginery.contracts.grammars import Grammar, GrammarKind, GrammarSpec, GrammarTokens
from enginery.contracts.request import FinishReason, RequestOutput
from enginery.contracts.versions import HookGroup
from enginery.engine import grammar_queue as grammars
from enginery.errors import QueueFull, RequestError
from enginery.llm import async_llm
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.serve.engine import process

__all__ = ["registry"]


class Slow:
    """A compiler that waits to be let go, and states that allow token 5 and fail at their third mask if told so."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_compiled = 0

    def compile(self, grammar: Grammar) -> Slow.Compiled:
        self.num_compiled += 1
        assert self.go.wait(50)
        if grammar.source == "broken":
            raise ZeroDivisionError("a bug")
        return Slow.Compiled(grammar.source)

    class Compiled:
        def __init__(self, source: str) -> None:
            self.source = source
            self.num_masks = 0
            self.num_accepted = 0

        def start(self) -> Slow.Compiled | None:
            assert self.source != "starts badly"
            return None if self.source == "stateless" else Slow.Compiled(self.source)

        def fill_mask(self, row: np.ndarray) -> None:
            assert not self.is_finished, "an answer that has ended was asked what may follow"
            self.num_masks += 1
            if self.source == "fails" and self.num_masks == 3:
                raise RequestError("too many states")
            if self.source == "buggy" and self.num_masks == 3:
                raise KeyError("a bug")
            row[:] = 0
            row[0] = 0 if self.source == "nothing" else 1 << 5

        def accept(self, token_id: int) -> bool:
            assert token_id == 5
            self.num_accepted += 1
            if self.source == "buggy later" and self.num_accepted == 3:
                raise KeyError("a bug")
            return self.source != "liar"

        @property
        def is_finished(self) -> bool:
            if self.source == "ends badly" and self.num_accepted == 3:
                raise KeyError("a bug")
            return self.source == "ends" and self.num_accepted == 3


@pytest.fixture
def slow(registry: Registry) -> Iterator[tuple[Registry, Slow]]:
    compiler = Slow()

    def load(tokens: GrammarTokens) -> Slow:
        assert tokens.vocab_size == 260
        assert tokens.tokens[90] == b"{"
        assert tokens.eos_token_ids == {257, 259}
        return compiler

    spec = GrammarSpec(
        name="slow",
        api=(2, 0),
        priority=1,
        summary="",
        kinds=frozenset({GrammarKind.REGEX}),
        refuse=lambda needs: [],
        load=load,
    )
    offer = Offer(spec=spec, group=HookGroup.GRAMMAR, name="slow", plugin="p", distribution="enginery-p", version="1")
    yield offering(registry, GrammarSpec, offer), compiler
    compiler.go.set()


@pytest.mark.parametrize("overlap", [False, True])
def test_others_go_on_while_a_grammar_is_compiled(slow: tuple[Registry, Slow], *, overlap: bool) -> None:
    engine = build(slow[0], overlap=overlap)
    engine.submit(asked("waits", regex("x"), max_tokens=3))
    engine.submit(asked("runs", None, max_tokens=10, ignore_eos=True))
    outputs: dict[str, list[RequestOutput]] = {}
    while "runs" not in outputs or outputs["runs"][-1].finish_reason is None:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert list(outputs) == ["runs"]
    assert engine.has_work
    assert engine._scheduler.num_waiting == 1
    begun = time.perf_counter()
    assert engine.step() == []
    assert time.perf_counter() - begun >= 0.004, "with nothing else to do, a step waits a moment"
    slow[1].go.set()
    assert tokens(drain(engine, outputs)["waits"]) == [5, 5, 5]


def test_an_abort_while_compiling_frees_the_place_and_the_id(slow: tuple[Registry, Slow]) -> None:
    engine = build(slow[0])
    for name in "abcdef":
        engine.submit(asked(name, regex(name), max_tokens=2))
    while slow[1].num_compiled < 3:  # one client alone has no more threads
        time.sleep(0.001)
    for name in "abcdef":
        engine.abort(name)
    assert not engine.has_work
    assert engine._scheduler.num_waiting == 0
    assert engine.step() == []
    engine.submit(asked("a", regex("f"), max_tokens=2))
    slow[1].go.set()
    assert tokens(drain(engine, {})["a"]) == [5, 5]
    assert slow[1].num_compiled == 4, "what nobody waits for any more is not begun"


def test_a_grammar_is_compiled_once_for_all_and_kept(slow: tuple[Registry, Slow]) -> None:
    engine = build(slow[0])
    slow[1].go.set()
    run(engine, *(asked(str(number), regex("same"), max_tokens=2) for number in range(5)))
    run(engine, asked("later", regex("same"), max_tokens=2))
    assert slow[1].num_compiled == 1
    for number in range(grammars.MAX_CACHED + 1):
        run(engine, asked("a", regex(str(number)), max_tokens=1))
    run(engine, asked("later", regex("same"), max_tokens=2))
    assert slow[1].num_compiled == grammars.MAX_CACHED + 3
    assert len(engine._grammars._kept) == grammars.MAX_CACHED


def test_a_compile_beyond_its_time_refuses_the_request(slow: tuple[Registry, Slow], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "COMPILE_S", 0.05)
    engine = build(slow[0])
    (output,) = run(engine, asked("a", regex("x")))["a"]
    assert output.is_answer
    assert output.error == "the grammar was not compiled within 0.05 s; make it smaller"
    assert output.param == "grammar"


def test_requests_that_compile_count_as_waiting_and_ids_are_taken(slow: tuple[Registry, Slow]) -> None:
    engine = build(slow[0], max_queued_requests=2)
    engine.submit(asked("a", regex("x")))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(asked("a", None))
    engine.submit(asked("b", regex("y")))
    for grammar in (None, regex("z")):
        with pytest.raises(QueueFull):
            engine.submit(asked("c", grammar))


def test_an_answer_that_has_ended_is_not_asked_for_more(slow: tuple[Registry, Slow]) -> None:
    slow[1].go.set()
    outputs = run(build(slow[0], overlap=True), asked("a", regex("ends")), asked("b", regex("x"), max_tokens=9))
    assert (tokens(outputs["a"]), outputs["a"][-1].finish_reason) == ([5, 5, 5], FinishReason.STOP)
    assert outputs["a"][-1].stop_token_id is None


@in_turn(
    ("source", ["broken", "fails", "nothing", "liar", "starts badly", "stateless", "buggy", "buggy later", "ends badly"]),
    ("overlap", [False, True]),
)
def test_a_grammar_that_fails_ends_its_request_alone(slow: tuple[Registry, Slow], source: str, *, overlap: bool) -> None:
    slow[1].go.set()
    engine = build(slow[0], overlap=overlap)
    others = [asked("free", None, max_tokens=12, ignore_eos=True), asked("fine", regex("x"), max_tokens=12)]
    outputs = run(engine, asked("bad", regex(source), max_tokens=12), *others)
    expected = {
        "broken": (0, "could not compile a regex"),
        "fails": (2, "too many states"),
        "nothing": (0, "allows no token"),
        "liar": (0, "does not take the token 5"),
        "starts badly": (0, "plugin p (enginery-p==1) failed in the answer's grammar: AssertionError"),
        "stateless": (0, "plugin p (enginery-p==1) built None, which is no GrammarState: it has no fill_mask, accept, is_finished"),
        "buggy": (2, "plugin p (enginery-p==1) failed in the answer's grammar: KeyError: 'a bug'"),
        "buggy later": (2, "does not take the token 5"),
        "ends badly": (3, "plugin p (enginery-p==1) failed in the answer's grammar: KeyError: 'a bug'"),
    }
    count, error = expected[source]
    assert len(tokens(outputs["bad"])) == count
    assert error in (outputs["bad"][-1].error or "")
    assert outputs["bad"][-1].is_answer == (source in ("broken", "starts badly", "stateless"))
    assert tokens(outputs["fine"]) == [5] * 12
    assert len(tokens(outputs["free"])) == 12


def test_an_engine_that_serves_has_its_compiler_before_it_is_ready(
    slow: tuple[Registry, Slow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    offer = slow[0].offers(GrammarSpec)[0]
    spec = dataclasses.replace(offer.spec, load=lambda tokens: loaded.append(tokens.vocab_size) or slow[1])
    counting = offering(slow[0], GrammarSpec, dataclasses.replace(offer, spec=spec))
    reported: list[str] = []
    options = EngineOptions(**NOISE | {"num_pages": 400, "graphs": False})
    engine = process._build(options, counting, lambda progress: reported.append(progress.phase))
    assert loaded == [260]
    assert reported[-1] == "grammars"
    assert "grammars" in engine.facts.phases_s
    assert not engine.prepare()
    slow[1].go.set()
    run(engine, asked("a", regex("x"), max_tokens=2))
    assert loaded == [260]
    monkeypatch.setattr(async_llm, "registry_for", lambda options: counting)
    asyncio.run(async_llm.AsyncLLM(**NOISE, num_pages=400).close())
    assert loaded == [260] * 2
    build(counting)
    assert loaded == [260] * 2, "an engine that may never be asked for a grammar waits for one that is"


def test_what_cannot_be_loaded_ends_requests_and_no_start(slow: tuple[Registry, Slow], tmp_path: Path) -> None:
    echo = dict(architectures=["EchoForCausalLM"], vocab_size=97, max_position_embeddings=256, eos_token_id=5)
    (tmp_path / "config.json").write_text(json.dumps(echo))
    bare = process._build(EngineOptions(model=str(tmp_path), load_format="dummy", num_pages=400), slow[0], lambda progress: None)
    assert not bare.prepare()
    (output,) = run(bare, asked("a", regex("x")))["a"]
    assert "tokenizer.json is missing" in (output.error or "")


def test_without_a_plugin_the_request_is_refused_at_once(registry: Registry) -> None:
    engine = build(offering(registry, GrammarSpec))
    with pytest.raises(RequestError, match="no plugin compiles the regex"):
        engine.submit(asked("a", regex("x")))
    assert not engine.has_work


def test_a_plugin_that_lacks_the_kind_or_refuses_is_not_used_and_says_why(slow: tuple[Registry, Slow]) -> None:
    offer = slow[0].offers(GrammarSpec)[0]
    picky = dataclasses.replace(offer.spec, refuse=lambda needs: [Reason(rule="mood", text=f"not for {needs.vocab_size} tokens")])
    engine = build(offering(slow[0], GrammarSpec, dataclasses.replace(offer, spec=picky)))
    with pytest.raises(RequestError, match="not for 260 tokens"):
        engine.submit(asked("a", regex("x")))
    with pytest.raises(RequestError, match="this kind"):
        engine.submit(asked("a", schema({})))
