"""What all kernels share: the decorator, and programmatic dependent launch.

With dependent launch a kernel starts while the one before it still runs. Each of ours lets its successor start at once, does what
depends on weights alone, and then waits until its predecessor has finished and its writes are visible. All of them wait, so a
kernel may rely on everything that was launched before it, and not only on the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found,import-untyped,unused-ignore]


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit`, typed."""
    return triton.jit(function)


def kernel_of_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """A kernel of which one variant serves every value of these arguments; others have one for multiples of 16."""
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=list(numbers))
    return decorate


def kernel_at_any(*pointers: str) -> Callable[[Callable[..., Any]], Any]:
    """A kernel of which one variant serves every alignment of these tensors, of which it reads single values."""
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize_on_alignment=list(pointers))
    return decorate


def next_power_of_2(count: int) -> int:
    """A block's size must be one."""
    return 1 << (count - 1).bit_length()


def rounded_up(count: int, unit: int) -> int:
    """To a multiple of the unit."""
    return -(-count // unit) * unit


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
