"""On a CUDA device: drafts change no token, whatever drafts and attends, eagerly and as graphs; nothing waits for the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from engine.draft_models import SELVES, TOKENS, asking, assert_told, branching, by_itself, counts_of, embedded, prompt_of
from engine.heads_made import Eagle3, write_module
from engine.model_heads import options as small_options
from engine.prediction_modules import MODULES, longer
from engine.test_ahead import untold
from engine.test_combs import shuffled
from engine.test_device_chains import RATES, guesses_and_answers
from engine.test_device_chains import requests_of as mixed_requests
from engine.test_frozen_keys import EPS, with_reader
from engine.test_frozen_keys import write as write_reader
from engine.test_right_heads import SIZE, deepseek, glm, head_by_feature, module_tensors, small, target_tensors, write
from engine.test_right_heads import counts_of as counts_of_right_head
from engine.test_speculation import ASKS, Scripted, answers_of, assert_equal_answers, with_drafter
from integrity import check_scheduler
from parity.engine_driver import options
from parity.oracle import FAMILIES, Oracle, shape
from transformers import LlamaConfig

from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.contracts.step import SamplingInput, StepInput
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.testing.readback import no_reads
from enginery.worker.paths.path import Launched
from enginery.worker.paths.running_step import RunningStep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # Triton compiles its kernels the first time

ON = {"device": "cuda", "dtype": "float32", "max_batch_requests": 32}
SAID = ("Hello", "Tell me a story about a fox named Mia.", "Name three colours.", "What is 47 + 38?")


@pytest.mark.parametrize("kind", ["right", "random"])
@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek-v2"])
def test_verified_drafts_change_no_token(write_oracle: Callable[..., Oracle], *, name: str, attention: str, kind: str) -> None:
    oracle = write_oracle(name, FAMILIES[name])
    requests = [
        GenerationRequest(
            request_id=about,
            prompt_token_ids=tuple([3 + index, *oracle.prompts[index % 6]][: 20 + 7 * index]),
            params=SamplingParams(**{"max_tokens": 30 - index, "ignore_eos": True, **asked}),
        )
        for index, (about, asked) in enumerate(ASKS.items())
    ]
    assert_equal_answers(Registry.load(), options(oracle, **ON, attention_backend=attention), requests, kind)


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek-v2"])
def test_a_model_that_drafts_for_itself_is_right(
    write_oracle: Callable[..., Oracle], registry: Registry, *, name: str, attention: str
) -> None:
    """Prompts come in chunks and together. Where keys or values were another's, guesses would be wrong."""
    oracle = write_oracle(f"self {name}", SELVES[name])
    requests = [asking(f"{at}", oracle.prompts[place], max_tokens=TOKENS - at) for at, place in enumerate((0, 5, 2, 4, 6))]
    changes = {**ON, "attention_backend": attention, "page_size": 16, "max_batch_tokens": 24}
    expected = answers_of(Engine.build(options(oracle, **changes), registry), requests)
    engine = Engine.build(by_itself(oracle, **changes, draft_length="3"), registry)
    for _ in range(2):
        assert_told(answers_of(engine, requests), expected)
    counts = counts_of(engine)
    assert counts.accepted > 0.98 * counts.drafted > 0
    assert (engine._runner.sizes.verified_rows > 0) is (attention == "triton")


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize(("drafter", "length"), [("eagle", "3"), ("standalone", "4"), ("eagle", "1"), ("standalone", "auto")])
def test_the_embedded_model_says_the_same_with_each_of_its_drafters(
    registry: Registry, *, drafter: str, length: str, attention: str
) -> None:
    """Greedy, seeded, cut, with penalties, with log-probabilities; nearly as many guesses are right as on a CPU."""
    requests = [asking(f"{at}", prompt_of(said)) for at, said in enumerate(SAID)]
    greedy, requests = requests, requests + [asking(about, prompt_of(SAID[1]), **asked) for about, asked in ASKS.items()]
    changes = {**ON, "attention_backend": attention}
    expected = answers_of(Engine.build(embedded(**changes), registry), requests)
    engine = Engine.build(embedded(**changes, drafter=drafter, draft_length=length), registry)
    assert_told(answers_of(engine, requests), expected)
    assert counts_of(engine).accepted > 0.2 * counts_of(engine).drafted > 0
    if length != "auto":
        engine = Engine.build(embedded(**changes, drafter=drafter, draft_length=length), registry)
        assert_told(answers_of(engine, greedy), {each.request_id: expected[each.request_id] for each in greedy})
        reference = Engine.build(embedded(drafter=drafter, draft_length=length), registry)
        answers_of(reference, greedy)
        found, wanted = counts_of(engine), counts_of(reference)
        assert found.accepted / found.drafted == pytest.approx(wanted.accepted / wanted.drafted, rel=0.1)


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize(("drafter", "siblings"), [("eagle", 2), ("standalone", 1)])
def test_of_combs_more_is_right_and_no_token_differs(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, *, drafter: str, siblings: int, attention: str
) -> None:
    """Within graphs where the backend has some; then with what was the guess beside it, so that what stands is always moved."""
    requests = [asking(f"{at}", prompt_of(said)) for at, said in enumerate(SAID)]
    requests += [asking(about, prompt_of(SAID[1]), **asked) for about, asked in ASKS.items()]
    changes = {**ON, "attention_backend": attention, "max_batch_requests": 160}
    expected = answers_of(Engine.build(embedded(**changes), registry), requests)
    rates = []
    for each in (registry, branching(registry, drafter, siblings)):
        engine = Engine.build(embedded(**changes, drafter=drafter, draft_length="3"), each)
        assert_told(answers_of(engine, requests), expected)
        rates.append(counts_of(engine).accepted / counts_of(engine).verifications)
    assert rates[1] > rates[0]
    graphs = engine._runner.graphs
    assert (graphs is not None) is (attention == "triton")
    assert graphs is None or {depth for *_, depth in graphs.captured} >= {0, 3}
    shuffled(monkeypatch, "beside")
    engine = Engine.build(embedded(**changes, drafter=drafter, draft_length="3"), branching(registry, drafter, siblings))
    assert_told(answers_of(engine, requests), expected)
    assert counts_of(engine).by_position[0] > 0.5 * counts_of(engine).verifications


def test_an_eagle3_head_that_is_always_right_is_here_too(registry: Registry, tmp_path: Path) -> None:
    """What a guess carries on is used as well: there are four in a row."""
    config = LlamaConfig(**small(), architectures=["LlamaForCausalLM"])
    (tmp_path / "target").mkdir()
    target = write(tmp_path / "target", config, target_tensors(config))
    head = Eagle3(own=SIZE, vocab_size=SIZE, config={"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 3, 5]})
    folder = head.write(tmp_path / "head", head_by_feature(head, 1), intermediate_size=SIZE)
    counts = counts_of_right_head(registry, target, drafter="eagle3", draft_model=str(folder), device="cuda")
    assert counts.accepted == counts.drafted > 30, counts


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_a_module_that_is_always_right_is_here_too(registry: Registry, tmp_path: Path, name: str) -> None:
    config = {"deepseek": deepseek, "glm": glm}[name]()
    folder = write(tmp_path, config, module_tensors(config, by_embedding=False), num_nextn_predict_layers=1)
    counts = counts_of_right_head(registry, folder, drafter="mtp", device="cuda")
    assert counts.accepted == counts.drafted > 30, counts


def share_of_equal(found: list[list[list[int]]], expected: list[list[list[int]]]) -> float:
    pairs = [pair for step in zip(found, expected, strict=False) for pair in zip(*step, strict=False)]
    return sum(one == other for one, other in pairs) / len(pairs)


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["chain", "reader"])
def test_chains_and_readers_guess_what_they_guess_on_a_cpu(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, *, kind: str, attention: str
) -> None:
    """Some guesses count as right by chance. Behind the target's graphs, where it has some."""
    if kind == "chain":
        oracle, config = write_oracle("chain glm", longer("glm4-moe")), MODULES["glm4-moe"][1]
        folder, drafter = write_module(oracle, tmp_path / "chain", count=3, **config).folder, {"drafter": "mtp"}
    else:
        oracle, registry = write_oracle("llama of four", LlamaConfig(**shape(rms_norm_eps=EPS))), with_reader(registry)
        folder, drafter = oracle.folder, {"drafter": "reader", "draft_model": str(write_reader(tmp_path / "reader"))}
    asked = small_options(folder, draft_length="3", page_size=16, num_pages=200, max_batch_tokens=24, dtype="float32", **drafter)
    requests = mixed_requests(oracle)
    expected, told = guesses_and_answers(Engine.build(asked, registry, forced_rates=RATES), requests)
    there = dataclasses.replace(asked, device="cuda", attention_backend=attention)
    engine = Engine.build(there, registry, forced_rates=RATES)
    found, now = guesses_and_answers(engine, requests)
    assert sum(now[about].tokens == one.tokens for about, one in told.items()) >= len(told) - 1
    assert share_of_equal(found, expected) > 0.9
    assert (engine._runner.sizes.verified_rows > 0) is (attention == "triton")
    plain = Engine.build(dataclasses.replace(there, drafter="off", draft_model=None, draft_length="auto"), registry)
    assert_told(answers_of(Engine.build(there, registry), requests), answers_of(plain, requests))


@pytest.mark.parametrize("drafter", ["eagle", "eagle with siblings", "standalone", "lookup"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_launching_waits_for_nothing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, *, drafter: str, temperature: float
) -> None:
    """Neither for a value nor for a copy: in steps that verify and in prefills, greedy and drawn."""
    if drafter == "eagle with siblings":
        drafter, registry = "eagle", branching(registry, "eagle", 1)
    asked = embedded(**{**ON, "dtype": "bfloat16"}, attention_backend="triton", drafter=drafter, draft_length="3")
    engine = Engine.build(asked, registry)
    requests = [asking(f"{at}", prompt_of(said), temperature=temperature, seed=at) for at, said in enumerate(SAID)]
    others = [dataclasses.replace(each, prompt_token_ids=each.prompt_token_ids[:-1]) for each in requests]
    for each in (requests, others, others):  # compile and capture; the last have a cached prefix, as those that are watched
        answers_of(engine, each)
    launch, sample, ran = engine._runner.launch, engine._runner.sample, set[tuple[bool, bool]]()

    def watched_launch(step: StepInput) -> Launched:
        with no_reads(torch.device("cuda")):
            launched = launch(step)
        ran.add((step.verifies, launched.forwarded.in_graphs))
        return launched

    def watched_sample(launched: Launched, sampling: SamplingInput | None, cuts: Mapping[int, int]) -> RunningStep:
        with no_reads(torch.device("cuda")):
            return sample(launched, sampling, cuts)

    monkeypatch.setattr(engine._runner, "launch", watched_launch)
    monkeypatch.setattr(engine._runner, "sample", watched_sample)
    answers_of(engine, others)
    assert drafter == "lookup" or (True, True) in ran
    if temperature and drafter != "lookup":
        assert engine._runner._draft_graphs is not None
        assert any(kind is not None for *_, kind in engine._runner._draft_graphs._steps), "what is drawn is guessed within a graph"


@pytest.mark.parametrize("drafter", ["eagle", "standalone"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_verifications_are_launched_before_the_ones_before_are_told(
    registry: Registry, *, drafter: str, temperature: float
) -> None:
    """Some requests end at a stop token, others amid what a step tells; no token differs."""
    drawn = {"temperature": temperature, "seed": 5}
    requests = [asking(f"{at}", prompt_of(said), max_tokens=40 - 7 * at, **drawn) for at, said in enumerate(SAID)]
    engine = Engine.build(embedded(**ON, attention_backend="triton", drafter=drafter, draft_length="3"), registry)
    found = untold(engine)
    assert_told(answers_of(engine, requests), answers_of(Engine.build(embedded(), registry), requests))
    assert sum(found) > 0.6 * len(found) > 3
    check_scheduler(engine._scheduler)


@pytest.mark.parametrize(("drafter", "length"), [("lookup", "3"), ("scripted", "3"), ("mtp", "3"), ("mtp", "1")])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_hybrid_says_the_same_with_drafts_whose_states_graphs_move(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, *, drafter: str, length: str, graphs: bool
) -> None:
    """Greedy and drawn, with penalties and log-probabilities; a next turn goes on from a checkpoint that a verification made."""
    config, kind = MODULES["qwen3-next"]
    module = write_module(write_oracle("mtp qwen3-next", config), tmp_path / "mtp", **kind)
    hybrid = Oracle(module.folder, module.oracle.model)
    prompts = {about: (3 + at, *hybrid.prompts[at % 6][:12]) for at, about in enumerate(ASKS)}
    requests = [asking(about, prompts[about], **{"max_tokens": 30, **asked}) for about, asked in ASKS.items()]
    changes = {**ON, "attention_backend": "triton", "linear_attention_backend": "delta", "page_size": 16}
    plain = Engine.build(options(hybrid, **changes, prefix_cache=False), registry)
    expected = answers_of(plain, requests)
    turns = [asking(f"turn {about}", (*prompts[about], *expected[about].tokens, 7, 8)) for about in ("greedy", "seeded")]
    next_expected = answers_of(plain, turns)
    answers = {each.prompt_token_ids: {**expected, **next_expected}[each.request_id].tokens for each in (*turns, *requests)}
    registry = registry if drafter != "scripted" else with_drafter(registry, lambda _: Scripted("random", answers))
    engine = Engine.build(options(hybrid, **changes, graphs=graphs, drafter=drafter, draft_length=length), registry)
    assert (engine._runner.sizes.verified_rows > 0) is graphs
    assert_told(answers_of(engine, requests), expected)
    assert_told(answers_of(engine, turns), next_expected)
    counts = counts_of(engine)
    assert counts.drafted > 0
    assert drafter != "scripted" or 0.3 < counts.accepted / counts.drafted < 0.95
