"""Products of few rows, and how near float64 they have to be."""

from __future__ import annotations

from typing import Protocol

import torch

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


class BoundProduct(Protocol):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def assert_equals_float64(product: BoundProduct, rows: int) -> None:
    """x is a part of wider rows, which hold what is no number beside it. Twice: what the first leaves changes nothing."""
    weight, tolerance = product.weight, TOLERANCE[product.weight.dtype]
    columns = weight.shape[1]
    wider = torch.full((rows, columns + 32), float("nan"), dtype=weight.dtype, device=weight.device)
    wider[:, 16:-16] = torch.randn(rows, columns)
    x = wider[:, 16:-16]
    expected = x.double() @ weight.double().T + (0 if product.bias is None else product.bias.double())
    actual = product(x)
    assert actual.dtype == weight.dtype
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(product(x), actual)
