"""Products of one row and its norm by the matrix units: what they compute, and which weights they serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compared_products import TOLERANCE
from gluon_by_interpreter import interpreted
from triton_devices import NEEDS_INTERPRETER

from enginery.nn import reference_ops
from enginery_ops_triton.gluon_kernels import gluon_kernels
from enginery_ops_triton.kernels import linear_few, linear_normed_row
from enginery_ops_triton.unit_rows import NUM_WARPS, UnitRow, bind_unit_row

FROM_FEW = ("add_block", "by_quads", "sums")
UNCHAINED = ("release_successor", "wait_for_predecessor")
SIZES = [(1024, 48, False), (1000, 40, True), (1024, 56, True), (2048, 36, False)]


def row(outputs: int, columns: int, *, biased: bool, gated: bool, device: str, kernels: object) -> UnitRow:
    weight = (torch.randn(outputs, columns) * columns**-0.5).to(device, torch.bfloat16)
    bias = torch.randn(outputs).to(device, torch.bfloat16) if biased else None
    return UnitRow(weight=weight, bias=bias, kernels=kernels, gated=gated)


def assert_equals_float64(product: UnitRow) -> None:
    weight = product.weight
    x, residual, scale = ((torch.randn(*size, weight.shape[1])).to(weight) for size in ((1,), (1,), ()))
    before = residual.clone()
    summed, normed, out = product(x, residual, scale, 1e-5)
    assert torch.equal(residual, before)
    given = residual.clone()
    torch.testing.assert_close(normed, reference_ops.add_rms_norm(x, given, scale, 1e-5), rtol=1e-2, atol=1e-2)
    assert torch.equal(summed, given)
    wide = given.double()
    exact = wide * (wide.square().mean() + 1e-5).rsqrt() * scale.double() @ weight.double().T
    exact = exact if product.bias is None else exact + product.bias.double()
    if product.gated:
        gate, up = exact.chunk(2, 1)
        exact = torch.nn.functional.silu(gate) * up
    assert ((out.double() - exact).norm() / exact.norm()).item() < TOLERANCE[weight.dtype]


@NEEDS_INTERPRETER
@pytest.mark.parametrize(("columns", "outputs", "gated"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_what_is_computed_equals_float64(
    columns: int, outputs: int, gated: bool, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Triton in place of Gluon: see gluon_by_interpreter.py."""
    torch.manual_seed(columns)
    few = interpreted(monkeypatch, Path(str(linear_few.__file__)), num_warps=NUM_WARPS)
    replaced = {name: getattr(few, name) for name in FROM_FEW} | dict.fromkeys(UNCHAINED, lambda _: None)
    kernels = interpreted(monkeypatch, Path(str(linear_normed_row.__file__)), num_warps=NUM_WARPS, **replaced)
    assert_equals_float64(row(outputs, columns, biased=biased, gated=gated, device="cpu", kernels=kernels))


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "outputs", "gated"), [*SIZES, (1024, 6144, True), (1024, 4096, False), (2048, 12288, True)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_float64(columns: int, outputs: int, gated: bool, biased: bool) -> None:
    torch.manual_seed(columns)
    kernels = gluon_kernels("linear_normed_row")
    assert_equals_float64(row(outputs, columns, biased=biased, gated=gated, device="cuda", kernels=kernels))


@pytest.mark.parametrize(
    ("outputs", "columns", "served"),
    [(4096, 1024, True), (6144, 2048, True), (6144, 4096, False), (128, 2048, False), (4096, 1020, False), (4096, 896, False)],
)
@pytest.mark.usefixtures("hopper")
def test_which_weights_it_serves(outputs: int, columns: int, served: bool) -> None:
    assert (bind_unit_row(torch.empty(outputs, columns, dtype=torch.bfloat16, device="cuda"), None) is not None) == served
    for dtype in (torch.float32, torch.float16):
        assert bind_unit_row(torch.empty(outputs, columns, dtype=dtype, device="cuda"), None) is None
    assert bind_unit_row(torch.empty(outputs, columns, dtype=torch.bfloat16), None) is None
