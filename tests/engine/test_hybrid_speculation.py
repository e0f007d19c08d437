"""Speculation with recurrent layers and windows: states go no further than the drafts that are right, whatever else happens."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine.test_grammars_ahead import Fussy, Grammars
from engine.test_kinds_at_random import WINDOWS
from engine.test_speculation import ASKS, Scripted, answers_of, assert_equal_answers, used_at_random, with_drafter
from integrity import check_scheduler
from offers import offering
from pairwise import in_turn, spread
from parity.engine_driver import options
from parity.oracle import FAMILIES, Oracle
from parity.test_gpt_oss import CONFIG as GPT_OSS
from parity.test_hybrids import HYBRIDS
from parity.test_mamba import FAMILIES as MAMBA

from enginery.contracts.attention import AttnBackendSpec
from enginery.contracts.batch import Phase
from enginery.contracts.grammars import Grammar, GrammarKind, GrammarSpec
from enginery.contracts.request import GenerationRequest, RequestOutput, SamplingParams
from enginery.engine.engine import Engine
from enginery.errors import PluginError, RequestError, Unsupported
from enginery.plugin.registry import Registry
from enginery_attn_linear.backend import LinearAttention
from enginery_weights_tiny import FOLDER

MODELS = {
    "gemma2": WINDOWS,
    "gpt-oss": GPT_OSS,
    **{name: HYBRIDS[name] for name in ("qwen3_next", "qwen3_5", "kimi_linear", "minimax")},
    **{name: MAMBA[name] for name in ("mamba2", "bamba", "granite", "nemotron_h", "falcon_h1", "jamba", "lfm2")},
}
KINDS = ("right", "wrong", "random", "some", "out of range")
WAYS = (
    {"max_batch_tokens": 24, "page_size": 4},
    {"micro_batches": True, "max_batch_tokens": 64},
    {"overlap": True, "max_batch_tokens": 48, "page_size": 2},
    {"check_attention": True, "prefix_cache": False, "max_batch_requests": 16},
)


@in_turn(("name", spread(MODELS, 7)), ("kind", KINDS), ("way", range(len(WAYS))))
def test_each_is_told_what_plain_decoding_tells(
    write_oracle: Callable[..., Oracle], registry: Registry, name: str, kind: str, way: int
) -> None:
    """Greedy and seeded; chunks of prompts lie beside verifications, some as long as these."""
    oracle = write_oracle(name, MODELS[name])
    assert_equal_answers(registry, options(oracle, **WAYS[way]), requests_of(oracle), kind)


def requests_of(oracle: Oracle) -> list[GenerationRequest]:
    return [
        asking(about, [3 + index, *oracle.prompts[index % 6]][: 20 + 7 * index], **{"max_tokens": 22 - 2 * index, **ASKS[about]})
        for index, about in enumerate(("greedy", "seeded", "penalties", "logprobs"))
    ]


@pytest.mark.parametrize(("name", "kind"), [("qwen3_next", "random"), ("nemotron_h", "some"), ("gemma2", "right")])
def test_keys_and_values_may_be_float8(write_oracle: Callable[..., Oracle], registry: Registry, name: str, kind: str) -> None:
    """States are not: neither matrices nor the inputs of convolutions, which steps of one row would round and others not."""
    oracle = write_oracle(name, MODELS[name])
    assert_equal_answers(registry, options(oracle, kv_dtype="fp8", max_batch_tokens=24), requests_of(oracle), kind)


def asking(about: str, prompt: Sequence[int], **params: object) -> GenerationRequest:
    params = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, **params}
    return GenerationRequest(request_id=about, prompt_token_ids=tuple(prompt), params=SamplingParams(**params))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["qwen3_next", "gemma2"])
def test_random_use_in_a_small_memory_breaks_no_promise(
    write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Requests come, are preempted and aborted amid their drafts; the memory of each kind is whole after each step."""
    engine, counts = used_at_random(
        registry, monkeypatch, write_oracle(name, MODELS[name]), turns=70, num_pages=30, max_batch_requests=6
    )
    assert engine.meter.stats().num_preempted > 0
    assert counts["finished"] > 5
    assert all(pages.free + pages.cached == pages.total for pages in engine.meter.stats().pages.values())


@pytest.mark.parametrize(
    ("name", "kind"),
    spread([("qwen3_next", "right"), ("kimi_linear", "random"), ("lfm2", "some"), ("gemma2", "random")], 2),
)
def test_a_next_turn_goes_on_from_where_the_answer_passed_a_page(
    write_oracle: Callable[..., Oracle], registry: Registry, name: str, kind: str
) -> None:
    """As far as after plain decoding: drafts passed over the ends of pages. It is told what it is told anyhow."""
    oracle = write_oracle(name, MODELS[name])
    asked = options(oracle, page_size=4, num_threads=1)
    prompts = [[3 + index, *oracle.prompts[index][:9]] for index in (1, 3)]
    plain = Engine.build(asked, registry)
    first = [told(plain, prompt, 21) for prompt in prompts]
    turns = [[*prompt, *output.token_ids, 7, 8, 9] for prompt, output in zip(prompts, first, strict=True)]
    second = [told(plain, turn, 9) for turn in turns]
    answers = zip([*prompts, *turns], [*first, *second], strict=True)
    scripted = Scripted(kind, {tuple(prompt): list(output.token_ids) for prompt, output in reversed(list(answers))})
    drafting = dataclasses.replace(asked, drafter="scripted", draft_length="3")
    engine = Engine.build(drafting, with_drafter(registry, lambda _: scripted))
    assert [told(engine, prompt, 21).token_ids for prompt in prompts] == [output.token_ids for output in first]
    again = [told(engine, turn, 9) for turn in turns]
    assert [output.token_ids for output in again] == [output.token_ids for output in second]
    assert [output.num_cached_tokens for output in again] == [output.num_cached_tokens for output in second]
    assert min(output.num_cached_tokens for output in again) >= 28
    engine._scheduler.check_idle()


def told(engine: Engine, prompt: Sequence[int], max_tokens: int) -> RequestOutput:
    """All that one request is told, which comes alone."""
    engine.submit(asking("alone", prompt, max_tokens=max_tokens))
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
        check_scheduler(engine._scheduler)
        for request in engine._scheduler.table.running:
            assert all(point.position <= request.kv.num_written for point in request.kv.points), "of wrong drafts none is left"
    return msgspec.structs.replace(outputs[-1], token_ids=tuple(token for output in outputs for token in output.token_ids))


def test_a_model_drafts_for_one_with_recurrent_layers(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    oracle, small = write_oracle("qwen3_next", MODELS["qwen3_next"]), write_oracle("llama", FAMILIES["llama"])
    requests = [asking(f"{index}", oracle.prompts[index], temperature=0.5 * index, seed=3) for index in range(3)]
    plain = answers_of(Engine.build(options(oracle), registry), requests)
    engine = Engine.build(options(oracle, drafter="auto", draft_model=str(small.folder), draft_length="3"), registry)
    assert {about: one.tokens for about, one in answers_of(engine, requests).items()} == {
        about: one.tokens for about, one in plain.items()
    }
    assert engine.meter.stats().drafts.drafted > 0


class Forgiving(Fussy):
    """Fails the first time that it is asked behind a certain token, and then no more."""

    def fill_mask(self, row: np.ndarray) -> None:
        row[:] = -1
        if self.trap in self.taken and not self.has_raised:
            self.has_raised = True
            raise RequestError("it cannot go on", param="grammar")

    has_raised = False


class ForgivingGrammars(Grammars):
    def start(self) -> Fussy:
        return Forgiving(self.kind, self.trap)


def tokenizer_in(folder: Path) -> str:
    """The embedded model's, without its end, which is none of another model's."""
    tokenizer = shutil.copytree(FOLDER, folder / "tokenizer")
    (tokenizer / "tokenizer_config.json").write_text("{}")
    return str(tokenizer)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_states_go_no_further_than_a_grammar_could_follow(
    write_oracle: Callable[..., Oracle], registry: Registry, name: str, tmp_path: Path
) -> None:
    """All drafts are right, but behind one of them the grammar failed: the tokens from there on are told by later steps."""
    oracle = write_oracle(name, MODELS[name])
    prompt = tuple(oracle.prompts[2])
    plain = told(Engine.build(options(oracle), registry), prompt, 20).token_ids
    place = next(place for place in range(6, 20) if plain[place] not in plain[:place] and place % 4 != 3)
    grammars = ForgivingGrammars("raises", plain[place])
    with_grammars = offering(registry, GrammarSpec, grammars.offered())
    scripted = with_drafter(with_grammars, lambda _: Scripted("right", {prompt: list(plain)}))
    engine = Engine.build(options(oracle, drafter="scripted", draft_length="3", tokenizer=tokenizer_in(tmp_path)), scripted)
    request = asking("", prompt, grammar=Grammar(kind=GrammarKind.REGEX, source="x"))
    assert tuple(answers_of(engine, [request])[""].tokens) == plain
    counts = engine.meter.stats().drafts
    assert 0 < counts.accepted < counts.drafted, "it was cut once, and not drafted since"


def test_backends_that_do_not_verify_recurrent_layers_are_refused_by_name(
    write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = write_oracle("qwen3_next", MODELS["qwen3_next"])
    asked = options(oracle, drafter="lookup")
    (linear,) = (offer for offer in registry.offers(AttnBackendSpec) if offer.name == "linear")
    can = dataclasses.replace(linear.spec.capabilities, phases=linear.spec.capabilities.phases - {Phase.VERIFY})
    silent = dataclasses.replace(linear, spec=dataclasses.replace(linear.spec, capabilities=can))
    others = tuple(silent if offer is linear else offer for offer in registry.offers(AttnBackendSpec))
    with pytest.raises(Unsupported, match=r"(?s)linear.* phase verify is not among"):
        Engine.build(dataclasses.replace(asked, linear_attention_backend="linear"), offering(registry, AttnBackendSpec, *others))
    monkeypatch.delattr(LinearAttention, "commit_state")
    with pytest.raises(PluginError, match=r"linear claims to verify drafts .* LinearAttention has no hook commit_state"):
        Engine.build(asked, registry)
    assert Engine.build(options(oracle), registry).facts, "without a drafter nobody asks"


def test_memory_for_what_is_kept_of_drafts_is_planned(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    oracle = write_oracle("qwen3_next", MODELS["qwen3_next"])
    plain, drafting = (Engine.build(options(oracle, **changes), registry) for changes in ({}, {"drafter": "lookup"}))
    assert "workspace" in plain.facts.memory_plan
    assert drafting.facts.memory_plan != plain.facts.memory_plan
