"""Structured output in the engine: random weights must write what the grammar says, and no grammar harms another request."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Any

import jsonschema
import noise
import pytest
from engine.test_graphs import with_graphs
from integrity import check_scheduler
from offers import offering
from pairwise import EVERYTHING, spread

from enginery import LLM, SamplingParams
from enginery.config.schema import EngineOptions
from enginery.contracts.grammars import Grammar, GrammarCompiler, GrammarKind, GrammarSpec, GrammarTokens
from enginery.contracts.request import FinishReason, GenerationRequest, RequestOutput
from enginery.contracts.step import RunSizes, StepInput
from enginery.engine import grammar_queue as grammars
from enginery.engine.engine import Engine
from enginery.errors import RequestError
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.serve.engine import messages
from enginery.serve.engine.client import EngineClient
from enginery.serve.engine.outputs import Sent, generate

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

    return offering(found, GrammarSpec, *map(keeping, found.offers(GrammarSpec)))


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
    check_scheduler(engine._scheduler)
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
    there = messages.decode_to_engine(messages.encode(messages.Submit.of([request])))
    assert isinstance(there, messages.Submit)
    assert there.whole() == [request]


async def _ask(client: EngineClient, grammar: Grammar) -> list[int]:
    async with generate([Sent(client, asked("a", grammar))]) as outputs:
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
