"""The operations of a device, what they are given, and how near the reference they have to be."""

from __future__ import annotations

import torch
from triton_devices import chained

from enginery_ops_triton.ops import TritonOps

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def ops(device: str) -> TritonOps:
    return TritonOps(dependent_launch=chained(device))


def close(actual: torch.Tensor, expected: torch.Tensor, *, scale: float = 1) -> None:
    tolerance = DTYPES[expected.dtype] * scale
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def random(*shape: int, dtype: torch.dtype, device: str, scale: float = 1) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(device=device, dtype=dtype)


def part_of_wider(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a slice of rows that are wider than it."""
    wider = torch.full((*x.shape[:-1], x.shape[-1] + 24), 7.0, dtype=x.dtype, device=x.device)
    wider[..., 8:-16] = x
    return wider[..., 8:-16]
