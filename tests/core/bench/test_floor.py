"""The least time of a workload: the floors of the project's targets, and the rules by which they are counted."""

from __future__ import annotations

import dataclasses
import json

import pytest

from enginery.bench.floor import DeviceLimits, floor_s
from enginery.bench.sizes import ContextSizes, ExpertSizes, ModelSizes, family_sizes
from enginery.bench.workloads import SHAPES_FILE, WORKLOADS, Workload, equal_requests
from enginery.checkpoint.decoder_shape import read_decoder_shape
from enginery.contracts.model import ModelSpec
from enginery.nn.decoder import Decoder

SHAPES = json.loads(SHAPES_FILE.read_text())
H200 = DeviceLimits(copy_bytes_per_s=4.26e12, read_bytes_per_s=4.47e12, product_flop_per_s=792e12, dtype="bfloat16")
DENSE = ModelSpec(
    name="dense",
    api=(2, 0),
    architectures=(),
    describe=lambda config: read_decoder_shape(config).facts(),
    build=lambda context: Decoder(context, read_decoder_shape(context.config)),
)
LLAMA, QWEN = (family_sizes(DENSE, SHAPES[name], dtype="bfloat16") for name in ("llama-3.1-8b", "qwen3-0.6b"))
NOTHING = ModelSizes(dense_bytes=0, dense_parameters=0, experts=(), contexts=(), state_bytes=0)
ONE_A_SECOND = DeviceLimits(copy_bytes_per_s=1.0, read_bytes_per_s=1.0, product_flop_per_s=1e30, dtype="bfloat16")


def floor(workload: Workload, **limits: float) -> float:
    return floor_s(QWEN if workload.shape == "qwen3-0.6b" else LLAMA, workload, dataclasses.replace(H200, **limits))


def bytes_of(workload: Workload, **sizes: object) -> float:
    """What the workload reads and writes with a model that has nothing but these sizes."""
    return floor_s(dataclasses.replace(NOTHING, **sizes), workload, ONE_A_SECOND)


@pytest.mark.parametrize(("name", "rate"), [("W2s", 3570), ("W2", 284), ("W1", 38_000), ("W3", 13_000)])
def test_floors_of_generating_are_those_of_the_targets(name: str, rate: float) -> None:
    workload = WORKLOADS[name]
    assert sum(count for _, count in workload.lengths) / floor(workload) == pytest.approx(rate, rel=0.085)


def test_floors_of_prompts_are_those_of_the_targets() -> None:
    assert 32 * 4096 / floor(WORKLOADS["W4"]) == pytest.approx(49_000, rel=0.01)
    assert floor(WORKLOADS["W5"]) == pytest.approx(0.5, rel=0.05)
    assert floor(WORKLOADS["W6"]) == pytest.approx(19.5, rel=0.08)


def test_the_embedding_is_looked_up_and_the_head_is_read() -> None:
    assert LLAMA.dense_parameters == pytest.approx(7.505e9, rel=0.001)  # of 8.03e9, without 128,256 x 4096
    assert QWEN.dense_parameters == pytest.approx(0.596e9, rel=0.001)  # tied, and read all the same


def test_bytes_alone_are_weights_once_a_step_and_every_key_and_value() -> None:
    workload = equal_requests(2, input_len=100, output_len=3)
    weights, per_token = LLAMA.dense_parameters * 2, 131_072
    contexts = 2 * (101 + 102)  # the first token comes from the prompt
    expected = (3 * weights + contexts * per_token) / 4.26e12
    assert floor(workload, product_flop_per_s=1e30) == pytest.approx(expected, rel=1e-9)


def test_operations_alone_are_products_and_the_keys_that_are_seen() -> None:
    workload = equal_requests(3, input_len=4, output_len=2)
    products = 3 * (4 + 1) * 2 * LLAMA.dense_parameters
    attention = 3 * (1 + 2 + 3 + 4) * 4 * 32 * 128 * 32
    assert floor(workload, copy_bytes_per_s=1e30) == pytest.approx((products + attention) / 792e12, rel=1e-9)


def test_a_shared_prefix_is_computed_once_and_read_once_a_step() -> None:
    shared = dataclasses.replace(equal_requests(8, input_len=1000, output_len=5), shared_prefix=900)
    for limits in ({"product_flop_per_s": 1e30}, {"copy_bytes_per_s": 1e30}):
        saved = floor(dataclasses.replace(shared, shared_prefix=0), **limits) - floor(shared, **limits)
        if "product_flop_per_s" in limits:
            assert saved == pytest.approx(7 * 900 * 4 * 131_072 / 4.26e12, rel=1e-6)
        else:
            flop = 7 * (900 * 2 * LLAMA.dense_parameters + 900 * 901 // 2 * 4 * 32 * 128 * 32)
            assert saved == pytest.approx(flop / 792e12, rel=1e-6)


def test_a_window_bounds_what_is_read_and_what_a_prompt_sees() -> None:
    workload = equal_requests(1, input_len=10, output_len=4)
    windows = (ContextSizes(window=5, token_bytes=7, key_flop=3),)
    assert bytes_of(workload, contexts=windows) == 7 * (5 + 5 + 5)
    everything = (ContextSizes(window=None, token_bytes=7, key_flop=3),)
    assert bytes_of(workload, contexts=everything) == 7 * (11 + 12 + 13)
    of_prompts = DeviceLimits(copy_bytes_per_s=1e30, read_bytes_per_s=1e30, product_flop_per_s=1.0, dtype="bfloat16")
    seen = 1 + 2 + 3 + 4 + 5 + 5 + 5 + 5 + 5 + 5
    assert floor_s(dataclasses.replace(NOTHING, contexts=windows), workload, of_prompts) == pytest.approx(3 * seen)


def test_a_window_leaves_a_shared_prefix_behind() -> None:
    workload = dataclasses.replace(equal_requests(2, input_len=10, output_len=4), shared_prefix=8)
    windows = (ContextSizes(window=5, token_bytes=1, key_flop=0),)
    own, of_the_prefix = 2 * (3 + 4 + 5), 2 + 1 + 0
    assert bytes_of(workload, contexts=windows) == own + of_the_prefix


def test_a_state_is_read_and_written_in_each_step_of_its_request() -> None:
    workload = dataclasses.replace(equal_requests(1, input_len=10, output_len=1), lengths=((10, 1), (20, 2), (30, 3)))
    assert bytes_of(workload, state_bytes=100) == 2 * 100 * (0 + 1 + 2)


def test_one_request_reads_its_experts_alone_and_two_share_some() -> None:
    experts = (ExpertSizes(share=2 / 4, num_bytes=4 * 1000, parameters=0),)  # 4 experts, of which a token uses 2
    prompt, step = 1, 1  # tokens
    assert bytes_of(equal_requests(1, input_len=prompt, output_len=1 + step), experts=experts, dense_bytes=10) == 2 * (10 + 2000)
    two = equal_requests(2, input_len=1, output_len=1)
    assert bytes_of(two, experts=experts, dense_bytes=10) == 10 + 3000  # of two pairs out of 4, half of the second is in the first
    assert bytes_of(equal_requests(1, input_len=500, output_len=1), experts=experts) == pytest.approx(4000)


def test_a_token_is_multiplied_with_its_own_experts() -> None:
    sizes = dataclasses.replace(NOTHING, dense_parameters=5, experts=(ExpertSizes(share=2 / 4, num_bytes=0, parameters=4 * 100),))
    slow = dataclasses.replace(ONE_A_SECOND, product_flop_per_s=1.0)
    assert floor_s(sizes, equal_requests(3, input_len=7, output_len=2), slow) == 3 * (7 + 1) * 2 * (5 + 200)
