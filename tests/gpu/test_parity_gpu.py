"""The torch backend on a CUDA device: exact greedy tokens in float32, small relative error in bfloat16."""

from __future__ import annotations

import pytest
import torch
from parity.engine_driver import generate, last_logits, options
from parity.oracle import Oracle

from enginery.plugin.registry import Registry
from enginery.run.engine import Engine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.load()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [16, 4096])
def test_64_greedy_tokens_are_equal_on_the_gpu(oracle: Oracle, registry: Registry, *, page_size: int, chunk: int) -> None:
    asked = options(oracle, device="cuda", dtype="float32", page_size=page_size, max_batch_tokens=chunk, max_batch_requests=16)
    assert generate(Engine.build(asked, registry), oracle.prompts) == oracle.greedy


def test_bfloat16_stays_close_on_the_gpu(oracle: Oracle, registry: Registry) -> None:
    prompt = oracle.prompts[4]
    expected = oracle.logits(prompt)[-1]
    actual = last_logits(registry, options(oracle, device="cuda", dtype="bfloat16"), prompt)
    assert (actual - expected).norm() / expected.norm() < 0.03


def test_sampling_on_the_gpu_equals_sampling_on_the_cpu() -> None:
    from core.run.test_sampling import row

    from enginery.run.sampling import sample

    torch.manual_seed(0)
    table = torch.randn(64, 1000)
    kinds = ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0}, {"logit_bias": {5: 3.0}, "temperature": 0.5})
    rows = [row(seed=index, **kinds[index % len(kinds)]) for index in range(64)]
    assert sample(table.cuda(), rows, frozenset()).tolist() == sample(table, rows, frozenset()).tolist()
