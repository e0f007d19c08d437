"""Products whose weights all programs share evenly: what they compute, and which weights they serve."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from compared_products import TOLERANCE, assert_equals_float64
from gluon_by_interpreter import interpreted
from rings_by_interpreter import stand_ins

from enginery_ops_triton.gluon_kernels import gluon_kernels
from enginery_ops_triton.kernels import linear_stream_k
from enginery_ops_triton.kernels.precision import INTERPRETED
from enginery_ops_triton.stream_k import BLOCK_K, BLOCK_N, StreamK, bind_stream_k, num_programs, serves


@pytest.mark.skipif(not INTERPRETED.value, reason="triton was imported for the compiler in this process")
@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "biased", "programs"),
    [
        (2, 4 * BLOCK_N, 3 * BLOCK_K, False, 2),  # two tiles each, none shared
        (16, 2 * BLOCK_N, 4 * BLOCK_K, True, 4),  # each tile by two programs
        (5, 5 * BLOCK_N, 2 * BLOCK_K, False, 2),  # one tile shared, and then two each
        (33, 3 * BLOCK_N - 8, 5 * BLOCK_K + 8, True, 4),  # shares of 4, 5, 4 and 5 units; the last tile and unit not whole
        (4, 2 * BLOCK_N, 4 * BLOCK_K, True, 5),  # shares of 1, 2, 1, 2 and 2: three programs have the first tile, two the other
        (3, BLOCK_N, 2 * BLOCK_K, True, 5),  # programs without a unit
        (1, BLOCK_N, 24 * BLOCK_K, False, 1),  # rings go round
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_computed_equals_float64(
    rows: int, outputs: int, columns: int, biased: bool, programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for copies and barriers: see rings_by_interpreter.py."""
    torch.manual_seed(rows)
    kernels = interpreted(monkeypatch, Path(str(linear_stream_k.__file__)), num_warps=4, **stand_ins(4))
    weight = (torch.randn(outputs, columns) * columns**-0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    product = StreamK(weight, bias, kernels=kernels, programs=programs)
    assert_equals_float64(product, rows)
    assert not product.arrived.any()


@pytest.mark.parametrize(("first", "stride"), [(1, 2 * BLOCK_K), (0, BLOCK_K + 4)], ids=["beginning", "rows"])
def test_of_x_at_no_multiple_of_16_bytes_torch_makes_the_product(first: int, stride: int) -> None:
    weight, x = torch.randn(BLOCK_N, BLOCK_K).bfloat16(), torch.randn(3, stride).bfloat16()[:, first : first + BLOCK_K]
    product = StreamK(weight, None, kernels=SimpleNamespace(blocks_of=lambda *_: None), programs=1)
    assert torch.equal(product(x), F.linear(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("outputs", "columns", "biased"),
    [(4096, 4096, False), (6144, 4096, True), (2880, 2880, True), (28672, 1032, False), (1000, 8192, True), (72, 14336, False)],
)
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 64])
def test_products_equal_float64(rows: int, outputs: int, columns: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    kernels = gluon_kernels("linear_stream_k")
    assert kernels is not None
    weight = (torch.randn(outputs, columns, device="cuda") * columns**-0.5).to(dtype)
    bias = torch.randn(outputs, device="cuda").to(dtype) if biased else None
    product = StreamK(weight, bias, kernels=kernels, programs=num_programs(132))
    assert_equals_float64(product, rows)
    assert not product.arrived.any()


@pytest.mark.parametrize(
    ("outputs", "columns", "rows", "expected"),
    [
        (4096, 4096, 32, True),
        (6144, 4096, 32, True),
        (6144, 4096, 64, False),  # 96 tiles: of 128 programs some share two tiles
        (28672, 4096, 64, True),
        (28672, 4096, 65, False),
        (28672, 4096, 8, False),  # x fits into registers: `PersistentRows`
        (4096, 14336, 8, True),
        (2560, 9728, 8, True),
        (2048, 8192, 8, False),  # few outputs, as of a model whose other products are direct
        (4096, 4096, 1, False),
        (4096, 4096, 64, False),
        (2048, 4096, 32, True),  # few weights, but each tile is four programs' alone
        (3072, 4096, 32, False),
        (1024, 2048, 16, False),  # eight programs share each tile, of few weights
        (6144, 1024, 16, False),
        (4096, 4100, 16, False),  # rows that are apart by no multiple of 16 bytes
    ],
)
def test_weights_that_are_served(outputs: int, columns: int, rows: int, expected: bool) -> None:
    assert serves(outputs, columns, rows, programs=128) is expected


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("first", "stride", "served"), [(0, 4096, True), (8, 4104, True), (4, 4104, False), (0, 4100, False)], ids=str
)
def test_weights_whose_rows_are_at_no_multiple_of_16_bytes_are_not_served(first: int, stride: int, served: bool) -> None:
    weight = torch.empty(4096, stride, dtype=torch.bfloat16, device="cuda")[:, first : first + 4096]
    assert (bind_stream_k(weight, None, multiprocessors=132) is not None) is served


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_devices_than_hopper_s_are_not_served(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
    assert bind_stream_k(weight, None, multiprocessors=132) is None


def test_all_multiprocessors_but_a_few_have_a_program() -> None:
    """Of H100s and H200s, of H20s, and of parts of a device."""
    assert [num_programs(each) for each in (132, 114, 78, 60, 16, 14)] == [128, 112, 78, 60, 16, 14]
