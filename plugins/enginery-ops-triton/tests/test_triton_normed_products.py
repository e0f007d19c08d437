"""A product of one row adds and norms the row too, as the core's reference does, interpreted and compiled."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from compared_ops import DTYPES, close, ops, part_of_wider, random
from triton_devices import DEVICES

from enginery.api import GatableLinear, NormingLinear
from enginery.nn import reference_ops
from enginery_ops_triton import matvec

pytestmark = pytest.mark.parametrize("device", DEVICES)
LARGE = [pytest.param(*size, marks=pytest.mark.gpu) for size in ((2048, 1030), (2880, 1025))]


@pytest.mark.parametrize(("columns", "outputs"), [(64, 40), (320, 96), (2304, 12), (2048, 14), (2880, 13), *LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_one_row_norms_the_row(
    monkeypatch: pytest.MonkeyPatch, columns: int, outputs: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    monkeypatch.setattr(matvec, "MOST_ROUTED", 13)  # as many and more outputs are cut as those of layers are
    torch.manual_seed(columns)
    weight = random(outputs, columns, dtype=dtype, device=device, scale=columns**-0.5)
    product = ops(device).bind_linear(weight, random(outputs, dtype=dtype, device=device) if bias else None)
    assert isinstance(product, NormingLinear)
    delta, residual, scale = (random(*size, columns, dtype=dtype, device=device) for size in ((1,), (1,), ()))
    given, was, view = residual.clone(), residual.clone(), residual[0]
    normed = product.add_rms_norm(delta, residual, scale, 1e-5)
    assert normed is not None
    close(normed, reference_ops.add_rms_norm(delta, given, scale, 1e-5))
    assert torch.equal(residual, given)
    assert torch.equal(view, was[0]), "the sum has memory of its own"
    made = product(normed)
    close(made, product(given.new_tensor(normed.tolist())))
    assert product(normed) is not made, "it is handed out once"


@pytest.mark.parametrize(("columns", "inner"), [(64, 40), (320, 47), (2304, 12), (2048, 15), (2880, 13)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_one_row_takes_the_gate_behind_it(
    columns: int, inner: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(columns)
    table = ops(device)
    weight = random(2 * inner, columns, dtype=dtype, device=device, scale=columns**-0.5)
    product = table.bind_linear(weight, random(2 * inner, dtype=dtype, device=device) if bias else None)
    assert isinstance(product, GatableLinear)
    gates = Counter[int]()

    def gated_silu(x: torch.Tensor) -> torch.Tensor:
        gates[len(x)] += 1
        return table.gated_silu(x)

    gated = product.with_gate(gated_silu)
    assert isinstance(gated, NormingLinear)
    delta, residual, scale = (random(*size, columns, dtype=dtype, device=device) for size in ((1,), (1,), ()))
    given = residual.clone()
    normed = gated.add_rms_norm(delta, residual, scale, 1e-5)
    assert normed is not None
    close(normed, reference_ops.add_rms_norm(delta, given, scale, 1e-5))
    assert torch.equal(residual, given)
    made = gated(normed)
    assert made.shape == (1, inner)
    assert not gates, "it is one kernel"
    close(made, reference_ops.gated_silu(product(normed)))
    several = normed.repeat(3, 1)
    close(gated(several), reference_ops.gated_silu(product(several)))
    assert gates == {3: 1}


@pytest.mark.parametrize("columns", [64, 320, 2304])
def test_a_row_that_is_normed_may_be_a_part_of_a_wider_one(columns: int, device: str) -> None:
    """Its columns have to be adjacent; the sum is no part of anything."""
    torch.manual_seed(columns)
    weight = random(40, columns, dtype=torch.bfloat16, device=device, scale=columns**-0.5)
    product = ops(device).bind_linear(part_of_wider(weight), None)
    assert isinstance(product, NormingLinear)
    delta, residual, scale = (random(*size, columns, dtype=torch.bfloat16, device=device) for size in ((1,), (1,), ()))
    wide, apart = part_of_wider(residual), delta.repeat(2, 1).T.contiguous().T[:1]
    before = wide.clone()
    assert apart.stride(1) == 2
    assert product.add_rms_norm(apart, wide, scale, 1e-5) is None, "its columns are not adjacent"
    assert torch.equal(wide, before)
    normed = product.add_rms_norm(part_of_wider(delta), wide, part_of_wider(scale), 1e-5)
    assert normed is not None
    close(normed, reference_ops.add_rms_norm(delta, residual, scale, 1e-5))
    assert torch.equal(wide, residual)
    assert wide.untyped_storage().nbytes() == residual.nbytes
    close(product(normed), reference_ops.bind_linear(weight, None)(normed))


def test_a_router_norms_the_row(device: str) -> None:
    weight = random(12, 320, dtype=torch.bfloat16, device=device, scale=0.1)
    router = ops(device).bind_router(weight)
    assert isinstance(router, NormingLinear)
    delta, residual, scale = (random(*size, 320, dtype=torch.bfloat16, device=device) for size in ((1,), (1,), ()))
    given = residual.clone()
    normed = router.add_rms_norm(delta, residual, scale, 1e-5)
    assert normed is not None
    close(normed, reference_ops.add_rms_norm(delta, given, scale, 1e-5))
    logits = router(normed)
    assert logits.dtype == torch.float32
    close(logits, reference_ops.bind_router(weight)(normed), scale=2e3)  # whose row was rounded


def test_what_a_product_made_of_a_norm_is_of_that_norm_alone(device: str) -> None:
    product = ops(device).bind_linear(random(40, 64, dtype=torch.float32, device=device), None)
    assert isinstance(product, NormingLinear)
    delta, residual, scale, other = (random(*size, 64, dtype=torch.float32, device=device) for size in ((1,), (1,), (), (1,)))
    normed = product.add_rms_norm(delta, residual, scale, 1e-5)
    assert normed is not None
    close(product(other), reference_ops.bind_linear(product.weight, None)(other))
    close(product(normed), reference_ops.bind_linear(product.weight, None)(normed))


@pytest.mark.parametrize("rows", [0, 2])
def test_norms_of_other_rows_are_left_to_others(rows: int, device: str) -> None:
    product = ops(device).bind_linear(random(40, 64, dtype=torch.float32, device=device), None)
    assert isinstance(product, NormingLinear)
    delta, residual, scale = (random(*size, 64, dtype=torch.float32, device=device) for size in ((rows,), (rows,), ()))
    before = residual.clone()
    assert product.add_rms_norm(delta, residual, scale, 1e-5) is None
    wide = ops(device).bind_linear(random(4, 4608, dtype=torch.float32, device=device), None)
    assert isinstance(wide, NormingLinear)
    assert wide.add_rms_norm(*random(2, 1, 4608, dtype=torch.float32, device=device), scale, 1e-5) is None, "too wide"
    assert product.add_rms_norm(delta[:1], residual[:1], scale.double(), 1e-5) is None, "the weight is of another type"
    assert torch.equal(residual, before)
