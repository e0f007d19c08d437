"""Speculation changes no token: whatever drafts are, and whatever is asked for, each request gets what plain decoding gives."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from engine.random_use import RandomUse
from engine.test_kinds_at_random import prompts_of, small_memory
from integrity import check_scheduler
from offers import offering
from pairwise import EVERYTHING, in_turn, spread
from parity.engine_driver import options
from parity.oracle import FAMILIES, Oracle

from enginery import LLM
from enginery.config.schema import EngineOptions
from enginery.contracts.drafting import DraftAsk, DraftContext, DrafterSpec
from enginery.contracts.grammars import Grammar, GrammarKind
from enginery.contracts.request import FinishReason, GenerationRequest, RequestOutput, SamplingParams
from enginery.engine.engine import Engine
from enginery.errors import RequestError, Unsupported
from enginery.llm.answers import GrowingCompletion, Usage
from enginery.plugin.registry import Registry
from enginery.text.detokenize import TextDelta

TOKENS = 40 if EVERYTHING else 28
VOCABULARY = 256


class Scripted:
    """Drafts by what the requests will say, each of its tokens as it is or not. answers: by prompt."""

    def __init__(self, kind: str, answers: dict[tuple[int, ...], list[int]], seed: int = 0) -> None:
        self.kind, self.answers, self.chance = kind, answers, random.Random(seed)
        self.known: set[str] = set()

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        self.known |= {ask.key for ask in asks}
        return [
            self._guess(list(ask.token_ids))[: self.chance.choice([0, ask.most]) if self.kind == "some" else ask.most]
            for ask in asks
        ]

    def forget(self, key: str) -> None:
        self.known.remove(key)

    def _guess(self, tokens: list[int]) -> list[int]:
        prompt = next(prompt for prompt in self.answers if tuple(tokens[: len(prompt)]) == prompt)
        right = self.answers[prompt][len(tokens) - len(prompt) :]
        if self.kind in ("right", "some"):
            return right
        if self.kind == "wrong":
            return [(token + 1) % VOCABULARY for token in right]
        if self.kind == "out of range":
            return [*right[:1], 1 << 40, -1]
        return [token if self.chance.random() < 0.7 else self.chance.randrange(VOCABULARY) for token in right]


def with_drafter(registry: Registry, build: Callable[[DraftContext], object]) -> Registry:
    spec = DrafterSpec(name="scripted", api=(2, 0), summary="", most=8, build=build)  # type: ignore[arg-type]
    return offering(registry, DrafterSpec, dataclasses.replace(registry.offers(DrafterSpec)[0], spec=spec, name="scripted"))


@dataclasses.dataclass
class Told:
    """What a request was told. logprobs: of its prompt's tokens and its own, each with the likeliest ones beside it."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    reason: FinishReason | None = None


def answers_of(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, Told]:
    """To requests that come at once; the books are checked after each step."""
    for request in requests:
        engine.submit(request)
    told = {request.request_id: Told() for request in requests}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            one = told[output.request_id]
            one.tokens += output.token_ids
            reported = filter(None, (*(output.prompt_logprobs or ()), *(output.logprobs or ())))
            one.logprobs += [value for found in reported for value in (found.logprob, *(each for _, each in found.top))]
            one.reason = output.finish_reason
        check_scheduler(engine._scheduler)
    engine._scheduler.check_idle()
    return told


def assert_equal_answers(registry: Registry, asked: EngineOptions, requests: Sequence[GenerationRequest], kind: str) -> None:
    """With a drafter that knows the answers, and tells them or not."""
    plainly = Engine.build(asked, registry)
    plain = answers_of(plainly, requests)
    scripted = Scripted(kind, {request.prompt_token_ids: plain[request.request_id].tokens for request in requests})
    asked = dataclasses.replace(asked, drafter="scripted", draft_length="3")
    drafted = Engine.build(asked, with_drafter(registry, lambda _: scripted))
    for about, found in answers_of(drafted, requests).items():
        expected = plain[about]
        assert (found.tokens, found.reason) == (expected.tokens, expected.reason), about
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4), about
    if kind == "right":
        assert drafted.meter.num_steps < 0.7 * plainly.meter.num_steps


ASKS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 11},
    "cut": {"temperature": 0.9, "seed": 11, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"temperature": 0.7, "seed": 3, "logit_bias": {5: 4.0}},
    "logprobs": {"temperature": 0.8, "seed": 4, "logprobs": 3, "prompt_logprobs": 1},
    "least": {"temperature": 0.9, "seed": 5, "min_tokens": 12, "ignore_eos": False, "stop_token_ids": tuple(range(0, 250, 7))},
    "stops": {"temperature": 0.9, "seed": 6, "ignore_eos": False, "stop_token_ids": tuple(range(0, 250, 40))},
}


@in_turn(("name", ["llama", "mistral", "deepseek-v2"]), ("kind", ["right", "wrong", "random", "some", "out of range"]))
def test_each_is_told_what_plain_decoding_tells(write_oracle: Callable[..., Oracle], name: str, kind: str) -> None:
    oracle, registry = write_oracle(name, FAMILIES[name]), Registry.load()
    requests = [
        GenerationRequest(
            request_id=about,
            prompt_token_ids=tuple([3 + index, *oracle.prompts[index % 6]][: 20 + 7 * index]),
            params=SamplingParams(**{"max_tokens": TOKENS - index, "ignore_eos": True, **asked}),
        )
        for index, (about, asked) in enumerate(ASKS.items())
    ]
    assert_equal_answers(registry, options(oracle, max_batch_tokens=64), requests, kind)


def test_behind_drafts_an_answer_may_end_where_it_may_in_plain_decoding(write_oracle: Callable[..., Oracle]) -> None:
    """Each at a place of its own, some of them behind drafts: the first that `min_tokens` allows, or the one before."""
    oracle, registry = write_oracle("llama", FAMILIES["llama"]), Registry.load()
    plainly = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    asked = [
        GenerationRequest(request_id=f"{at}", prompt_token_ids=(3 + at, *prompt[:20]), params=SamplingParams(**plainly))
        for at, prompt in enumerate((*oracle.prompts[:4], *oracle.prompts[:4]))
    ]
    free = answers_of(Engine.build(options(oracle), registry), asked)
    ends = [{"stop_token_ids": (free[f"{at}"].tokens[1 + at],), "min_tokens": 1 + at + at // 4} for at in range(len(asked))]
    requests = [dataclasses.replace(one, params=SamplingParams(**plainly, **end)) for one, end in zip(asked, ends, strict=True)]
    assert_equal_answers(registry, options(oracle), requests, "right")


@pytest.mark.parametrize(("name", "kind"), [("llama", "right"), ("mistral", "random")])
def test_keys_and_values_in_float8_are_the_same_ones(write_oracle: Callable[..., Oracle], name: str, kind: str) -> None:
    """Rows that verify read the numbers that decoding reads."""
    oracle, registry = write_oracle(name, FAMILIES[name]), Registry.load()
    requests = [
        GenerationRequest(
            request_id=about,
            prompt_token_ids=tuple([3 + index, *oracle.prompts[index]][: 20 + 9 * index]),
            params=SamplingParams(**{"max_tokens": TOKENS - index, "ignore_eos": True, **ASKS[about]}),
        )
        for index, about in enumerate(("greedy", "seeded", "penalties"))
    ]
    assert_equal_answers(registry, options(oracle, max_batch_tokens=24, kv_dtype="fp8"), requests, kind)


def test_a_draft_model_has_float8_keys_and_values_too() -> None:
    told = {}
    for drafter in ("off", "standalone", "eagle"):
        length = "auto" if drafter == "off" else "2"  # `auto` follows what guesses cost on this machine
        with LLM(drafter=drafter, draft_length=length, num_pages=64, dtype="float32", kv_dtype="fp8", num_threads=1) as model:
            params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
            *deltas, last = model.stream("Tell me a story about a fox named Mia.", params)
            told[drafter] = [token for delta in (*deltas, last) for token in delta.token_ids]
            assert (last.usage.num_accepted_tokens > 30) is (drafter != "off")
            whole = model.generate("Tell me a story about a fox named Mia.", params)[0]
            assert (whole.usage.num_output_tokens, whole.usage.num_accepted_tokens > 30) == (60, drafter != "off")
    assert told["off"] == told["standalone"] == told["eagle"]


@pytest.mark.parametrize("how", ["alone", "micro-batches", "split", "overlap"])
def test_lookup_saves_steps_where_text_repeats(write_oracle: Callable[..., Oracle], how: str) -> None:
    """The plugin itself; what it guesses of random weights is seldom right, but in a loop."""
    oracle, registry = write_oracle("llama", FAMILIES["llama"]), Registry.load()
    bias = {5: 30.0, 6: 30.0}  # two tokens, again and again
    changes = {
        "alone": {},
        "micro-batches": {"micro_batches": True},
        "split": {"prefill_attention_backend": "torch", "decode_attention_backend": "torch"},
        "overlap": {"overlap": True},
    }[how]
    asked = options(oracle, **changes)
    requests = [
        GenerationRequest(
            request_id=f"{index}",
            prompt_token_ids=(3 + index, *oracle.prompts[index]),
            params=SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logit_bias=bias, speculation=index > 0),
        )
        for index in range(4)
    ]
    plain = answers_of(Engine.build(asked, registry), requests)
    drafted = Engine.build(dataclasses.replace(asked, drafter="lookup", draft_length="3"), registry)
    for about, found in answers_of(drafted, requests).items():
        assert (found.tokens, found.reason) == (plain[about].tokens, plain[about].reason)
    counts = drafted.meter.stats().drafts
    assert counts.accepted > 0.5 * counts.drafted > 0
    assert counts.accepted == sum(counts.by_position)


def test_counts_are_of_what_was_told(write_oracle: Callable[..., Oracle]) -> None:
    """Requests end amid right guesses: what was guessed behind their ends is told to nobody, and counted nowhere."""
    oracle, registry = write_oracle("llama", FAMILIES["llama"]), Registry.load()
    params = SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=6, stop_token_ids=tuple(range(0, 250, 5)))
    requests = [
        GenerationRequest(request_id=f"{index}", prompt_token_ids=(3 + index, *oracle.prompts[0][:9]), params=params)
        for index in range(12)
    ]
    unstopped = dataclasses.replace(params, stop_token_ids=(), ignore_eos=True)
    endless = [dataclasses.replace(each, params=unstopped) for each in requests]
    plain = answers_of(Engine.build(options(oracle), registry), endless)
    scripted = Scripted("right", {each.prompt_token_ids: plain[each.request_id].tokens for each in endless})
    asked = options(oracle, drafter="scripted", draft_length="4")
    engine = Engine.build(asked, with_drafter(registry, lambda _: scripted))
    for request in requests:
        engine.submit(request)
    verified, others = [], []
    while engine.has_work:
        for output in engine.step():
            (verified if output.num_drafted else others).append(output)
    counts, told = engine.meter.stats().drafts, sum(len(output.token_ids) for output in verified)
    stopped = {
        each.request_id: next(at for at, token in enumerate(plain[each.request_id].tokens) if token % 5 == 0) for each in requests
    }
    assert told + sum(len(output.token_ids) for output in others) == sum(at + 1 for at in stopped.values())
    assert (counts.told, counts.verifications) == (told, len(verified))
    assert counts.accepted == sum(counts.by_position) == sum(output.num_accepted for output in verified)
    assert all(output.num_accepted == min(len(output.token_ids), output.num_drafted) for output in verified), (
        "of right ones each told"
    )
    assert counts.told < counts.verifications + counts.accepted, "some end amid right guesses"
    assert counts.acceptance_length == counts.told / counts.verifications


@pytest.mark.parametrize("page_size", [1, 2])
def test_what_is_kept_ends_where_a_request_ended_amid_its_guesses(write_oracle: Callable[..., Oracle], page_size: int) -> None:
    """Pages behind that were written, and hold what nobody was told. A next turn goes on from those before."""
    oracle, registry = write_oracle("llama", FAMILIES["llama"]), Registry.load()
    asked = options(oracle, page_size=page_size, num_pages=2000 // page_size)
    endless = [asking_for(f"{index}", (3 + index, *oracle.prompts[0][:9])) for index in range(8)]
    answers = answers_of(Engine.build(asked, registry), endless)
    requests = [asking_for(each.request_id, each.prompt_token_ids, stop_token_ids=tuple(range(0, 250, 5))) for each in endless]
    scripted = Scripted("right", {each.prompt_token_ids: answers[each.request_id].tokens for each in endless})
    drafting = dataclasses.replace(asked, drafter="scripted", draft_length="4")
    engine = Engine.build(drafting, with_drafter(registry, lambda _: scripted))
    told = answers_of(engine, requests)
    turns = [asking_for(each.request_id, (*each.prompt_token_ids, *told[each.request_id].tokens)) for each in requests]
    engine.submit(turns[0])
    cached = [output.num_cached_tokens for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
    assert cached[0] == (len(turns[0].prompt_token_ids) - 1) // page_size * page_size
    expected = answers_of(Engine.build(asked, registry), turns)
    assert {about: each.tokens for about, each in answers_of(engine, turns).items()} == {
        about: each.tokens for about, each in expected.items()
    }


def asking_for(name: str, prompt: Sequence[int], **params: object) -> GenerationRequest:
    asked = {"max_tokens": TOKENS, "temperature": 0.9, "seed": 6, "ignore_eos": not params, **params}
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), params=SamplingParams(**asked))  # type: ignore[arg-type]


def test_stop_strings_cut_amid_guesses() -> None:
    """Of several tokens that a step tells, those behind a stop string are not in the answer, and not counted."""
    asked, answers = "Tell me a story about a fox named Mia.", []
    common = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, "logprobs": 1}
    for drafter, length in (("off", "auto"), ("eagle", "3")):
        with LLM(drafter=drafter, draft_length=length, num_pages=64, dtype="float32") as model:
            whole = model.generate(asked, SamplingParams(**common), progress=False)[0]  # type: ignore[arg-type]
            words = [word for word in whole.text.split() if len(word) > 3]
            stops = [
                SamplingParams(**common, stop=(word,), include_stop=at % 2 == 0)
                for at, word in enumerate(words[2 : 14 if EVERYTHING else 8])
            ]  # type: ignore[arg-type]
            for params in stops:
                *deltas, last = model.stream(asked, params)
                told = [*deltas, last]
                logprobs = [found.logprob for delta in told for found in delta.logprobs or ()]
                tokens = [token for delta in told for token in delta.token_ids]
                answers.append(("".join(delta.text for delta in told), tokens, last.finish_reason))
                assert last.finish_reason == "stop"
                assert len(logprobs) == len(tokens) == last.usage.num_output_tokens
                assert last.usage.num_accepted_tokens <= len(tokens)
    plain, drafted = answers[: len(answers) // 2], answers[len(answers) // 2 :]
    assert plain == drafted
    assert len(plain) == (12 if EVERYTHING else 6)


def test_guesses_behind_a_stop_string_are_not_in_the_usage() -> None:
    """A step tells four tokens, of which three were guessed, and the text ends behind the second."""
    text = SimpleNamespace(feed=lambda token_ids, **_: TextDelta(text="ab", num_tokens=2, stopped_by="b"))
    growing = GrowingCompletion(request_id="r", name="r", index=0, num_prompt_tokens=3, text=text)  # type: ignore[arg-type]
    growing.add(RequestOutput(request_id="r", token_ids=(5, 6, 7, 8), num_drafted=3, num_accepted=3))
    counts = {"num_prompt_tokens": 3, "num_output_tokens": 2, "num_cached_tokens": 0}
    assert growing.usage == Usage(**counts, num_drafted_tokens=2, num_accepted_tokens=2)


def test_a_python_caller_may_do_without_guesses() -> None:
    with LLM(drafter="eagle", draft_length="2", num_pages=64, dtype="float32") as model:
        for speculation in (True, False):
            params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, speculation=speculation)
            *_, last = model.stream("Tell me a story about a fox.", params)
            usage = last.usage
            assert bool(usage.num_drafted_tokens) is bool(usage.num_accepted_tokens) is speculation
            assert usage.num_accepted_tokens <= min(usage.num_drafted_tokens, usage.num_output_tokens)
    with pytest.raises(RequestError, match="speculation is 'off', but must be True or False"):
        SamplingParams(speculation="off")  # type: ignore[arg-type]


def test_backends_that_do_not_verify_are_refused() -> None:
    with pytest.raises(Unsupported, match="phase verify is not among"):
        Engine.build(EngineOptions(device="cpu", attention_backend="echo", drafter="lookup"), Registry.load())


GRAMMARS = {
    "regex": Grammar(kind=GrammarKind.REGEX, source="[a-f ]{1,25}"),
    "choice": Grammar(kind=GrammarKind.CHOICE, source='["a rather long answer", "another one"]'),
    "object": Grammar(kind=GrammarKind.JSON_OBJECT, source=""),
}


@pytest.mark.parametrize("kind", spread(["right", "out of range", "random"], 2))
def test_grammars_hold_behind_each_draft(kind: str) -> None:
    requests = [
        GenerationRequest(
            request_id=f"{about} {heat}",
            prompt_token_ids=tuple(range(5, 20 + index)),
            params=SamplingParams(max_tokens=TOKENS, temperature=heat, seed=index, grammar=grammar, min_tokens=index),
        )
        for index, (about, grammar) in enumerate(GRAMMARS.items())
        for heat in (0.0, 1.0)
    ]
    requests = [
        dataclasses.replace(each, prompt_token_ids=(9 + place, *each.prompt_token_ids)) for place, each in enumerate(requests)
    ]
    assert_equal_answers(Registry.load(), EngineOptions(num_pages=200, num_threads=1, dtype="float32"), requests, kind)


@in_turn(("name", ["llama", "mistral"]), ("overlap", [False, True]))
def test_random_use_in_a_small_memory_breaks_no_promise(
    write_oracle: Callable[..., Oracle], monkeypatch: pytest.MonkeyPatch, name: str, overlap: bool
) -> None:
    """Requests come, are preempted and aborted amid their drafts; the memory is whole after each step."""
    oracle = write_oracle(name, FAMILIES[name])
    engine, counts = used_at_random(Registry.load(), monkeypatch, oracle, turns=150, overlap=overlap)
    assert engine.meter.stats().num_preempted > 0
    assert counts["finished"] > 15


def used_at_random(
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    oracle: Oracle,
    *,
    turns: int,
    script: Callable[[str, dict[tuple[int, ...], list[int]]], Scripted] = Scripted,
    offer: Callable[[Registry, Scripted], Registry] = lambda registry, scripted: with_drafter(registry, lambda _: scripted),
    **changes: object,
) -> tuple[Engine, Counter[str]]:
    """Whoever is told something is told what it is told alone. Drafts are right and wrong by chance.

    script, offer: the drafter that knows what will be told, and the registry with it.
    """
    chance = random.Random(3)
    prompts = [tuple(prompt) for prompt in prompts_of(oracle)]
    requests = [
        GenerationRequest(
            request_id=f"{place}", prompt_token_ids=prompt, params=SamplingParams(max_tokens=40, temperature=1.0, seed=1)
        )
        for place, prompt in enumerate(prompts)
    ]
    plainly = answers_of(Engine.build(options(oracle, prefix_cache=False), registry), requests)
    expected = {request.prompt_token_ids: plainly[request.request_id].tokens for request in requests}
    scripted = script("random", expected)
    small_memory(monkeypatch, windows=16)
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    small = {"page_size": 4, "num_pages": 32, "max_batch_tokens": 24, "max_batch_requests": 4, "max_model_len": 120}
    drafting = dataclasses.replace(options(oracle, **{**small, **changes}), drafter="scripted", draft_length="3")
    engine = Engine.build(drafting, offer(registry, scripted))

    def ask(name: str) -> GenerationRequest:
        params = SamplingParams(max_tokens=chance.randint(1, 40), temperature=1.0, seed=1)
        return GenerationRequest(request_id=name, prompt_token_ids=chance.choice(prompts), params=params)

    use = RandomUse(engine, chance, ask)
    told = use.turns(turns, arrivals=0.4, aborts=0.08, evict_each=40)
    for request, tokens in told:
        assert tokens == expected[request.prompt_token_ids][: len(tokens)]
    engine._scheduler.check_idle()
    assert len(scripted.known) <= 4, "all are forgotten but for those of the last step"
    return engine, use.counts
