"""Speculation on several tensor ranks: tokens are those of plain decoding, and guesses those of one rank, on each of them.

Ranks are threads (`rank_threads`); two processes are in `test_rank_processes.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cuda_simulated import simulated
from engine import model_heads, prediction_modules, test_frozen_keys
from engine.captured_backends import captured
from engine.draft_models import SAID, assert_always_right, assert_told, by_itself, changed_head, embedded, prompt_of
from engine.heads_made import Eagle3, Module
from engine.model_heads import asking
from engine.random_use import RandomUse
from engine.rank_threads import Guesses, noted, on_threads
from engine.small_pair import small_model
from engine.test_hybrid_speculation import MODELS, ForgivingGrammars, tokenizer_in
from engine.test_hybrid_speculation import told as told_alone
from engine.test_speculation import ASKS, Scripted, Told, answers_of, with_drafter
from offers import offering
from pairwise import EVERYTHING, spread
from parity.engine_driver import options
from parity.oracle import FAMILIES, Oracle, shape
from transformers import LlamaConfig

from enginery.config.schema import EngineOptions
from enginery.contracts.grammars import Grammar, GrammarKind, GrammarSpec
from enginery.contracts.parallel import ParallelFacts
from enginery.contracts.request import GenerationRequest
from enginery.engine.engine import Engine
from enginery.errors import ConfigError, Unsupported
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.drafts.parts import _OwnColumns
from enginery.worker.ranks.groups import refuse_for_ranks

module_of, chain_of = prediction_modules.module_of, prediction_modules.chain_of  # fixtures
llama_of_six, llama_of_four = model_heads.llama, test_frozen_keys.llama


def answers_and_guesses(engine: Engine, requests: Sequence[GenerationRequest]) -> tuple[dict[str, Told], Guesses]:
    guesses = noted(engine._runner)
    return answers_of(engine, requests), guesses


def assert_as_on_one(
    registry: Registry,
    asked: EngineOptions,
    requests: Sequence[GenerationRequest],
    begin: Callable[[], None] = lambda: None,
    *,
    ep: bool = False,
) -> None:
    """Tokens of plain decoding, the guesses of one rank. begin: called before each engine that drafts."""
    plain = dataclasses.replace(asked, drafter="off", draft_model=None, draft_length="auto")
    expected = answers_of(Engine.build(plain, registry), requests)
    begin()
    one = Engine.build(asked, registry)
    found, guesses = answers_and_guesses(one, requests)
    assert_told(found, expected)
    begin()
    with on_threads(dataclasses.replace(asked, tp=2, ep=ep), registry) as (two, ranks):
        assert_told(answers_of(two, requests), expected)
    assert sum(map(len, guesses)) > 10
    assert ranks.guesses == [guesses, guesses]
    assert two.meter.stats().drafts == one.meter.stats().drafts


@pytest.mark.parametrize(("drafter", "overlap"), [("eagle", True), ("standalone", False)])
def test_the_embedded_model_has_its_drafters_on_two_ranks(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, drafter: str, overlap: bool
) -> None:
    """Whatever is asked, in chunks, while lengths change: with none there are steps that nobody waits for."""
    requests = [asking(about, prompt_of(SAID[at]), **{"max_tokens": 16, **asked}) for at, (about, asked) in enumerate(ASKS.items())]
    requests += [asking("undrafted", prompt_of(SAID[5]), speculation=False), asking("one token", (8, 9), max_tokens=1)]

    def begin() -> None:
        chance = random.Random(2)
        monkeypatch.setattr("enginery.speculate.length.DraftLength.of", lambda self, count: chance.choice((0, 0, 1, 2, 3)))

    asked = embedded(drafter=drafter, draft_length="3", max_batch_tokens=96, overlap=overlap)
    assert_as_on_one(registry, asked, requests, begin)


def asked_of(prompts: Sequence[Sequence[int]]) -> list[GenerationRequest]:
    return [
        asking(f"{at} {heat}", prompt[: 30 + at], temperature=heat, seed=at, max_tokens=12 + at)
        for at, prompt in enumerate(prompts[1:3])
        for heat in (0.0, 0.8)
    ]


SMALL_PAGES = {"page_size": 4, "num_pages": 800, "draft_length": "3"}


@pytest.mark.parametrize("own", [97, 256] if EVERYTHING else [97])
def test_an_eagle3_head_is_divided(llama_of_six: Oracle, registry: Registry, tmp_path: Path, own: int) -> None:
    """Its own vocabulary too, also where that does not divide."""
    drafter = {"drafter": "eagle3", "draft_model": str(Eagle3(own=own).write(tmp_path))}
    asked = model_heads.options(llama_of_six.folder, **SMALL_PAGES, **drafter)
    assert_as_on_one(registry, asked, asked_of(llama_of_six.prompts))


@pytest.mark.parametrize("name", [*prediction_modules.MODULES] if EVERYTHING else ["deepseek-v3", "qwen3-next"])
def test_a_module_is_divided(module_of: Callable[..., Module], registry: Registry, name: str) -> None:
    """Of experts and latents, and of a hybrid."""
    module = module_of(name)
    asked = model_heads.options(module.folder, drafter="mtp", **SMALL_PAGES)
    assert_as_on_one(registry, asked, asked_of(module.oracle.prompts))


@pytest.mark.parametrize("name", ["mimo-v2-flash", "deepseek-v3", "qwen3.5"] if EVERYTHING else ["mimo-v2-flash"])
def test_a_chain_of_modules_is_divided(chain_of: Callable[..., Module], registry: Registry, name: str) -> None:
    module = chain_of(name)
    asked = model_heads.options(module.folder, drafter="mtp", **SMALL_PAGES)
    assert_as_on_one(registry, asked, asked_of(module.oracle.prompts))


def test_a_module_without_experts_drafts_for_experts_that_are_divided(module_of: Callable[..., Module], registry: Registry) -> None:
    """As MiMo's, where `--ep` is of the model alone."""
    module = module_of("mimo-v2-flash")
    asked = model_heads.options(module.folder, drafter="mtp", **SMALL_PAGES)
    assert_as_on_one(registry, asked, asked_of(module.oracle.prompts), ep=True)


def test_ranks_read_the_keys_and_values_of_their_heads(llama_of_four: Oracle, registry: Registry, tmp_path: Path) -> None:
    drafter = {"drafter": "reader", "draft_model": str(test_frozen_keys.write(tmp_path / "reader"))}
    asked = model_heads.options(llama_of_four.folder, **SMALL_PAGES, **drafter)
    assert_as_on_one(test_frozen_keys.with_reader(registry), asked, asked_of(llama_of_four.prompts))


def test_a_head_that_gives_no_numbers_changes_no_token(registry: Registry, tmp_path: Path) -> None:
    changed_head(tmp_path, lambda tensors: {name: torch.full_like(each, torch.nan) for name, each in tensors.items()})
    requests = [asking(f"{heat}", prompt_of(SAID[2]), temperature=heat, seed=1, max_tokens=8) for heat in (0.0, 0.9)]
    expected = answers_of(Engine.build(embedded(), registry), requests)
    with on_threads(embedded(drafter="eagle", draft_length="2", draft_model=str(tmp_path), tp=2), registry) as (engine, _):
        for request in requests:  # greedy and drawn apart: ranks choose together otherwise
            assert_told(answers_of(engine, [request]), {request.request_id: expected[request.request_id]})


@pytest.mark.parametrize("name", spread(["mistral", "deepseek-v2"], 1))
def test_a_model_that_drafts_for_itself_is_always_right(write_oracle: Callable[..., Oracle], registry: Registry, name: str) -> None:
    """In chunks, and again where all but the end is cached; drawn too."""
    oracle = write_oracle(name, FAMILIES[name])
    requests = asked_of(oracle.prompts)
    with on_threads(by_itself(oracle, tp=2, max_batch_tokens=16, draft_length="3", page_size=4), registry) as (engine, _):
        first = answers_of(engine, requests)
        assert answers_of(engine, requests) == first
        assert_always_right(engine)
        assert told_alone(engine, requests[0].prompt_token_ids, 4).num_cached_tokens > 0


@pytest.mark.parametrize("vocab_size", [256, 251] if EVERYTHING else [251])
def test_a_model_that_ranks_cannot_share_drafts_whole_on_each(
    write_oracle: Callable[..., Oracle], registry: Registry, vocab_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three heads; also with fewer tokens than the target has, of which the ranks look at as many each."""
    oracle = write_oracle("llama", FAMILIES["llama"])
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "num_hidden_layers": 1}
    small = write_oracle(f"three heads {vocab_size}", LlamaConfig(**shape(vocab_size=vocab_size, **sizes)))
    asked = by_itself(oracle, draft_model=str(small.folder), **SMALL_PAGES)
    with caplog.at_level(logging.INFO):
        assert_as_on_one(registry, asked, asked_of(oracle.prompts))
    assert "each rank runs the whole draft model: the attention's query heads: 3, which 2 ranks cannot share" in caplog.text


@pytest.mark.parametrize(("vocab_size", "size"), [(251, 4), (5, 4), (6, 2)])
def test_ranks_with_a_whole_model_look_at_each_token_once(vocab_size: int, size: int) -> None:
    """The last ones too, where the vocabulary does not divide; a rank may have none."""
    logits = torch.arange(1.0, 1 + 2 * vocab_size).view(2, vocab_size)
    ranks = [ParallelFacts(tensor_rank=rank, tensor_size=size) for rank in range(size)]
    columns = [_OwnColumns(Mock(logits=lambda _: logits), vocab_size, rank).logits(torch.empty(2, 1)) for rank in ranks]
    assert len({each.shape for each in columns}) == 1, "all exchange as much"
    assert torch.equal(torch.cat(columns, dim=-1)[:, :vocab_size], logits)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_random_use_in_a_small_memory_breaks_no_promise(registry: Registry, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Requests come, are preempted and aborted amid their drafts, on all ranks; on devices, simulated ones, in graphs."""
    chance = random.Random(5)
    prompts = [prompt_of(said)[:30] for said in SAID]
    asked = [asking(f"{at}", each, max_tokens=25, temperature=0.7, seed=1) for at, each in enumerate(prompts)]
    alone = answers_of(Engine.build(small_model(prefix_cache=False), registry), asked)
    expected = {request.prompt_token_ids: alone[request.request_id].tokens for request in asked}
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    small = {"page_size": 4, "num_pages": 22, "max_batch_tokens": 24, "max_batch_requests": 4, "max_model_len": 80}

    def ask(name: str) -> GenerationRequest:
        return asking(name, chance.choice(prompts), max_tokens=chance.randint(1, 25), temperature=0.7, seed=1)

    drafting = small_model(drafter="eagle", draft_length="3", tp=2, attention_backend="torch", device=device, **small)
    ranks = captured(registry) if device == "cuda" else registry
    with simulated() if device == "cuda" else nullcontext(), on_threads(drafting, ranks) as (engine, _):
        use = RandomUse(engine, chance, ask)
        told = use.turns(50, arrivals=0.5, aborts=0.08, evict_each=36)
        engine._scheduler.check_idle()
        stats = engine.meter.stats()
    assert (stats.num_graph_steps > 20) == (device == "cuda")
    for request, tokens in told:
        assert tokens == expected[request.prompt_token_ids][: len(tokens)]
    assert stats.num_preempted > 0
    assert stats.drafts.accepted > 10


@pytest.mark.parametrize(
    ("name", "kind"),
    spread([("qwen3_next", "random"), ("kimi_linear", "random"), ("lfm2", "some"), ("falcon_h1", "right")], 2),
)
def test_states_move_alike_on_all_ranks(write_oracle: Callable[..., Oracle], registry: Registry, name: str, kind: str) -> None:
    """No further than the drafts that are right, also where a next turn goes on from the middle of an answer."""
    oracle = write_oracle(name, MODELS[name])
    asked = options(oracle, page_size=4, max_batch_tokens=24)
    prompts = [[3 + index, *oracle.prompts[index][:9]] for index in (1, 3)]
    plain = Engine.build(asked, registry)
    first = [told_alone(plain, prompt, 21) for prompt in prompts]
    turns = [[*prompt, *output.token_ids, 7, 8, 9] for prompt, output in zip(prompts, first, strict=True)]
    second = [told_alone(plain, turn, 9) for turn in turns]
    answers = zip([*prompts, *turns], [*first, *second], strict=True)
    scripted = Scripted(kind, {tuple(prompt): list(output.token_ids) for prompt, output in reversed(list(answers))})
    drafting = dataclasses.replace(asked, drafter="scripted", draft_length="3", tp=2)
    with on_threads(drafting, with_drafter(registry, lambda _: scripted)) as (engine, _):
        assert [told_alone(engine, prompt, 21).token_ids for prompt in prompts] == [output.token_ids for output in first]
        again = [told_alone(engine, turn, 9) for turn in turns]
        assert engine.meter.stats().drafts.accepted > 20
    assert [output.token_ids for output in again] == [output.token_ids for output in second]
    assert [output.num_cached_tokens for output in again] == [output.num_cached_tokens for output in second]
    assert min(output.num_cached_tokens for output in again) >= 28


@pytest.mark.parametrize("name", spread(["qwen3_next", "lfm2"], 1))
def test_states_go_no_further_than_a_grammar_could_follow(
    write_oracle: Callable[..., Oracle], registry: Registry, name: str, tmp_path: Path
) -> None:
    """The first rank alone has the grammar, which fails behind a right draft."""
    oracle = write_oracle(name, MODELS[name])
    prompt = tuple(oracle.prompts[2])
    plain = told_alone(Engine.build(options(oracle), registry), prompt, 20).token_ids
    place = next(place for place in range(6, 20) if plain[place] not in plain[:place] and place % 4 != 3)
    with_grammars = offering(registry, GrammarSpec, ForgivingGrammars("raises", plain[place]).offered())
    scripted = with_drafter(with_grammars, lambda _: Scripted("right", {prompt: list(plain)}))
    asked = options(oracle, drafter="scripted", draft_length="3", tokenizer=tokenizer_in(tmp_path), tp=2)
    request = asking("", prompt, grammar=Grammar(kind=GrammarKind.REGEX, source="x"), max_tokens=20)
    with on_threads(asked, scripted) as (engine, _):
        assert tuple(answers_of(engine, [request])[""].tokens) == plain
        counts = engine.meter.stats().drafts
    assert 0 < counts.accepted < counts.drafted, "it was cut once, and not drafted since"


def test_each_rank_has_its_part_of_the_draft_model_s_pages(registry: Registry) -> None:
    """Two KV heads are divided."""
    asked = embedded(drafter="eagle", num_pages=None, kv_memory_gib=0.01, max_batch_requests=64)
    one = Engine.build(asked, registry).facts.num_pages
    with on_threads(dataclasses.replace(asked, tp=2), registry) as (engine, _):
        assert engine.facts.num_pages in (2 * one + 1, 2 * one + 2)  # beside the scratch page


def test_ranks_with_draft_models_that_differ_are_refused(llama_of_six: Oracle, registry: Registry, tmp_path: Path) -> None:
    asked, other = (str(Eagle3(own=own).write(tmp_path / f"{own}")) for own in (96, 98))
    given = model_heads.options(llama_of_six.folder, drafter="eagle3", draft_model=asked, tp=2)
    message = r"the draft models of this engine are not alike:\n  - checkpoint is \w+ on rank 1, and \w+ on rank 0"
    with pytest.raises(ConfigError, match=message), on_threads(given, registry, draft_model=other):
        pass


def test_a_draft_model_that_ranks_cannot_share_is_refused_by_name(llama_of_six: Oracle, registry: Registry, tmp_path: Path) -> None:
    folder = Eagle3().write(tmp_path, num_attention_heads=3, num_key_value_heads=3)
    given = model_heads.options(llama_of_six.folder, drafter="eagle3", draft_model=str(folder), tp=2)
    message = r"--drafter eagle3 cannot run beside .*: the attention's query heads: 3, which 2 ranks cannot share"
    with pytest.raises(Unsupported, match=message), on_threads(given, registry):
        pass


@pytest.mark.parametrize("drafter", ["lookup", "eagle"])
def test_stages_have_no_drafter(registry: Registry, drafter: str) -> None:
    choice = choose(embedded(drafter=drafter, pp=2), registry, parallel=ParallelFacts(num_stages=2))
    with pytest.raises(Unsupported, match=rf"--drafter {drafter} guesses what follows the last tokens, and with --pp 2"):
        refuse_for_ranks(choice)
