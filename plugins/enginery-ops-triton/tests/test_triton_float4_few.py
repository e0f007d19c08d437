"""Products of few pairs with experts in MXFP4 whose weights go from memory to registers: equal to float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from float4_layers import (
    ACTIVATIONS,
    CLAMPED,
    assert_close,
    make_layer,
    make_routed,
)
from gluon_by_interpreter import interpreted
from triton_devices import NEEDS_INTERPRETER

from enginery.api import Activation
from enginery_ops_triton.expert_blocks import ExpertSizes, Float4Blocks, ProductBlock, float4_blocks_for
from enginery_ops_triton.experts_float4 import Float4Experts, fits_direct, is_aligned
from enginery_ops_triton.gluon_kernels import gluon_kernels
from enginery_ops_triton.kernels import experts_float4 as kernels
from enginery_ops_triton.kernels import experts_float4_few as few
from enginery_ops_triton.kernels import float4_few


def direct(n: int, num_warps: int, stages: int, split: int = 1) -> ProductBlock:
    return ProductBlock(n=n, k=128, num_warps=num_warps, stages=stages, split=split)


DIRECT = {
    "alone": Float4Blocks(m=8, gate_up=direct(64, 4, 4), down=direct(32, 2, 3), alone=True, direct=True),
    "split": Float4Blocks(m=8, gate_up=direct(32, 2, 2, split=3), down=direct(64, 4, 3, split=4), alone=True, direct=True),
    "tiles": Float4Blocks(m=8, gate_up=direct(128, 4, 2), down=direct(64, 2, 2), direct=True),
    "both sizes": Float4Blocks(m=16, gate_up=direct(64, 4, 3), down=direct(128, 8, 3), few=8, direct=True),
}


def test_only_sizes_and_rows_that_kernels_can_fetch_are_direct_and_only_in_their_triton() -> None:
    """Two groups of columns for each of four programs, and 16 bytes at a time of x."""
    assert gluon_kernels("experts_float4_few", "3.6.0") is gluon_kernels("experts_float4_few", "3.7.1") is few
    assert gluon_kernels("experts_float4_few", "3.8.0") is gluon_kernels("experts_float4_few", "3.60.0") is None
    assert fits_direct(2880, 2880)
    assert not any(fits_direct(*sizes) for sizes in ((2880, 512), (512, 2880), (2880, 1028), (1028, 2880)))
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    assert is_aligned(x)
    assert is_aligned(x[:, 8:40])
    for other in (x[:, 1:33], torch.zeros(3, 60, dtype=torch.bfloat16), torch.zeros(64, 16, dtype=torch.bfloat16).mT):
        assert not is_aligned(other)


def test_blocks_are_direct_only_where_that_is_there_and_pairs_of_an_expert_are_few() -> None:
    sizes = ExpertSizes(num_experts=128, columns=2880, inner=2880, dtype=torch.bfloat16, weight_dtype=torch.uint8)
    able = replace(sizes, has_direct=True)
    for num_tokens in (1, 2, 8, 32, 128, 256, 341):
        blocks = float4_blocks_for(4 * num_tokens, 4, able)
        assert blocks.direct
        assert blocks.m == (8 if num_tokens <= 170 else 16)
        for product in (blocks.gate_up, blocks.down):
            assert product.n % (16 * product.num_warps) == 0
        assert not float4_blocks_for(4 * num_tokens, 4, sizes).direct
        assert not float4_blocks_for(4 * num_tokens, 4, replace(able, dtype=torch.float16)).direct
    assert not float4_blocks_for(4 * 512, 4, able).direct


@NEEDS_INTERPRETER
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "tiling"), [(1, 1, "alone"), (2, 1, "split"), (9, 1, "tiles"), (12, 1, "both sizes")]
)
def test_what_products_of_few_pairs_compute_equals_float64(
    num_tokens: int, top_k: int, tiling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Triton in place of Gluon: see gluon_by_interpreter.py."""
    torch.manual_seed(num_tokens)
    layer = make_layer(2, 544, 520, device="cpu", dtype=torch.bfloat16)
    routed, x = make_routed(num_tokens, 2, 1, "cpu"), torch.randn(num_tokens, 544).to(torch.bfloat16)
    bound = layer.bound()
    assert isinstance(bound, Float4Experts)
    assert bound.direct_kernels is None
    parts = interpreted(monkeypatch, Path(str(float4_few.__file__)), num_warps=4, tiny=kernels.tiny_float32)
    shared = {name: getattr(parts, name) for name in ("by_quads", "fetched", "product", "sums")}
    bound.direct_kernels = interpreted(monkeypatch, Path(str(few.__file__)), num_warps=4, **shared)
    assert_close(bound.of_blocks(x, routed, DIRECT[tiling]), layer, x, routed)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [CLAMPED, ACTIVATIONS[0]], ids=str)
@pytest.mark.parametrize(("columns", "inner"), [(544, 520), (2880, 1056), (1024, 1440)])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "tiling"), [(1, 3, "alone"), (2, 2, "split"), (23, 2, "tiles"), (40, 2, "both sizes")]
)
def test_products_of_few_pairs_equal_float64(
    num_tokens: int, top_k: int, tiling: str, columns: int, inner: int, activation: Activation
) -> None:
    """Columns that end within a group, a part with fewer groups; experts with more pairs than a tile has, and with none."""
    torch.manual_seed(num_tokens)
    biased = activation is CLAMPED
    layer = make_layer(5, columns, inner, device="cuda", dtype=torch.bfloat16, biased=biased, activation=activation)
    routed = make_routed(num_tokens, 5, top_k, "cuda")
    x = torch.randn(num_tokens, columns + 16).to("cuda", torch.bfloat16)[:, 8:-8]
    bound = layer.bound()
    assert isinstance(bound, Float4Experts)
    assert bound.direct_kernels
    for _ in range(2):  # counters of the first run are cleared
        assert_close(bound.of_blocks(x, routed, DIRECT[tiling]), layer, x, routed)
