"""gpt-oss equals transformers: logits, and greedy tokens however the work is cut up; sinks, windows, biased experts."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity.engine_driver import (
    CUT_UP,
    assert_cut_up,
    assert_greedy,
    assert_last_logits,
    assert_ranks,
    drain,
    generate,
    greedy,
    last_logits,
    options,
    rounding_error,
)
from parity.oracle import Oracle, shape
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from enginery.checkpoint.files import scan_checkpoint
from enginery.engine.engine import Engine
from enginery.nn import reference_experts
from enginery.nn.stored import widen
from enginery.plugin.registry import Registry
from enginery.testing.rules import SkippedCheck

YARN = dict(
    rope_type="yarn",
    rope_theta=150000.0,
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    original_max_position_embeddings=64,  # so that `truncate` matters
    truncate=False,
)
CONFIG = GptOssConfig(
    **shape(head_dim=16, num_local_experts=8, sliding_window=16, rope_parameters=YARN)
    | dict(num_experts_per_tok=3, experts_implementation="eager", swiglu_limit=1.5)
)


@pytest.fixture
def oracle(write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle("gpt_oss", CONFIG)


def test_files_have_the_experts_of_a_layer_in_one_tensor(oracle: Oracle) -> None:
    stored = scan_checkpoint(oracle.folder)
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 64, 256)
    assert stored["model.layers.0.mlp.experts.gate_up_proj_bias"].shape == (8, 256)


def test_logits_after_a_prompt_are_transformers(oracle: Oracle, registry: Registry) -> None:
    assert_last_logits(oracle, registry, oracle.prompts[:5], max_batch_tokens=16)


@pytest.mark.parametrize("changes", CUT_UP, ids=str)
def test_greedy_tokens_are_transformers_however_the_work_is_cut_up(
    oracle: Oracle, registry: Registry, changes: dict[str, object]
) -> None:
    assert_cut_up(oracle, registry, changes)


def test_a_cached_prompt_gives_the_same_tokens(oracle: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(oracle, page_size=16), registry)
    prompts = oracle.prompts[4:6]
    for _ in range(3):
        assert_greedy(oracle, generate(engine, prompts), prompts)


@pytest.mark.parametrize(("tensor_size", "num_stages"), [(1, 1), (2, 1), (4, 2)])
def test_ranks_have_their_parts_of_heads_sinks_and_experts(oracle: Oracle, tensor_size: int, num_stages: int) -> None:
    assert_ranks(oracle, oracle.prompts[4], tensor_size=tensor_size, num_stages=num_stages)


def test_half_precision_stays_close(oracle: Oracle, registry: Registry) -> None:
    assert rounding_error(oracle, registry) < 0.06


def store_mxfp4(oracle: Oracle, folder: Path) -> Oracle:
    """The hub's layout: experts as packed blocks and exponents. The answer's model has what transformers makes of them."""
    shutil.copytree(oracle.folder, folder, dirs_exist_ok=True)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    model = copy.deepcopy(oracle.model)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 124, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    listed = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": listed}
    (folder / "config.json").write_text(json.dumps(config))
    return Oracle(folder, model)


@pytest.mark.parametrize("blocked", [(), ("ops-cpu",)], ids=str)
def test_its_files_in_mxfp4_stay_packed_and_give_transformers_tokens(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: tuple[str, ...]
) -> None:
    packed, registry = store_mxfp4(oracle, tmp_path), Registry.load(blocked=blocked)
    seen = []
    monkeypatch.setattr(reference_experts, "widen", lambda stored, dtype: seen.append(stored) or widen(stored, dtype))
    assert_last_logits(packed, registry, packed.prompts[4:5], max_batch_tokens=16)
    assert {stored.values.dtype for stored in seen} == {torch.uint8}
    assert {stored.values.dim() for stored in seen} == {2}, "one expert at a time"
    assert_greedy(packed, generate(Engine.build(options(packed), registry), packed.prompts[:2]), packed.prompts[:2])


@pytest.mark.parametrize("is_packed", [False, True])
def test_triton_in_its_interpreter_takes_its_experts_as_they_are_stored(
    write_oracle: Callable[..., Oracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    """Rows by turns, biases, clamped gates: a prompt in two chunks, whose pairs are sorted, and what follows it."""
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no CUDA device")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if not pytest.importorskip("enginery_ops_triton.kernels.precision").INTERPRETED.value:
        pytest.skip("triton was imported for the compiler in this process")
    few = dict(num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, layer_types=CONFIG.layer_types[:2])
    oracle = write_oracle("gpt_oss_of_two_layers", GptOssConfig(**{**CONFIG.to_dict(), **few}))
    oracle = store_mxfp4(oracle, tmp_path) if is_packed else oracle
    kernels = pytest.importorskip("enginery_ops_triton.experts")
    kind, product = (kernels.Float4Experts, "of_blocks") if is_packed else (kernels.Experts, "__call__")
    called, run = [], getattr(kind, product)
    monkeypatch.setattr(kind, product, lambda *given: called.append(given) or run(*given))
    engine = Engine.build(options(oracle, attention_backend="torch", max_batch_tokens=8), Registry.load())
    assert ("ops", "triton") in {(setting, value.partition(":")[0]) for setting, value, _ in engine.facts.decisions}
    prompt = oracle.prompts[3][:11]
    engine.submit(greedy("a", prompt, max_tokens=3))
    tokens = drain(engine, {})["a"]
    assert tokens == oracle.continue_greedily(prompt, 3, guess=tokens)
    assert len(called) >= 2 * 4, "two layers in each of four steps"


@pytest.mark.parametrize(("tensor_size", "cuts_experts"), [(1, False), (2, False), (4, False), (2, True)])
def test_ranks_have_whole_blocks_of_them(oracle: Oracle, tmp_path: Path, tensor_size: int, cuts_experts: bool) -> None:
    packed = store_mxfp4(oracle, tmp_path)
    assert_ranks(packed, packed.prompts[4], tensor_size=tensor_size, cuts_experts=cuts_experts)


def test_ranks_share_blocks_that_do_not_divide(write_oracle: Callable[..., Oracle], tmp_path: Path) -> None:
    """Of three, the first of two ranks has one, the other two."""
    odd = GptOssConfig(**{**CONFIG.to_dict(), "intermediate_size": 96})
    packed = store_mxfp4(write_oracle("gpt_oss_of_three_blocks", odd), tmp_path)
    assert_ranks(packed, packed.prompts[4], tensor_size=2)
    with pytest.raises(SkippedCheck, match=r"experts, which --ep does not divide: 96 in units of 32, which 4 .*; 2 ranks can"):
        assert_ranks(packed, packed.prompts[4], tensor_size=4)
    assert_ranks(packed, packed.prompts[4], tensor_size=4, cuts_experts=True)


def test_random_weights_in_mxfp4_have_the_size_of_others(oracle: Oracle, tmp_path: Path, registry: Registry) -> None:
    packed = store_mxfp4(oracle, tmp_path)
    prompt = packed.prompts[4]
    logits = last_logits(registry, options(packed, load_format="dummy"), prompt)
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10
