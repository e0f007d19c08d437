"""The least time of a workload: the floors of the project's targets, and the rules by which they are counted."""

from __future__ import annotations

import dataclasses
import json

import pytest

from enginery.bench.floor import DeviceLimits, dense_shape, floor_s, num_parameters
from enginery.bench.workloads import SHAPES_FILE, WORKLOADS, Workload, equal_requests

SHAPES = json.loads(SHAPES_FILE.read_text())
H200 = DeviceLimits(copy_bytes_per_s=4.26e12, read_bytes_per_s=4.47e12, product_flop_per_s=792e12, dtype="bfloat16")
LLAMA = dense_shape(SHAPES["llama-3.1-8b"])


def floor(workload: Workload, **limits: float) -> float:
    shape = dense_shape(SHAPES[workload.shape or "llama-3.1-8b"])
    return floor_s(shape, workload, dataclasses.replace(H200, **limits), itemsize=2)


@pytest.mark.parametrize(("name", "rate"), [("W2s", 3570), ("W2", 284), ("W1", 38_000), ("W3", 13_000)])
def test_floors_of_generating_are_those_of_the_targets(name: str, rate: float) -> None:
    workload = WORKLOADS[name]
    assert sum(count for _, count in workload.lengths) / floor(workload) == pytest.approx(rate, rel=0.085)


def test_floors_of_prompts_are_those_of_the_targets() -> None:
    assert 32 * 4096 / floor(WORKLOADS["W4"]) == pytest.approx(49_000, rel=0.01)
    assert floor(WORKLOADS["W5"]) == pytest.approx(0.5, rel=0.05)
    assert floor(WORKLOADS["W6"]) == pytest.approx(19.5, rel=0.08)


def test_the_embedding_is_looked_up_and_the_head_is_read() -> None:
    assert num_parameters(LLAMA) == pytest.approx(7.505e9, rel=0.001)  # of 8.03e9, without 128,256 x 4096
    assert num_parameters(dense_shape(SHAPES["qwen3-0.6b"])) == pytest.approx(0.596e9, rel=0.001)  # tied, and read all the same


def test_bytes_alone_are_weights_once_a_step_and_every_key_and_value() -> None:
    workload = equal_requests(2, input_len=100, output_len=3)
    weights, per_token = num_parameters(LLAMA) * 2, 131_072
    contexts = 2 * (101 + 102)  # the first token comes from the prompt
    expected = (3 * weights + contexts * per_token) / 4.26e12
    assert floor(workload, product_flop_per_s=1e30) == pytest.approx(expected, rel=1e-9)


def test_operations_alone_are_products_and_the_keys_that_are_seen() -> None:
    workload = equal_requests(3, input_len=4, output_len=2)
    products = 3 * (4 + 1) * 2 * num_parameters(LLAMA)
    attention = 3 * (1 + 2 + 3 + 4) * 4 * 32 * 128 * 32
    assert floor(workload, copy_bytes_per_s=1e30) == pytest.approx((products + attention) / 792e12, rel=1e-9)


def test_a_shared_prefix_is_computed_once_and_read_once_a_step() -> None:
    shared = dataclasses.replace(equal_requests(8, input_len=1000, output_len=5), shared_prefix=900)
    for limits in ({"product_flop_per_s": 1e30}, {"copy_bytes_per_s": 1e30}):
        saved = floor(dataclasses.replace(shared, shared_prefix=0), **limits) - floor(shared, **limits)
        if "product_flop_per_s" in limits:
            assert saved == pytest.approx(7 * 900 * 4 * 131_072 / 4.26e12, rel=1e-6)
        else:
            flop = 7 * (900 * 2 * num_parameters(LLAMA) + 900 * 901 // 2 * 4 * 32 * 128 * 32)
            assert saved == pytest.approx(flop / 792e12, rel=1e-6)


@pytest.mark.parametrize(
    "changed",
    [
        {"n_routed_experts": 64},
        {"kv_lora_rank": 512},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"intermediate_size": None},
    ],
)
def test_what_is_no_dense_decoder_has_no_floor(changed: dict[str, object]) -> None:
    config = SHAPES["llama-3.1-8b"]
    assert dense_shape(config | {"sliding_window": None, "layer_types": ["full_attention"]}) == LLAMA
    assert dense_shape(config | changed) is None
    assert dense_shape(SHAPES["deepseek-v2-lite"]) is None
