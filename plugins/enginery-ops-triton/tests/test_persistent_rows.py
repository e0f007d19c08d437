"""Products by programs that stay: what they compute, and which weights they serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compared_products import TOLERANCE, assert_equals_float64
from gluon_by_interpreter import interpreted
from triton_devices import NEEDS_INTERPRETER

from enginery_ops_triton.gluon_kernels import gluon_kernels
from enginery_ops_triton.kernels import linear_few, linear_persistent
from enginery_ops_triton.persistent_rows import AHEAD, BLOCK_K, BLOCK_N, NUM_WARPS, PersistentRows, bind_persistent, serves_few

FROM_FEW = ("add_block", "addresses", "by_quads", "columns_of", "load_block", "outputs_adjacent", "sums")
UNCHAINED = ("release_successor", "wait_for_predecessor")
BLOCK = NUM_WARPS * BLOCK_K


def make(outputs: int, columns: int, *, biased: bool, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight that begins, and whose rows begin, within a larger matrix of what is no number, and a bias."""
    wider = torch.full((outputs + 1, 32 + -(-columns // 16) * 16), float("nan"), dtype=dtype, device=device)
    weight = wider[1:, 16 : 16 + columns]
    weight.copy_(torch.randn(outputs, columns) * columns**-0.5)
    return weight, torch.randn(outputs).to(device, dtype) if biased else None


@NEEDS_INTERPRETER
@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "biased", "programs"),
    [
        (2, 5 * BLOCK_N, BLOCK, False, 2),  # three blocks and two, of one step each
        (8, 3 * BLOCK_N - 7, 2 * BLOCK + 24, True, 2),  # the last block and step are not whole
        (5, 9, BLOCK - 8, True, 4),  # one program
        (3, 12 * BLOCK_N, BLOCK, True, 1),  # the ring goes round
        (4, 2 * BLOCK_N, (AHEAD + 2) * BLOCK, False, 2),  # more steps than blocks ahead
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_computed_equals_float64(
    rows: int, outputs: int, columns: int, biased: bool, programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Triton in place of Gluon: see gluon_by_interpreter.py."""
    torch.manual_seed(rows)
    few = interpreted(monkeypatch, Path(str(linear_few.__file__)), num_warps=NUM_WARPS)
    replaced = {name: getattr(few, name) for name in FROM_FEW} | dict.fromkeys(UNCHAINED, lambda _: None)
    kernels = interpreted(monkeypatch, Path(str(linear_persistent.__file__)), num_warps=NUM_WARPS, **replaced)
    weight, bias = make(outputs, columns, biased=biased, dtype=dtype, device="cpu")
    assert_equals_float64(PersistentRows(weight, bias, kernels=kernels, programs=programs), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("outputs", "columns", "biased"),
    [(6144, 4096, False), (28672, 4096, True), (1024, 1024, True), (2887, 2880, True), (40000, 2056, False), (2560, 5376, True)],
)
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_products_equal_float64(rows: int, outputs: int, columns: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    kernels = gluon_kernels("linear_persistent")
    assert kernels is not None
    weight, bias = make(outputs, columns, biased=biased, dtype=dtype, device="cuda")
    assert_equals_float64(PersistentRows(weight, bias, kernels=kernels, programs=132), rows)


@pytest.mark.parametrize(
    ("outputs", "columns", "is_direct", "expected"),
    [
        (6144, 4096, True, True),
        (2560, 2560, True, True),
        (5120, 2880, True, False),  # not in whole blocks, as gpt-oss-120b's
        (2880, 4096, True, False),
        (2304, 4096, True, False),  # few outputs or short rows, as of models whose other products are direct
        (12288, 2048, True, False),
        (128256, 4096, False, True),
        (151936, 1024, False, True),
        (1024, 2048, False, True),
        (1000, 2048, False, False),
        (6144, 512, False, False),
        (5120, 5376, False, True),
        (5120, 5384, False, False),  # x has too many columns for registers
        (6144, 1028, False, False),
    ],
)
def test_weights_that_are_served(outputs: int, columns: int, is_direct: bool, expected: bool) -> None:
    assert serves_few(outputs, columns, is_direct=is_direct) is expected


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("first", "stride", "served"), [(0, 4096, True), (8, 4112, True), (4, 4112, False), (0, 4104, False)], ids=str
)
def test_weights_whose_rows_are_at_no_multiple_of_16_bytes_are_not_served(first: int, stride: int, served: bool) -> None:
    weight = torch.empty(4096, stride, dtype=torch.bfloat16, device="cuda")[:, first : first + 4096]
    assert (bind_persistent(weight, None, is_direct=False, multiprocessors=132) is not None) is served


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_devices_than_hopper_s_are_not_served(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
    assert bind_persistent(weight, None, is_direct=False, multiprocessors=132) is None


def test_no_more_programs_than_blocks_of_outputs() -> None:
    weight = torch.empty(3 * BLOCK_N - 1, BLOCK, dtype=torch.bfloat16)
    assert [PersistentRows(weight, None, kernels=linear_persistent, programs=most).programs for most in (2, 132)] == [2, 3]
