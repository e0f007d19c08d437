"""Rounding, products and bounds of loops that Triton's interpreter takes too: it cuts bfloat16 off and cannot multiply it (3.6)."""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel

INTERPRETED = tl.constexpr(not isinstance(tl.max, triton.JITFunction))  # decided for the process when triton is imported

if INTERPRETED.value:

    def bound(number: Any) -> int:
        """Of a loop: the interpreter has arrays of one element for scalars, and Python's range, from numpy 2.4 on, takes none."""
        return number if isinstance(number, int) else int(number.handle.data.item())

else:

    @kernel
    def bound(number: tl.tensor) -> tl.tensor:
        """Of a loop: itself."""
        return number


@kernel
def round_to(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """float32 to a shorter type, to the nearest, ties to even."""
    if INTERPRETED and DTYPE.is_bf16():
        bits = values.to(tl.int32, bitcast=True)
        values = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return values.to(DTYPE)


@kernel
def narrow_to(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """To the type of the KV memory: what a float8 (e4m3fn) cannot hold becomes its largest number, 448."""
    if DTYPE.is_fp8():
        return tl.minimum(tl.maximum(values.to(tl.float32), -448.0), 448.0).to(DTYPE)
    return values.to(DTYPE)


@kernel
def add_product(acc: tl.tensor, a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """acc + a b, in float32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)
