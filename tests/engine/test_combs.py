"""Guesses of draft models with the likeliest others beside them: no token differs, and what comes behind a sibling is followed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine.draft_models import (
    SAID,
    SAID_ASKS,
    SELVES,
    asking,
    assert_told,
    branching,
    by_itself,
    come_and_go,
    counts_of,
    embedded,
    prompt_of,
)
from engine.heads_made import Eagle3, Module
from engine.model_heads import options as head_options
from engine.prediction_modules import chain_of, module_of
from engine.random_use import RandomUse
from engine.small_pair import small_model
from engine.test_device_drafts import captured, unread
from engine.test_frozen_keys import EPS, with_reader
from engine.test_frozen_keys import write as write_reader
from engine.test_speculation import ASKS, GRAMMARS, answers_of
from engine.test_trees import BACKENDS, WAYS, backend_of, requests_of, written_by_step
from pairwise import in_turn
from parity.engine_driver import options
from parity.oracle import Oracle, shape
from transformers import LlamaConfig

from enginery.config.schema import EngineOptions
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.request import GenerationRequest
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.drafts import draws as draws_module
from enginery.worker.drafts.draws import GuessDraws, beside
from enginery.worker.drafts.trees import Chain, standing_chain

__all__ = ["chain_of", "module_of", "unread"]  # fixtures of others


def shuffled(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of what is guessed, and beside it, what is the guess: the likeliest token, the next, by chance, or a wrong one."""
    chance = random.Random(3)

    def turned(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> torch.Tensor:
        found = beside(logits, chosen, count)
        if kind == "wrong":
            return (found + 1) % logits.shape[1]
        return found.roll({"right": 0, "beside": 1, "random": chance.randrange(1 + count)}[kind], 1)

    for user in (draws_module, "enginery.worker.drafts.draft_graphs"):
        target = f"{user}.beside" if isinstance(user, str) else f"{user.__name__}.beside"
        monkeypatch.setattr(target, turned)


# Tokens.


@in_turn(
    ("name", ["llama", "qwen3", "deepseek-v2", "glm4", "mixtral"]),
    ("kind", ["right", "beside", "random", "wrong"]),
    ("way", range(len(WAYS))),
    ("backend", BACKENDS),
    ("siblings", [1, 2]),
)
def test_each_is_told_what_plain_decoding_tells(
    write_oracle: Callable[..., Oracle],
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    *,
    name: str,
    kind: str,
    way: int,
    backend: str,
    siblings: int,
) -> None:
    """A model drafts for itself: what it would say is the guess, or beside it, or neither."""
    oracle = write_oracle(f"self {name}", SELVES[name])
    requests = requests_of(oracle)
    changes = {"attention_backend": backend_of(name, backend), **WAYS[way]}
    expected = answers_of(Engine.build(options(oracle, **changes), registry), requests)
    shuffled(monkeypatch, kind)
    engine = Engine.build(by_itself(oracle, draft_length="3", **changes), branching(registry, "standalone", siblings))
    assert_told(answers_of(engine, requests), expected)
    counts = counts_of(engine)
    assert counts.drafted > 3 * counts.verifications, "most steps verify more than a chain"
    if kind != "wrong":
        assert counts.accepted > 0.5 * counts.verifications, counts


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_within_graphs_what_stands_beside_a_guess_is_moved_and_followed(
    unread: None, write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """The likeliest or drawn token is always the sibling; what accepts best tokens is within the graph, of drawn ones behind it."""
    oracle = write_oracle("self llama", SELVES["llama"])
    prompts = [oracle.prompts[place] for place in (0, 5, 2)]
    requests = [asking(f"{at}", each, max_tokens=20, temperature=temperature, seed=at) for at, each in enumerate(prompts)]
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    shuffled(monkeypatch, "beside")
    asked = by_itself(oracle, draft_length="2", page_size=4, num_pages=200)
    engine, capture, _ = captured(asked, branching(registry, "standalone"))
    if not temperature:
        monkeypatch.setattr("enginery.worker.runner.accept", None)
    assert_told(answers_of(engine, requests), expected)
    counts = counts_of(engine)
    assert counts.by_position == (counts.accepted,)
    assert counts.verifications - counts.accepted == 2 * len(requests), "the last two have no room for siblings"
    assert capture.num_replayed > 20


def test_what_stands_beside_a_guess_is_one_token_and_what_follows_it_is_guessed_as_well(
    write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest token is always the sibling, so each verification finds one; prompts come in chunks beside the others."""
    oracle = write_oracle("self llama", SELVES["llama"])
    requests = [asking(f"{at}", oracle.prompts[place], max_tokens=20) for at, place in enumerate((0, 5, 2, 4))]
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    shuffled(monkeypatch, "beside")
    asked = by_itself(oracle, draft_length="2", page_size=4, max_batch_tokens=40)
    engine = Engine.build(asked, branching(registry, "standalone"))
    assert_told(come_and_go(engine, requests), expected)
    counts = counts_of(engine)
    assert counts.by_position == (counts.accepted,)
    assert counts.verifications - counts.accepted == 2 * len(requests), "the last two have no room for siblings"


@pytest.mark.parametrize(("drafter", "kind"), [("eagle", "right"), ("standalone", "beside")])
def test_the_embedded_model_says_the_same_whatever_is_asked_for(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, drafter: str, kind: str
) -> None:
    """Grammars, penalties, log-probabilities behind each sibling; answers that end amid their drafts."""
    requests = [asking(about, prompt_of(SAID[at]), **asked) for at, (about, asked) in enumerate(SAID_ASKS.items())]
    requests += [
        asking(f"{about} {heat}", (at, *prompt_of(SAID[4])), temperature=heat, seed=7, grammar=grammar, ignore_eos=False)
        for at, (about, grammar) in enumerate(GRAMMARS.items())
        for heat in (0.0, 0.8)
    ]
    requests += [asking("ends", prompt_of(SAID[0]), ignore_eos=False, max_tokens=200)]
    expected = answers_of(Engine.build(embedded(), registry), requests)
    shuffled(monkeypatch, kind)
    engine = Engine.build(embedded(drafter=drafter, draft_length="3"), branching(registry, drafter, 2))
    assert_told(answers_of(engine, requests), expected)
    assert counts_of(engine).accepted > (1 if kind == "right" else 0.6) * counts_of(engine).verifications


@pytest.mark.parametrize("how", ["eager", "captured"])
@pytest.mark.parametrize("drafter", ["eagle", "standalone"])
def test_where_the_device_alone_knows_lengths_as_many_are_right(
    request: pytest.FixtureRequest, registry: Registry, drafter: str, how: str
) -> None:
    said = ("Hello", "Tell me a story about a fox named Mia.", "Name three colours.", "What is 47 + 38?")
    requests = [asking(f"{at}", prompt_of(each), max_tokens=24 - 2 * at) for at, each in enumerate(said)]
    requests += [asking(about, prompt_of(said[1]), **ASKS[about]) for about in ("seeded", "cut", "penalties", "logprobs")]
    expected = answers_of(Engine.build(embedded(), registry), requests)
    changes = {"draft_length": "2", "attention_backend": "torch", "num_pages": 120, "max_batch_requests": 24}
    asked, branches = embedded(drafter=drafter, **changes), branching(registry, drafter)
    reading = Engine.build(asked, branches)
    assert_told(answers_of(reading, requests), expected)
    request.getfixturevalue("unread")
    engine = Engine.build(asked, branches) if how == "eager" else captured(asked, branches)[0]
    assert_told(answers_of(engine, requests), expected)
    assert counts_of(engine) == counts_of(reading)
    assert counts_of(engine).accepted > counts_of(engine).verifications
    if how == "captured":
        assert {depth for *_, depth in engine._runner.graphs.captured} >= {0, 2}  # type: ignore[union-attr]


def test_random_use_in_a_small_memory_breaks_no_promise(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come, are preempted and aborted amid their drafts; the memory is whole after each step, and siblings are moved."""
    chance = random.Random(6)
    prompts = [prompt_of(said)[:30] for said in SAID]
    asked = [asking(f"{at}", each, temperature=0.7, seed=1) for at, each in enumerate(prompts)]
    alone = answers_of(Engine.build(small_model(prefix_cache=False), registry), asked)
    expected = {request.prompt_token_ids: alone[request.request_id].tokens for request in asked}
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    shuffled(monkeypatch, "random")
    small = {"page_size": 4, "num_pages": 22, "max_batch_tokens": 24, "max_batch_requests": 10, "max_model_len": 80}
    engine = Engine.build(small_model(drafter="eagle", draft_length="2", **small), branching(registry, "eagle"))

    def ask(name: str) -> GenerationRequest:
        return asking(name, chance.choice(prompts), max_tokens=chance.randint(1, 25), temperature=0.7, seed=1)

    use, moved = RandomUse(engine, chance, ask), moves_of(monkeypatch)
    told = use.turns(120, arrivals=0.5, aborts=0.08, evict_each=30)
    for request, tokens in told:
        assert tokens == expected[request.prompt_token_ids][: len(tokens)]
    assert engine.meter.stats().num_preempted > 0
    assert use.counts["finished"] > 15
    assert sum(moved) > 20
    engine._scheduler.check_idle()


def moves_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests' siblings stood in each step that verified trees, as they come."""
    counts = list[int]()

    def noted(batch: ForwardBatch, path: torch.Tensor, depth: int) -> Chain:
        counts.append(int((path[:, 1:] > torch.arange(1, path.shape[1])).any(1).sum()))
        return standing_chain(batch, path, depth)

    monkeypatch.setattr("enginery.worker.drafts.trees.standing_chain", noted)
    return counts


# What is in memory, and what is guessed from it.


@in_turn(("name", ["llama", "deepseek-v2"]), ("backend", BACKENDS))
def test_what_is_kept_is_what_plain_decoding_keeps(
    write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch, name: str, backend: str
) -> None:
    oracle = write_oracle(f"self {name}", SELVES[name])
    requests = requests_of(oracle, {about: ASKS[about] for about in ("greedy", "seeded", "penalties", "stops")})
    changes = {"attention_backend": backend_of(name, backend), "page_size": 4, "max_batch_tokens": 64}
    plain = written_by_step(Engine.build(options(oracle, **changes), registry), requests)
    shuffled(monkeypatch, "random")
    engine = Engine.build(by_itself(oracle, draft_length="2", **changes), branching(registry, "standalone", 2))
    for about, values in written_by_step(engine, requests).items():
        both = min(len(values), len(plain[about]))
        assert both > 20
        assert torch.allclose(values[:both], plain[about][:both], atol=1e-4), about


def first_logits(
    engine: Engine, request: GenerationRequest, monkeypatch: pytest.MonkeyPatch, pick: Callable[[int], list[int]]
) -> dict[int, torch.Tensor]:
    """Of the first guess after each step, by its position. pick: what is taken for the guesses at a position, and beside them."""
    found, seen, choose = dict[int, torch.Tensor](), list[GuessDraws](), GuessDraws.choose

    def noted(self: GuessDraws, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        (position,) = positions.tolist()
        if seen[-1:] != [self]:
            seen.append(self)
            found[position] = logits[0].double()
        return torch.tensor([pick(position)[: choose(self, logits, positions).shape[1]]])

    with monkeypatch.context() as patch:
        patch.setattr(GuessDraws, "choose", noted)
        engine.submit(request)
        while engine.has_work:
            engine.step()
    return found


Target = tuple[EngineOptions, Registry, list[int]]


def drafting_model(name: str, request: pytest.FixtureRequest, registry: Registry, folder: Path) -> Target:
    """A drafter, and a prompt for its target."""
    write: Callable[..., Oracle] = request.getfixturevalue("write_oracle")
    if name == "standalone":
        oracle = write("self llama", SELVES["llama"])
        given: dict[str, object] = {"drafter": "standalone", "draft_model": str(oracle.folder)}
        return head_options(oracle.folder, **given), registry, oracle.prompts[4]
    if name == "eagle3":
        oracle = write("llama of six", LlamaConfig(**shape(num_hidden_layers=6, rms_norm_eps=1e-5)))
        given = {"drafter": "eagle3", "draft_model": str(Eagle3(own=256).write(folder))}
        return head_options(oracle.folder, **given), registry, oracle.prompts[4]
    if name == "reader":
        oracle = write("llama of four", LlamaConfig(**shape(rms_norm_eps=EPS)))
        given = {"drafter": "reader", "draft_model": str(write_reader(folder / "reader"))}
        return head_options(oracle.folder, **given), with_reader(registry), oracle.prompts[4]
    module: Module = request.getfixturevalue("chain_of" if name == "chain" else "module_of")("glm4-moe")
    return head_options(module.folder, drafter="mtp"), registry, module.oracle.prompts[4]


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("name", ["standalone", "eagle3", "mtp", "chain", "reader"])
def test_behind_siblings_that_stand_a_model_guesses_as_if_there_had_been_no_guess(
    request: pytest.FixtureRequest,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    name: str,
    length: int,
) -> None:
    """Its logits behind each token that it is asked about are those of a model whose guesses were all wrong, one at a time."""
    asked, registry, prompt = drafting_model(name, request, registry, tmp_path)
    asked = dataclasses.replace(asked, page_size=4, dtype="float32")
    plain = dataclasses.replace(asked, drafter="off", draft_model=None)
    said = asking("a", prompt[:40], max_tokens=40)
    told = answers_of(Engine.build(plain, registry), [said])["a"].tokens
    right = dict(enumerate([*prompt[:40], *told]))
    one = Engine.build(dataclasses.replace(asked, draft_length="1"), registry)
    expected = first_logits(one, said, monkeypatch, lambda position: [(right.get(position, 7) + 1) % 256])
    assert counts_of(one).accepted == 0
    chance = random.Random(4)

    def sometimes(position: int) -> list[int]:
        token = right.get(position, 7)
        return chance.sample([token, (token + 1) % 256, (token + 2) % 256], 3)

    drafter = asked.drafter
    engine = Engine.build(dataclasses.replace(asked, draft_length=str(length)), branching(registry, drafter, 2))
    moved = moves_of(monkeypatch)
    found = first_logits(engine, said, monkeypatch, sometimes)
    assert counts_of(engine).accepted > 10
    assert sum(moved) > 5
    assert len(found) > 8
    for position, logits in found.items():
        assert torch.allclose(logits, expected[position], atol=2e-3, rtol=1e-3), position


def _followed_as_rows(batch: ForwardBatch, path: torch.Tensor, depth: int) -> Chain:
    return standing_chain(batch, torch.arange(path.shape[1]).expand_as(path), depth)


@pytest.mark.parametrize(
    ("place", "defect"),
    [
        ("enginery.worker.drafts.trees.standing_chain", _followed_as_rows),
        ("enginery.worker.runner.move_standing", lambda *given: None),
    ],
    ids=["rows are followed as they lie", "nothing is moved"],
)
def test_each_usual_mistake_is_seen(
    write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch, place: str, defect: object
) -> None:
    monkeypatch.setattr(place, defect)
    with pytest.raises(AssertionError):
        test_what_stands_beside_a_guess_is_one_token_and_what_follows_it_is_guessed_as_well(write_oracle, registry, monkeypatch)
