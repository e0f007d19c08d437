"""Models that draft: tokens are those of plain decoding, and a model that drafts for itself is always right."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from engine.draft_models import (
    SAID,
    SAID_ASKS,
    SELVES,
    TOKENS,
    asking,
    assert_always_right,
    assert_told,
    by_itself,
    changed_head,
    come_and_go,
    counts_of,
    embedded,
    prompt_of,
)
from engine.random_use import RandomUse
from engine.rank_threads import on_threads
from engine.small_pair import small_model
from engine.test_kinds_at_random import small_memory
from engine.test_speculation import GRAMMARS, Told, answers_of
from pairwise import EVERYTHING, spread
from parity.engine_driver import options
from parity.oracle import Oracle, shape
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.model import Feature
from enginery.contracts.request import GenerationRequest
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.errors import CheckpointError, ConfigError, EnginError, PluginError
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.drafts.parts import find_draft_needs
from enginery.worker.weights.needed_weights import needed_weights
from enginery_draft_eagle.model import EagleHead
from enginery_weights_tiny import DRAFTERS

# A model that drafts for itself. Where one of its keys or values were missing or another's, a guess would be wrong.

SOME_SELVES = [
    list(SELVES).index(name) for name in ("llama", "qwen2-window", "deepseek-v2", "glm4", "gemma2")
]  # each with a setting
SETTINGS = (
    {"page_size": 16, "max_batch_tokens": 24, "draft_length": "3"},
    {"page_size": 4, "max_batch_tokens": 64, "draft_length": "8"},
    {"page_size": 32, "max_batch_tokens": 40},
    {"page_size": 1, "max_batch_tokens": 24, "draft_length": "1", "overlap": True},
)


@pytest.mark.parametrize("place", range(len(SELVES)) if EVERYTHING else SOME_SELVES)
def test_a_model_that_drafts_for_itself_is_always_right(
    write_oracle: Callable[..., Oracle], registry: Registry, place: int
) -> None:
    """Prompts come in chunks and together, a second time from the prefix cache, and amid the decoding of others."""
    name = list(SELVES)[place]
    oracle = write_oracle(f"self {name}", SELVES[name])
    prompts = [oracle.prompts[index] for index in (0, 5, 2, 4, 6)]
    prompts += [prompts[1], [*prompts[1][:40], *prompts[3][:9]]]
    longest = TOKENS if EVERYTHING else 24
    requests = [asking(f"{index}", prompt, max_tokens=longest - 3 * index) for index, prompt in enumerate(prompts)]
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    for setting in SETTINGS if EVERYTHING else SETTINGS[place % 4 :][:1]:
        engine = Engine.build(by_itself(oracle, **setting), registry)
        assert_told(come_and_go(engine, requests), expected)
        assert_told(come_and_go(engine, requests), expected)
        assert_always_right(engine)


def test_it_guesses_what_will_be_drawn(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    """A guess is drawn with the number that the target draws with at its position, from logits that are cut as the target's."""
    oracle = write_oracle("self llama", SELVES["llama"])
    cuts: tuple[dict[str, object], ...] = ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.0})
    requests = [
        asking(f"{at}", oracle.prompts[at], **{"temperature": 1.5, "seed": at + 7, "max_tokens": TOKENS - at, **cut})
        for at, cut in enumerate(cuts)
    ]
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    engine = Engine.build(by_itself(oracle, draft_length="3"), registry)
    assert_told(come_and_go(engine, requests), expected)
    assert_always_right(engine)


@pytest.mark.parametrize("name", spread(["gemma2", "llama"], 1))
def test_it_stays_right_when_requests_are_preempted(
    write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    oracle = write_oracle(f"self {name}", SELVES[name])
    longest = TOKENS if EVERYTHING else 24
    requests = [asking(f"{index}", oracle.prompts[index % 7][:30], max_tokens=longest) for index in range(9)]
    requests = [dataclasses.replace(each, prompt_token_ids=(9 + at, *each.prompt_token_ids)) for at, each in enumerate(requests)]
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    small_memory(monkeypatch, windows=16)
    engine = Engine.build(
        by_itself(
            oracle, draft_length="2", page_size=4, num_pages=28, max_batch_tokens=32, max_batch_requests=4, max_model_len=100
        ),
        registry,
    )
    assert_told(answers_of(engine, requests), expected)
    assert engine.meter.stats().num_preempted > 0
    assert_always_right(engine)


# Drafters of the embedded model.


@pytest.fixture(scope="module")
def requests(registry: Registry) -> list[GenerationRequest]:
    """Of all that may be asked for; and some that end amid their drafts."""
    plain = answers_of(Engine.build(embedded(), registry), [asking("", prompt_of(SAID[3]))])[""].tokens
    found = [asking(about, prompt_of(SAID[at]), **asked) for at, (about, asked) in enumerate(SAID_ASKS.items())]
    found += [
        asking(f"{about} {heat}", (at, *prompt_of(SAID[4])), temperature=heat, seed=7, grammar=grammar, ignore_eos=False)
        for at, (about, grammar) in enumerate(GRAMMARS.items())
        for heat in (0.0, 0.8)
    ]
    found += [asking(f"stops at {at}", prompt_of(SAID[3]), stop_token_ids=(plain[at],), ignore_eos=False) for at in (7, 8, 10)]
    found += [asking("ends", prompt_of(SAID[0]), ignore_eos=False, max_tokens=200), asking("one token", (8, 9), max_tokens=1)]
    return [*found, asking("undrafted", prompt_of(SAID[5]), speculation=False)]


@pytest.fixture(scope="module")
def plainly(registry: Registry, requests: list[GenerationRequest]) -> dict[str, Told]:
    return answers_of(Engine.build(embedded(), registry), requests)


@pytest.mark.parametrize(
    ("drafter", "length"),
    [("eagle", 4), ("standalone", 3), *([("eagle", 1), ("eagle", 8), ("standalone", 8)] if EVERYTHING else [])],
)
def test_the_embedded_model_says_the_same_with_each_of_its_drafters(
    registry: Registry, requests: list[GenerationRequest], plainly: dict[str, Told], drafter: str, length: int
) -> None:
    engine = Engine.build(embedded(drafter=drafter, draft_length=str(length), max_batch_tokens=96), registry)
    assert_told(answers_of(engine, requests), plainly)
    counts = counts_of(engine)
    assert counts.accepted > 0.2 * counts.drafted
    assert len(counts.by_position) == length


@pytest.mark.parametrize(("drafter", "most", "page_size"), [("eagle", 60, 16), ("standalone", 64, 8)])
def test_guesses_behind_the_longest_context_do_no_harm(registry: Registry, drafter: str, most: int, page_size: int) -> None:
    """All fill it to its last position, together and alone."""
    asked = [asking(f"{at}", prompt_of(said), max_tokens=most - len(prompt_of(said))) for at, said in enumerate(SAID[:4])]
    changes = {"max_model_len": most, "page_size": page_size}
    expected = answers_of(Engine.build(small_model(**changes), registry), asked)
    engine = Engine.build(small_model(drafter=drafter, draft_length="8", **changes), registry)
    assert_told(answers_of(engine, asked), expected)
    assert_told(answers_of(engine, asked[:1]), {"0": expected["0"]})


def test_a_head_of_noise_changes_no_token(
    registry: Registry, requests: list[GenerationRequest], plainly: dict[str, Told], tmp_path: Path
) -> None:
    changed_head(tmp_path, lambda tensors: {name: torch.randn_like(each) for name, each in tensors.items()})
    engine = Engine.build(embedded(drafter="eagle", draft_model=str(tmp_path), draft_length="3"), registry)
    assert_told(answers_of(engine, requests[::3]), {each.request_id: plainly[each.request_id] for each in requests[::3]})
    assert counts_of(engine).accepted < 0.05 * counts_of(engine).drafted


def test_a_strange_model_with_the_same_vocabulary_changes_no_token(
    write_oracle: Callable[..., Oracle], registry: Registry, requests: list[GenerationRequest], plainly: dict[str, Told]
) -> None:
    strange = write_oracle("strange", LlamaConfig(**shape(vocab_size=4096, num_hidden_layers=2)))
    engine = Engine.build(embedded(drafter="standalone", draft_model=str(strange.folder), draft_length="3"), registry)
    assert_told(answers_of(engine, requests[1::3]), {each.request_id: plainly[each.request_id] for each in requests[1::3]})
    assert counts_of(engine).accepted < 0.1 * counts_of(engine).drafted


def shortened(oracle: Oracle, folder: Path, *, rows: int) -> Path:
    """The same model with fewer rows in its vocabulary."""
    config, tensors = json.loads((oracle.folder / "config.json").read_text()), load_file(oracle.folder / "model.safetensors")
    kept = {name: each[:rows].clone() if len(each) == config["vocab_size"] else each for name, each in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_vocabulary_that_is_padded_less_drafts_all_tokens_but_the_padding(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, ranks: int
) -> None:
    """As Qwen2.5 of 0.5B, 151,936 rows, for that of 7B, 152,064; prompts and answers have tokens that it has no rows for."""
    oracle = write_oracle("self llama", SELVES["llama"])
    size = oracle.model.config.vocab_size
    draft = shortened(oracle, tmp_path, rows=size - 16)
    requests = [asking(f"{at}", oracle.prompts[at]) for at in (0, 5, 2)]
    requests.append(asking("padding", [size - 1, *oracle.prompts[4]], logit_bias={size - 2: 3.0}))
    expected = answers_of(Engine.build(options(oracle), registry), requests)
    assert any(token >= size - 16 for each in expected.values() for token in each.tokens)
    asked = by_itself(oracle, draft_model=str(draft), draft_length="2", tp=ranks)
    with on_threads(asked, registry) if ranks > 1 else nullcontext((Engine.build(asked, registry), None)) as (engine, _):
        assert_told(come_and_go(engine, requests), expected)
        assert 0.3 * counts_of(engine).drafted < counts_of(engine).accepted < counts_of(engine).drafted


def test_a_vocabulary_that_is_shorter_than_by_padding_is_refused(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path
) -> None:
    oracle = write_oracle("self llama", SELVES["llama"])
    draft = shortened(oracle, tmp_path, rows=oracle.model.config.vocab_size - 129)
    with pytest.raises(ConfigError, match="both need the same tokenizer"):
        Engine.build(by_itself(oracle, draft_model=str(draft)), registry)


@pytest.mark.parametrize("drafter", ["eagle", "standalone"])
def test_weights_may_be_drawn(registry: Registry, drafter: str) -> None:
    """For benchmarks: both models' are."""
    asked = [asking(f"{at}", prompt_of(said), max_tokens=TOKENS if EVERYTHING else 12) for at, said in enumerate(SAID[:3])]
    expected = answers_of(Engine.build(embedded(load_format="dummy"), registry), asked)
    engine = Engine.build(embedded(load_format="dummy", drafter=drafter), registry)
    assert_told(answers_of(engine, asked), expected)


@pytest.mark.parametrize(("returned", "told"), [(lambda made: made[:1], "[1, 256]"), (lambda made: None, "None")])
def test_a_draft_model_that_returns_other_rows_is_told_what_is_wrong(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, returned: Callable[[torch.Tensor], object], told: str
) -> None:
    forward = EagleHead.forward
    monkeypatch.setattr(EagleHead, "forward", lambda self, batch, arrived: returned(forward(self, batch, arrived)))
    engine = Engine.build(embedded(drafter="eagle", draft_length="2"), registry)
    with pytest.raises(PluginError, match=re.escape(f"forward of the draft model (--drafter) returned {told} instead of [")):
        answers_of(engine, [asking("a", prompt_of(SAID[0]), max_tokens=8)])


def test_random_use_in_a_small_memory_breaks_no_promise(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come, are preempted and aborted amid their drafts; the memory is whole after each step."""
    chance = random.Random(5)
    prompts = [prompt_of(said)[:30] for said in SAID]
    asked = [asking(f"{at}", each, temperature=0.7, seed=1) for at, each in enumerate(prompts)]
    alone = answers_of(Engine.build(small_model(prefix_cache=False), registry), asked)
    expected = {request.prompt_token_ids: alone[request.request_id].tokens for request in asked}
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    small = {"page_size": 4, "num_pages": 22, "max_batch_tokens": 24, "max_batch_requests": 4, "max_model_len": 80}
    engine = Engine.build(small_model(drafter="eagle", draft_length="3", **small), registry)

    def ask(name: str) -> GenerationRequest:
        return asking(name, chance.choice(prompts), max_tokens=chance.randint(1, 25), temperature=0.7, seed=1)

    use = RandomUse(engine, chance, ask)
    told = use.turns(80, arrivals=0.5, aborts=0.08, evict_each=30)
    for request, tokens in told:
        assert tokens == expected[request.prompt_token_ids][: len(tokens)]
    assert engine.meter.stats().num_preempted > 0
    assert use.counts["finished"] > 15
    assert counts_of(engine).accepted > 20
    engine._scheduler.check_idle()


def test_no_guess_is_kept_for_requests_that_have_ended(registry: Registry) -> None:
    engine = Engine.build(small_model(drafter="eagle"), registry)
    short = [asking(f"{at}", prompt_of(said), max_tokens=1) for at, said in enumerate(SAID)]
    answers_of(engine, [*short, asking("undrafted", prompt_of(SAID[0]), speculation=False)])
    answers_of(engine, [asking("another", prompt_of(SAID[1]))])
    assert engine._made._made.places.keys() <= {"another"}, "what was guessed last is forgotten when a drafter is asked again"


# Refusals, and what memory they take.


LAYER = {
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "layers.0.post_attention_layernorm.weight",
}


@pytest.mark.parametrize(("bias", "beside"), [(True, {"fc.weight", "fc.bias"}), (False, {"fc.weight"})])
def test_a_head_is_one_layer_without_its_first_norm(registry: Registry, *, bias: bool, beside: set[str]) -> None:
    (eagle,) = (offer.spec.model for offer in registry.offers(DrafterSpec) if offer.name == "eagle")
    assert eagle is not None
    config = json.loads((DRAFTERS["eagle"] / "config.json").read_text()) | {"bias": bias}
    pieces = needed_weights(eagle, config, torch.float32).pieces
    assert {part.name for piece in pieces for part in piece.slices} == {*LAYER, *beside}


@pytest.mark.parametrize("stored", [{}, {"fc.bias": torch.zeros(256)}], ids=["none", "zeros"])
def test_where_config_json_says_nothing_a_head_has_the_bias_that_is_stored(
    registry: Registry, tmp_path: Path, stored: dict[str, torch.Tensor]
) -> None:
    folder = changed_head(tmp_path, lambda tensors: {**{name: tensors[name] for name in tensors.keys() - {"fc.bias"}}, **stored})
    engine = Engine.build(embedded(drafter="eagle", draft_model=str(folder), draft_length="3"), registry)
    answers_of(engine, [asking("a", prompt_of(SAID[3]), max_tokens=24)])
    assert engine.meter.stats().drafts.accepted > 3


def without_fc(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors.items() if name != "fc.weight"}


HEADS: dict[str, tuple[dict[str, object], str]] = {
    "two layers": ({"num_hidden_layers": 2}, "has 2 layers (num_hidden_layers); a head has 1"),
    "another vocabulary": (
        {"vocab_size": 4000},
        "has a vocabulary of 4,000 tokens and enginery-tiny one of 4,096; both need",
    ),
    "another hidden size": (
        {"hidden_size": 512},
        "takes hidden states of 512 values, and those of enginery-tiny have 256; give the one that was trained for it",
    ),
    "quantised": (
        {"quantization_config": {"quant_method": "fp8"}},
        "has quantised weights, which it cannot have yet",
    ),
}


@pytest.mark.parametrize("which", HEADS)
def test_a_head_that_does_not_fit_is_refused(registry: Registry, tmp_path: Path, which: str) -> None:
    config, message = HEADS[which]
    folder = changed_head(tmp_path, **config)
    with pytest.raises(EnginError, match=re.escape(message)):
        Engine.build(embedded(drafter="eagle", draft_model=str(folder)), registry)


def test_a_head_without_one_of_its_tensors_is_refused(registry: Registry, tmp_path: Path) -> None:
    folder = changed_head(tmp_path, without_fc)
    with pytest.raises(CheckpointError, match=r"fc\.weight") as refused:
        Engine.build(embedded(drafter="eagle", draft_model=str(folder)), registry)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(("drafter", "layers", "kv_heads"), [("eagle", 1, 2), ("standalone", 3, 1)])
def test_what_a_draft_model_takes_is_in_the_memory_plan(registry: Registry, drafter: str, layers: int, kv_heads: int) -> None:
    sizes = {"page_size": 16, "num_pages": None, "kv_memory_gib": 0.02, "max_model_len": 256}
    alone = build_parts(embedded(**sizes), registry).memory
    both = build_parts(embedded(drafter=drafter, **sizes), registry).memory
    assert both.page_bytes - alone.page_bytes == layers * 2 * kv_heads * 64 * 16 * 4
    tensors = load_file(DRAFTERS[drafter] / "model.safetensors")
    own = sum(each.numel() for name, each in tensors.items() if drafter != "eagle" or name != "embed_tokens.weight")
    assert both.weights_bytes - alone.weights_bytes == pytest.approx(4 * own, rel=0.001)
    assert both.workspace_bytes > alone.workspace_bytes
    assert both.num_pages < alone.num_pages


def test_hidden_states_that_are_tapped_are_in_the_memory_plan(registry: Registry) -> None:
    asked = embedded(drafter="eagle", max_batch_tokens=64)
    needs = find_draft_needs(asked, registry, choose(asked, registry))
    assert needs is not None
    more = dataclasses.replace(needs, taps=(Feature(0), Feature(1), Feature(2)))
    assert more.workspace_bytes - needs.workspace_bytes == 64 * 2 * 256 * 4
