"""Floors of published shapes, from what their families ask for: against their model cards, and against sums made by hand."""

from __future__ import annotations

import functools

import pytest

from enginery.bench.floor import DeviceLimits, floor_s
from enginery.bench.sizes import ModelSizes, read_sizes
from enginery.bench.workloads import find_workload, shapes
from enginery.plugin.registry import Registry

H200 = DeviceLimits(copy_bytes_per_s=4.26e12, read_bytes_per_s=4.26e12, product_flop_per_s=792e12, dtype="bfloat16")
REGISTRY = Registry.load()


def changed(shape: str, **values: object) -> ModelSizes:
    counted = read_sizes(shapes()[shape] | values, REGISTRY, dtype="bfloat16")
    assert counted is not None
    return counted


sizes = functools.cache(changed)


@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [  # 1e9 parameters of the model card; active ones without the embedding, where the card has it so
        ("deepseek-v2-lite", 15.7, 2.4),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("mixtral-8x7b", 46.7, 12.9),
        ("gpt-oss-120b", 116.8, 5.1),
        ("kimi-linear-48b", 49.1, 3.1),
    ],
)
def test_parameters_are_those_of_the_model_cards(shape: str, total: float, active: float) -> None:
    config, counted = shapes()[shape], sizes(shape)
    embedding = int(config["vocab_size"]) * int(config["hidden_size"])  # type: ignore[call-overload]
    every = counted.dense_parameters + sum(experts.parameters for experts in counted.experts) + embedding
    assert every / 1e9 == pytest.approx(total, rel=0.005)
    assert counted.token_parameters / 1e9 == pytest.approx(active, rel=0.03) or (
        (counted.token_parameters + embedding) / 1e9 == pytest.approx(active, rel=0.03)
    )


def test_experts_in_mxfp4_count_as_they_are_packed() -> None:
    counted = sizes("gpt-oss-120b")
    (experts,) = counted.experts
    assert experts.parameters == 36 * 128 * 3 * 2880 * 2880
    assert experts.num_bytes == experts.parameters / 2 + experts.parameters / 32  # two to a byte, and a byte for each 32
    assert counted.dense_bytes == 2 * counted.dense_parameters
    plain = changed("gpt-oss-120b", quantization_config=None)
    assert plain.experts[0].num_bytes == 2 * experts.parameters
    assert plain.experts[0].parameters == experts.parameters


def test_float8_counts_a_byte_and_its_scales() -> None:
    counted = changed("llama-125m", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    head, layers = 32_000 * 768, 12 * (768 * (768 + 256 + 256) + 768 * 768 + 3 * 768 * 2048)
    assert counted.dense_parameters == head + layers
    assert counted.dense_bytes == 2 * head + layers + 4 * layers // (128 * 128)


def test_a_step_of_gpt_oss_adds_up() -> None:
    one = find_workload("gpt-oss-120b:1")
    dense = 36 * (2880 * (64 + 8 + 8) * 64 + 64 * 64 * 2880 + 128 * 2880) + 201_088 * 2880
    experts = 36 * 4 * 3 * 2880 * 2880 * 17 / 32  # four of 128
    token = 18 * 2 * 8 * 64 * 2  # of 18 layers' keys and values
    contexts = sum(range(513, 513 + 255)) * token + 255 * 128 * token
    steps_s = (255 * (2 * dense + experts) + contexts) / H200.copy_bytes_per_s
    every = 2 * dense + experts * 32
    operations = 512 * 2 * (dense + 36 * 4 * 3 * 2880 * 2880)
    seen = 512 * 513 // 2 + 128 * 129 // 2 + (512 - 128) * 128
    prompt_s = max(every / H200.copy_bytes_per_s, operations / H200.product_flop_per_s)
    prompt_s += 18 * seen * 4 * 64 * 64 / H200.product_flop_per_s
    assert floor_s(sizes("gpt-oss-120b"), one, H200) == pytest.approx(steps_s + prompt_s, rel=1e-6)


def test_latents_and_states_are_those_of_the_layers_that_have_them() -> None:
    kimi, qwen, deepseek = sizes("kimi-linear-48b"), sizes("qwen3-next-80b-32"), sizes("deepseek-v2-lite")
    assert [layers.token_bytes for layers in kimi.contexts] == [7 * (512 + 64) * 2]
    assert kimi.state_bytes == 20 * (32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2)
    assert [layers.token_bytes for layers in qwen.contexts] == [8 * 2 * 2 * 256 * 2]
    assert qwen.state_bytes == 24 * (32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2)
    assert [layers.token_bytes for layers in deepseek.contexts] == [27 * (512 + 64) * 2]
    assert deepseek.contexts[0].key_flop == 27 * 16 * 2 * (128 + 64 + 128)
    assert deepseek.state_bytes == 0


@pytest.mark.parametrize("name", ["W7", *(f"{shape}:{streams}" for shape in shapes() for streams in (1, 256))])
def test_every_shape_has_a_floor(name: str) -> None:
    workload = find_workload(name)
    assert 0 < floor_s(sizes(workload.shape), workload, H200) < 60
