"""As `launch`, for kernels in Gluon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental import gluon  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found,import-untyped,unused-ignore]

all_threads: Any = (
    gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
)  # of a program wait for each other; named anew in 3.7


def kernel(function: Callable[..., Any]) -> Any:
    """`gluon.jit`, typed."""
    return gluon.jit(function)


def kernel_of_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """As `launch.kernel_of_any`."""
    decorate: Callable[[Callable[..., Any]], Any] = gluon.jit(do_not_specialize=list(numbers))
    return decorate


def constant(function: Callable[..., Any]) -> Any:
    """`gluon.constexpr_function`, typed: what it returns is known when a kernel is compiled."""
    return gluon.constexpr_function(function)
