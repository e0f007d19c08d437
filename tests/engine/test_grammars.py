"""Structured output in the engine: random weights must write what the grammar says, and no grammar harms another request."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import noise
import numpy as np
import pytest
from engine.test_graphs import with_graphs
from pairwise import EVERYTHING, in_turn, spread

from enginery import LLM, SamplingParams
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import Reason
from enginery.contracts.grammars import Grammar, GrammarCompiler, GrammarKind, GrammarSpec, GrammarTokens
from enginery.contracts.request import FinishReason, GenerationRequest, RequestOutput
from enginery.contracts.step import RunSizes, StepInput
from enginery.contracts.versions import HookGroup
from enginery.engine import grammar_queue as grammars
from enginery.engine.engine import Engine
from enginery.errors import QueueFull, RequestError
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.serve.engine import messages
from enginery.serve.engine.client import EngineClient

NOISE: dict[str, Any] = {**noise.OPTIONS, "device": "cpu"}
PROMPT = tuple(range(10, 30))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "😀"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"enum": ["red", "green", 3, None]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "string", "pattern": "^[a-z]{3}$"}, {"type": "null"}]},
    {"$defs": {"leaf": {"const": 1}}, "type": "array", "prefixItems": [{"$ref": "#/$defs/leaf"}], "items": False, "minItems": 1},
    {"type": "object", "properties": {"in": PERSON}, "required": ["in"], "additionalProperties": False},
]


def schema(document: object) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(document))


def regex(pattern: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, source=pattern)


def asked(request_id: str, grammar: Grammar | None, prompt: tuple[int, ...] = PROMPT, **changes: object) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 400, "seed": 1, "grammar": grammar, **changes})
    return GenerationRequest(request_id=request_id, prompt_token_ids=prompt, params=params)


@pytest.fixture(scope="module")
def registry() -> Registry:
    """Whose compilers are kept for the next engine with the same vocabulary: each has a process."""
    found, kept = Registry.load(), dict[tuple[object, ...], GrammarCompiler]()

    def keeping(offer: Offer[GrammarSpec]) -> Offer[GrammarSpec]:
        def load(tokens: GrammarTokens) -> GrammarCompiler:
            key = (offer.name, tokens.tokens, tokens.special_ids, tokens.eos_token_ids)
            return kept.get(key) or kept.setdefault(key, offer.spec.load(tokens))

        return dataclasses.replace(offer, spec=dataclasses.replace(offer.spec, load=load))

    return dataclasses.replace(found, grammars=tuple(map(keeping, found.grammars)))


def build(registry: Registry, **changes: object) -> Engine:
    return Engine.build(EngineOptions(**NOISE | {"num_pages": 400} | changes), registry)


def run(engine: Engine, *requests: GenerationRequest) -> dict[str, list[RequestOutput]]:
    """All outputs of each request; the memory is whole afterwards."""
    for request in requests:
        engine.submit(request)
    return drain(engine, {})


def drain(engine: Engine, outputs: dict[str, list[RequestOutput]]) -> dict[str, list[RequestOutput]]:
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    engine._scheduler.check_integrity()
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text(engine: Engine, outputs: list[RequestOutput]) -> str:
    from enginery.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(engine.facts.folder).decode(tokens(outputs), skip_special_tokens=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_json_follows_its_schema_in_one_batch_with_others(registry: Registry, *, overlap: bool) -> None:
    engine = build(registry, overlap=overlap)
    requests = {
        f"{place}-{seed}": asked(f"{place}-{seed}", schema(document), seed=seed, temperature=seed % 3)
        for place, document in enumerate(SCHEMAS)
        for seed in range(3)
    }
    free = [asked(f"free-{seed}", None, seed=seed, max_tokens=60, temperature=seed % 2, ignore_eos=True) for seed in range(4)]
    alone = run(build(registry), *free)
    outputs = run(engine, *requests.values(), *free)
    for request_id in requests:
        assert outputs[request_id][-1].error is None
        if outputs[request_id][-1].finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(text(engine, outputs[request_id])), SCHEMAS[int(request_id.split("-")[0])])
    stopped = [request_id for request_id in requests if outputs[request_id][-1].finish_reason is FinishReason.STOP]
    assert len(stopped) >= 16, "greedy answers may write digits or spaces to their bound, but no more than two do"
    for request in free:
        assert tokens(outputs[request.request_id]) == tokens(alone[request.request_id])


def test_llm_gives_structured_text() -> None:
    with LLM(num_pages=64) as model:
        choice = Grammar(kind=GrammarKind.CHOICE, source='["maybe", "yes 😀"]')
        answers = model.generate(["a", "b"], [SamplingParams(seed=3, n=2, grammar=choice), SamplingParams(seed=3, max_tokens=5)])
        assert {completion.text for completion in answers[0].completions} <= {"maybe", "yes 😀"}
        assert len(answers[1].token_ids) == 5
        with pytest.raises(RequestError, match="unclosed group") as caught:
            model.generate("a", SamplingParams(grammar=regex("((")))
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("temperature", [0, 1])
def test_overlap_changes_no_token_and_only_grammars_wait(registry: Registry, temperature: float) -> None:
    answers = []
    for overlap in (False, True):
        engine = build(registry, overlap=overlap, max_batch_tokens=16)
        requests = [asked(str(seed), schema(PERSON), seed=seed, temperature=temperature, max_tokens=60) for seed in range(4)]
        outputs = run(engine, *requests)
        answers.append({request_id: (tokens(said), said[-1].finish_reason) for request_id, said in outputs.items()})
    assert answers[0] == answers[1]


def test_a_preempted_answer_goes_on_where_it_was(registry: Registry) -> None:
    requests = [asked(str(seed), regex("([a-f]{6} ){12}"), tuple(range(seed, seed + 30)), seed=seed) for seed in range(5)]
    roomy = run(build(registry), *requests)
    tight, preempted = build(registry, num_pages=24, page_size=16, overlap=True, prefix_cache=False), list[str]()
    next_step = tight._scheduler.next_step

    def noted(sizes: RunSizes) -> StepInput:
        step = next_step(sizes)
        preempted.extend(tight._scheduler.preempted)
        return step

    tight._scheduler.next_step = noted
    outputs = run(tight, *requests)
    assert preempted
    for request in requests:
        assert tokens(outputs[request.request_id]) == tokens(roomy[request.request_id])
        assert len(text(tight, outputs[request.request_id])) == 84


def test_rows_with_a_grammar_leave_the_greedy_tokens_of_a_graph(registry: Registry) -> None:
    options = EngineOptions(**NOISE, num_pages=400)
    requests = [asked("a", regex("[xyz]{20}"), temperature=0), asked("b", None, temperature=0, max_tokens=20, ignore_eos=True)]
    eager = run(build(registry), *requests)
    engine, capture = with_graphs(options, registry)
    outputs = run(engine, *requests)
    assert capture.num_replayed > 10
    assert set(text(engine, outputs["a"])) <= set("xyz")
    assert {key: tokens(said) for key, said in outputs.items()} == {key: tokens(said) for key, said in eager.items()}


@pytest.mark.parametrize(
    ("pattern", "params", "length", "reason"),
    [
        ("a{4}", {}, 4, FinishReason.STOP),
        ("a{4}", {"min_tokens": 10}, 4, FinishReason.STOP),
        ("a{4}", {"ignore_eos": True}, 4, FinishReason.STOP),
        ("a{4}", {"max_tokens": 4}, 4, FinishReason.STOP),
        ("a{4}", {"max_tokens": 3}, 3, FinishReason.LENGTH),
        ("a+", {"ignore_eos": True, "max_tokens": 25}, 25, FinishReason.LENGTH),
        ("a{4}", {"logit_bias": {1: 100, 257: 100}}, 4, FinishReason.STOP),
        ("a{4}", {"stop_token_ids": (64,)}, 1, FinishReason.STOP),
        ("", {"ignore_eos": True, "min_tokens": 5}, 1, FinishReason.STOP),
    ],
)
def test_an_answer_ends_where_its_grammar_does(
    registry: Registry, pattern: str, params: dict[str, Any], length: int, reason: FinishReason
) -> None:
    outputs = run(build(registry, overlap=True), asked("a", regex(pattern), **params))["a"]
    assert (len(tokens(outputs)), outputs[-1].finish_reason) == (length, reason)
    assert outputs[0].is_answer
    assert not any(output.is_answer for output in outputs[1:])


def test_min_tokens_puts_off_an_end_that_the_grammar_allows(registry: Registry) -> None:
    for seed in range(4):
        outputs = run(build(registry), asked("a", regex("a*"), seed=seed, min_tokens=30, logit_bias={257: 100}))["a"]
        assert tokens(outputs)[:30] == tokens(outputs)[:1] * 30
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert len(tokens(outputs)) == 31


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
    yield dataclasses.replace(registry, grammars=(offer,)), compiler
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
    ("source", ["broken", "fails", "nothing", "liar", "starts badly", "stateless", "buggy", "buggy later"]),
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
    }
    count, error = expected[source]
    assert len(tokens(outputs["bad"])) == count
    assert error in (outputs["bad"][-1].error or "")
    assert outputs["bad"][-1].is_answer == (source in ("broken", "starts badly", "stateless"))
    assert tokens(outputs["fine"]) == [5] * 12
    assert len(tokens(outputs["free"])) == 12


def test_an_idle_moment_loads_the_compiler(slow: tuple[Registry, Slow], tmp_path: Path) -> None:
    loaded: list[int] = []
    offer = slow[0].grammars[0]
    spec = dataclasses.replace(offer.spec, load=lambda tokens: loaded.append(tokens.vocab_size) or slow[1])
    counting = dataclasses.replace(slow[0], grammars=(dataclasses.replace(offer, spec=spec),))
    engine = build(counting, graphs=False)
    assert engine.prepare()
    assert loaded == [260]
    assert not engine.prepare()
    slow[1].go.set()
    run(engine, asked("a", regex("x"), max_tokens=2))
    assert loaded == [260]
    echo = dict(architectures=["EchoForCausalLM"], vocab_size=97, max_position_embeddings=256, eos_token_id=5)
    (tmp_path / "config.json").write_text(json.dumps(echo))
    bare = build(counting, model=str(tmp_path), load_format="dummy")
    assert bare.prepare()
    assert not bare.prepare()
    (output,) = run(bare, asked("a", regex("x")))["a"]
    assert "tokenizer.json is missing" in (output.error or "")


def test_without_a_plugin_the_request_is_refused_at_once(registry: Registry) -> None:
    engine = build(dataclasses.replace(registry, grammars=()))
    with pytest.raises(RequestError, match="no plugin compiles the regex"):
        engine.submit(asked("a", regex("x")))
    assert not engine.has_work


def test_a_plugin_that_lacks_the_kind_or_refuses_is_not_used_and_says_why(slow: tuple[Registry, Slow]) -> None:
    offer = slow[0].grammars[0]
    picky = dataclasses.replace(offer.spec, refuse=lambda needs: [Reason(rule="mood", text=f"not for {needs.vocab_size} tokens")])
    engine = build(dataclasses.replace(slow[0], grammars=(dataclasses.replace(offer, spec=picky),)))
    with pytest.raises(RequestError, match="not for 260 tokens"):
        engine.submit(asked("a", regex("x")))
    with pytest.raises(RequestError, match="this kind"):
        engine.submit(asked("a", schema({})))


TOO_LONG = schema({"type": "integer", "multipleOf": 10000019})
HOSTILE = [
    TOO_LONG,
    schema({"properties": {f"p{index}": {} for index in range(18_000)}}),
    schema({"allOf": [{"type": "string", "pattern": f"^.*a.{{{index}}}b.*$"} for index in range(40)]}),
    schema({"$ref": "#"}),
    Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"items":' * 9_000 + "{}" + "}" * 9_000),
    Grammar(kind=GrammarKind.GRAMMAR, source="start: " + "(" * 50_000),
    regex("(a?){5000}a{5000}"),
]


def test_hostile_grammars_are_refused_while_another_request_streams_on(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    if not EVERYTHING:
        monkeypatch.setattr("enginery_grammar_llguidance.compiler.TRIAL_S", 0.5)  # one takes as long as it may
    engine = build(registry, overlap=True)
    run(engine, asked("warm", regex("a")))
    engine.submit(asked("stream", None, max_tokens=250, ignore_eos=True))
    hostile = spread(HOSTILE, 4)
    for number, grammar in enumerate(hostile):
        engine.submit(asked(str(number), grammar))
    refused: dict[str, str] = {}
    streamed, begun = 0, time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            if output.is_answer:
                assert output.error is not None
                refused[output.request_id] = output.error
            elif output.request_id == "stream" and len(refused) < len(hostile):
                streamed += len(output.token_ids)
    assert set(refused) == {str(number) for number in range(len(hostile))}
    assert time.perf_counter() - begun < 4 * grammars.COMPILE_S
    assert streamed > 5 * len(hostile), "the stream stood still"


def test_a_long_chain_of_rules_does_not_overflow_the_stack(registry: Registry) -> None:
    source = "start: r0\n" + "".join(f"r{index}: r{index + 1}\n" for index in range(12_000)) + 'r12000: "a"'
    outputs = run(build(registry), asked("a", Grammar(kind=GrammarKind.GRAMMAR, source=source)))["a"]
    assert tokens(outputs) == [64]


def test_a_grammar_travels_between_processes() -> None:
    request = asked("a", schema(PERSON))
    assert messages.decode_to_engine(messages.encode(messages.Submit(request))) == messages.Submit(request)


async def _ask(client: EngineClient, grammar: Grammar) -> list[int]:
    async with client.generate([asked("a", grammar)]) as outputs:
        return [token async for output in outputs for token in output.token_ids]


async def _talk(registry: Registry) -> list[int]:
    client = await EngineClient.start(EngineOptions(**NOISE, num_pages=64), registry.manifest)
    try:
        await client.ready(registry.manifest.digest())
        for grammar in (regex("(("), schema({"$ref": "#"}), *([TOO_LONG] if EVERYTHING else [])):
            with pytest.raises(RequestError, match=r"cannot be used|too busy") as caught:  # which it may be while tests run
                await _ask(client, grammar)
            assert caught.value.param == "grammar"
        with pytest.raises(TimeoutError):  # the client hangs up while its grammar is compiled; its id is free again
            await asyncio.wait_for(_ask(client, schema({"type": "integer", "multipleOf": 10000079})), 0.3)
        return await _ask(client, regex("abc"))
    finally:
        await client.stop()


def test_the_engines_process_answers_when_a_grammar_is_compiled(registry: Registry) -> None:
    assert asyncio.run(_talk(registry)) == [64, 65, 66]


@pytest.mark.parametrize("source", ["x" * ((1 << 18) + 1), "a\ud800"])
def test_a_source_that_is_too_long_or_no_text_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match=r"262,144|surrogate"):
        regex(source)


def test_params_take_a_grammar_only() -> None:
    with pytest.raises(RequestError, match="must be a Grammar"):
        SamplingParams(grammar="x")  # type: ignore[arg-type]
