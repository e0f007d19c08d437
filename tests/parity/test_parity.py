"""Logits and greedy tokens equal transformers', however the work is cut up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pairwise import EVERYTHING, crossed, in_turn, spread
from parity.engine_driver import RecordingModel, assert_greedy, assert_last_logits, drain, generate, greedy, options, rounding_error
from parity.oracle import FAMILIES, NUM_GREEDY, ROPES, Oracle, shape
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from enginery.contracts.step import RunSizes, StepInput
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

UNLIMITED = 4096
# Whose turn it is and what is cached is nothing that families differ in, but for how they remember: latents, pages, windows, both.
MEMORIES = sorted(FAMILIES) if EVERYTHING else ["deepseek-v2", "llama", "mistral", "qwen2-window"]
OPS = ["packed", "reference"]
CUTS = crossed([1, 16], [16, UNLIMITED], [1, 7])


@pytest.fixture(params=sorted(FAMILIES))
def oracle(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle]) -> Oracle:
    """Each family in turn."""
    return write_oracle(request.param, FAMILIES[request.param])


@pytest.fixture(scope="module", params=OPS)
def any_ops(request: pytest.FixtureRequest) -> Registry:
    """With the CPU plugin's operations and with the core's own."""
    return Registry.load(blocked=() if request.param == "packed" else ("ops-cpu",))


@in_turn(("oracle", sorted(FAMILIES)), ("any_ops", OPS), indirect=["oracle", "any_ops"])
def test_logits_of_a_prompt_are_within_1e_4(oracle: Oracle, any_ops: Registry) -> None:
    parts = build_parts(options(oracle, max_batch_tokens=16), any_ops)
    recording = RecordingModel(parts.step.model)
    watched = dataclasses.replace(parts, step=parts.step._replace(model=recording))
    engine = Engine(watched, any_ops, options(oracle, max_batch_tokens=16))
    prompt = oracle.prompts[4]
    engine.submit(greedy("a", prompt, max_tokens=1, prompt_logprobs=0))
    drain(engine, {})
    actual = torch.cat(recording.recorded)  # the prompt's rows chunk by chunk, and last the one that is sampled from
    torch.testing.assert_close(actual, oracle.logits(prompt), atol=1e-4, rtol=0)


def test_the_last_layers_mlp_has_no_rows_but_those_that_are_wanted(
    write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = write_oracle("llama", FAMILIES["llama"])
    asked = options(oracle, max_batch_tokens=32)
    parts = build_parts(asked, registry)
    rows: list[list[int]] = [[], []]
    for of_layer, layer in zip(rows, (parts.step.model.layers[0], parts.step.model.layers[-1]), strict=True):
        monkeypatch.setattr(layer, "mlp", lambda x, of_layer=of_layer, mlp=layer.mlp: of_layer.append(len(x)) or mlp(x))
    engine = Engine(parts, registry, asked)
    engine.submit(greedy("a", oracle.prompts[0][:1] * 40, max_tokens=2))  # a chunk that yields nothing, and one that does
    engine.submit(greedy("b", oracle.prompts[1][:1] * 8, max_tokens=1, prompt_logprobs=0))
    drain(engine, {})
    assert rows == [[32, 16, 1], [0, 1 + 8, 1]]


@in_turn(("oracle", sorted(FAMILIES)), ("page_size, chunk, batch", CUTS), indirect=["oracle"])
def test_greedy_tokens_are_equal(oracle: Oracle, registry: Registry, *, page_size: int, chunk: int, batch: int) -> None:
    asked = options(oracle, page_size=page_size, max_batch_tokens=chunk, max_batch_requests=min(chunk, 256))
    engine = Engine.build(asked, registry)
    prompts = oracle.prompts if batch == 7 else [oracle.prompts[1]]
    assert_greedy(oracle, generate(engine, prompts), prompts)


@pytest.mark.parametrize("oracle", MEMORIES, indirect=True)
def test_greedy_tokens_are_equal_without_the_cpu_plugin(oracle: Oracle) -> None:
    registry = Registry.load(blocked=("ops-cpu",))
    assert_greedy(oracle, generate(Engine.build(options(oracle), registry), oracle.prompts))


@in_turn(("oracle", MEMORIES), ("page_size", [16, 1]), indirect=["oracle"])
def test_prefix_cache_hits_change_no_token(oracle: Oracle, registry: Registry, *, page_size: int) -> None:
    engine = Engine.build(options(oracle, page_size=page_size), registry)
    prompt = oracle.prompts[5]
    (expected,) = generate(engine, [prompt])
    assert_greedy(oracle, [expected], [prompt])
    engine.submit(greedy("again", prompt))
    engine.submit(greedy("longer", prompt + expected[:20], max_tokens=NUM_GREEDY - 20))
    cached: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            cached[output.request_id] = output.num_cached_tokens
    assert cached["again"] >= 48
    windows = "window" in engine.meter.stats().pages  # kept where the prompt ended, gone behind that
    assert cached["longer"] >= (48 if windows else 64)
    assert tokens == {"again": expected, "longer": expected[20:]}


@in_turn(("oracle", MEMORIES), ("page_size", [1, 16]), indirect=["oracle"])
def test_preemption_changes_no_token(oracle: Oracle, registry: Registry, *, page_size: int) -> None:
    asked = options(oracle, page_size=page_size, num_pages=224 // page_size, max_batch_tokens=64, prefix_cache=False)
    engine = Engine.build(asked, registry)
    preempted = 0
    for index, prompt in enumerate(oracle.prompts):
        engine.submit(greedy(str(index), prompt))
    tokens: dict[str, list[int]] = {}
    scheduler = engine._scheduler
    original = scheduler.next_step

    def counting(sizes: RunSizes) -> StepInput:
        nonlocal preempted
        step = original(sizes)
        preempted += len(scheduler.preempted)
        return step

    scheduler.next_step = counting  # type: ignore[method-assign]
    drain(engine, tokens)
    assert preempted > 0
    assert_greedy(oracle, [tokens[str(index)] for index in range(7)])


@pytest.mark.parametrize("oracle", MEMORIES, indirect=True)
def test_requests_that_arrive_and_leave_midway_disturb_nobody(oracle: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(oracle, max_batch_tokens=32), registry)
    tokens: dict[str, list[int]] = {}
    arrivals = {index * 9: index for index in range(7)}
    for step in range(400):
        if step in arrivals:
            index = arrivals[step]
            engine.submit(greedy(str(index), oracle.prompts[index]))
            engine.submit(greedy(f"leaver-{index}", oracle.prompts[index][::-1]))
        if step - 13 in arrivals:
            engine.abort(f"leaver-{arrivals[step - 13]}")
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if step > 70 and not engine.has_work:
            break
    assert not engine.has_work
    assert_greedy(oracle, [tokens[str(index)] for index in range(7)])


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_every_rope_scaling_gives_equal_greedy_tokens(rope: str, registry: Registry, write_oracle: Callable[..., Oracle]) -> None:
    oracle = write_oracle(f"rope-{rope}", LlamaConfig(**shape(rope_parameters=ROPES[rope])))
    some = spread(oracle.prompts, 3)
    assert_greedy(oracle, generate(Engine.build(options(oracle), registry), some), some)


def test_the_hub_spelling_of_rope_scaling_is_read_too(registry: Registry, write_oracle: Callable[..., Oracle], tmp_path) -> None:
    oracle = write_oracle("llama-3-rope", FAMILIES["llama-3-rope"])
    config = json.loads((oracle.folder / "config.json").read_text())
    scaling = config["rope_parameters"]
    spelled = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "torch_dtype": config["dtype"]}
    folder = oracle.copied(tmp_path / "hub", without=("rope_parameters", "dtype"), **spelled)
    engine = Engine.build(options(oracle, model=folder), registry)
    assert_greedy(oracle, generate(engine, oracle.prompts[:2]), oracle.prompts[:2])


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4"])
def test_stored_tables_of_angles_are_left_out(registry: Registry, write_oracle: Callable[..., Oracle], tmp_path, name: str) -> None:
    """As older programs for training write them, for each layer or once."""
    oracle = write_oracle(name, FAMILIES[name])
    folder = Path(oracle.copied(tmp_path / "trained", without=()))
    tensors, table = load_file(folder / "model.safetensors"), torch.ones(8)
    names = ("layers.0.self_attn.rotary_emb.inv_freq", "layers.1.self_attn.rotary_emb.cos_cached", "rotary_emb.inv_freq")
    save_file(tensors | {f"model.{each}": table.clone() for each in names}, folder / "model.safetensors")
    assert_last_logits(Oracle(folder, oracle.model), registry, oracle.prompts[:1])


@pytest.mark.parametrize("written_by", ["the hub", "transformers 5"])
def test_yarn_that_a_model_card_says_to_add_serves_its_whole_context(
    registry: Registry, write_oracle: Callable[..., Oracle], tmp_path: Path, written_by: str
) -> None:
    """`max_position_embeddings` stays as it was, and so does what transformers 5 wrote in `rope_parameters`."""
    theta, added = 50000.0, {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    yarn = {**added, "rope_type": "yarn", "rope_theta": theta}
    oracle = write_oracle("yarn-added", LlamaConfig(**shape(max_position_embeddings=32, rope_parameters=yarn)))
    plain = {"rope_theta": theta} if written_by == "the hub" else {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    folder = oracle.copied(tmp_path / "hub", without={"rope_parameters"} - plain.keys(), **plain, rope_scaling=added)
    engine = Engine.build(options(oracle, model=folder), registry)
    assert engine.facts.max_model_len == 8 * 32
    assert_greedy(oracle, generate(engine, oracle.prompts[:2]), oracle.prompts[:2])


@in_turn(("oracle", sorted(FAMILIES)), ("dtype", ["bfloat16", "float16"]), indirect=["oracle"])
def test_half_precision_stays_close(oracle: Oracle, registry: Registry, *, dtype: str) -> None:
    assert rounding_error(oracle, registry, dtype) < (0.03 if dtype == "bfloat16" else 0.005)
