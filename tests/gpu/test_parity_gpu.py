"""On a CUDA device: exact greedy tokens in float32, small relative errors in bfloat16, whatever attends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parity.engine_driver import drain, generate, greedy, last_logits, options
from parity.oracle import FAMILIES, Oracle, shape
from transformers import LlamaConfig, Qwen3Config

from enginery.config.schema import EngineOptions
from enginery.errors import EnginError
from enginery.plugin.registry import Registry
from enginery.run.engine import Engine

pytestmark = pytest.mark.gpu

ATTENTION = {
    "torch": {"attention_backend": "torch"},
    "triton": {"attention_backend": "triton"},
    "flashinfer": {"attention_backend": "flashinfer"},
    "flashinfer and triton": {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "triton"},
}
WIDE = {  # heads as large as FlashInfer takes
    "llama-128": LlamaConfig(**shape(head_dim=128, num_attention_heads=8)),
    "qwen3-64": Qwen3Config(**shape(head_dim=64)),
}
BFLOAT16_ERROR = 0.03


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.load()


def asked(oracle: Oracle, attention: str, **changes: object) -> EngineOptions:
    return options(oracle, **{"device": "cuda", "max_batch_requests": 16, **ATTENTION[attention], **changes})


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [16, 4096])
def test_64_greedy_tokens_are_equal_in_float32(
    oracle: Oracle, registry: Registry, *, attention: str, page_size: int, chunk: int
) -> None:
    wanted = asked(oracle, attention, dtype="float32", page_size=page_size, max_batch_tokens=chunk)
    assert generate(Engine.build(wanted, registry), oracle.prompts) == oracle.greedy


@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_bfloat16_stays_close(oracle: Oracle, registry: Registry, *, attention: str) -> None:
    prompt = oracle.prompts[4]
    actual = last_logits(registry, asked(oracle, attention, dtype="bfloat16"), prompt)
    assert relative_error(actual, oracle.logits(prompt)[-1]) < BFLOAT16_ERROR


@pytest.mark.parametrize("attention", ["triton", "flashinfer", "flashinfer and triton"])
@pytest.mark.parametrize("name", WIDE)
def test_bfloat16_stays_close_through_graphs_and_chunks(
    write_oracle: Callable[..., Oracle], registry: Registry, *, name: str, attention: str
) -> None:
    oracle = write_oracle(name, WIDE[name])
    try:
        engine = Engine.build(asked(oracle, attention, dtype="bfloat16", max_batch_tokens=16, overlap=False), registry)
    except EnginError as refused:
        pytest.skip(f"not installed here: {refused}")
    prompt = oracle.prompts[4]
    engine.submit(greedy("a", prompt, max_tokens=24))
    tokens, graphs = list[int](), engine._runner.graphs
    assert graphs is not None
    while engine.has_work:
        before = len(tokens)
        tokens += [token for output in engine.step() for token in output.token_ids]
        if before and len(tokens) > before:  # a decoding step: its logits are still there
            expected = oracle.logits([*prompt, *tokens[:-1]])[-1]
            assert relative_error(graphs.logits[0].float().cpu(), expected) < BFLOAT16_ERROR
    assert len(tokens) == 24


def test_fp8_memory_stays_near(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    oracle = write_oracle("llama-128", WIDE["llama-128"])
    prompt = oracle.prompts[4]
    try:
        actual = last_logits(registry, asked(oracle, "flashinfer", dtype="bfloat16", kv_dtype="fp8"), prompt)
    except EnginError as refused:
        pytest.skip(f"not installed here: {refused}")
    assert relative_error(actual, oracle.logits(prompt)[-1]) < 0.12


def test_a_shared_prefix_changes_no_token(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    """Long enough to be read once for all requests of a decoding step."""
    oracle = write_oracle("llama", FAMILIES["llama"])
    prefix = [8 + (7 * index) % 200 for index in range(400)]
    prompts = [[*prefix, 8 + row, 9 + row] for row in range(9)]
    wanted = asked(oracle, "triton", dtype="float32")
    engine = Engine.build(wanted, registry)
    together = generate(engine, prompts, max_tokens=16)
    alone = []
    for prompt in prompts:
        engine.submit(greedy("alone", prompt, max_tokens=16))
        alone.append(drain(engine, {})["alone"])
    assert together == alone == [oracle.continue_greedily(prompt, 16) for prompt in prompts]


def test_sampling_on_the_gpu_equals_sampling_on_the_cpu() -> None:
    from core.run.test_sampling import row, sample

    torch.manual_seed(0)
    table = torch.randn(64, 1000)
    kinds = ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0}, {"logit_bias": {5: 3.0}, "temperature": 0.5})
    rows = [row(seed=index, **kinds[index % len(kinds)]) for index in range(64)]
    assert sample(table.cuda(), rows, frozenset()).tolist() == sample(table, rows, frozenset()).tolist()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
