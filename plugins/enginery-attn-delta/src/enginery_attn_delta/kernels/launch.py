"""What all kernels share: the decorator, rounding, gates, and programmatic dependent launch.

With dependent launch (CHAINED) a kernel starts while the one before it still runs, and lets its own successor start at once. Before
it waits it may read weights, and what was there before the step's first kernel: the plan, whose counters it may count up, and
states, which an earlier step wrote.
Each step begins with copies to the device, which wait for all kernels before them.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found,import-untyped,unused-ignore]

INTERPRETED = tl.constexpr(not isinstance(tl.max, triton.JITFunction))  # decided for the process when triton is imported


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit`, typed."""
    return triton.jit(function)


def kernel_of_rows(function: Callable[..., Any]) -> Any:
    """The same for one that is told of requests: of these parts of a plan every alignment has one variant."""
    places = ["reads", "writes", "first_rows", "stop_rows", "tiles", "arrived"]
    return triton.jit(function, do_not_specialize_on_alignment=[name for name in places if name in signature(function).parameters])


def next_power_of_2(count: int) -> int:
    """A block's size must be one."""
    return 1 << (count - 1).bit_length()


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
    """float32 to a shorter type, to the nearest, ties to even; the interpreter cuts bfloat16 off."""
    if INTERPRETED and DTYPE.is_bf16():
        bits = values.to(tl.int32, bitcast=True)
        values = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return values.to(DTYPE)


@kernel
def release_successor(CHAINED: tl.constexpr) -> None:
    """Lets the next kernel start."""
    if CHAINED:
        gdc_launch_dependents()


@kernel
def wait_for_predecessor(CHAINED: tl.constexpr) -> None:
    """What earlier kernels wrote may be read from here on, and what they read overwritten."""
    if CHAINED:
        gdc_wait()


@kernel
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), x itself above 20 as in torch."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@kernel
def silu(x: tl.tensor) -> tl.tensor:
    """x sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@kernel
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))
