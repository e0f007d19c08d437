"""As `launch`, for kernels in Gluon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental import gluon  # type: ignore[import-not-found,import-untyped,unused-ignore]


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
