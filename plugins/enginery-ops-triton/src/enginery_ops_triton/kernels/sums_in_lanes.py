"""Sums of columns that a thread has loaded together: they need no other thread, and one register instead of eight."""

from __future__ import annotations

from typing import Final

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel

LOADED_BITS: Final = 128  # by one instruction


@triton.constexpr_function  # type: ignore[untyped-decorator,unused-ignore]
def adjacent(columns: int, bits: int) -> int:
    """How many of a block's columns a thread has side by side, of values of so many bits."""
    return min(columns, LOADED_BITS // bits)


@kernel
def in_lanes(products: tl.tensor, ADJACENT: tl.constexpr) -> tl.tensor:
    """[N, K] -> [N, K / ADJACENT]."""
    return tl.sum(tl.reshape(products, (products.shape[0], products.shape[1] // ADJACENT, ADJACENT)), axis=2)
