"""What decorates functions in Gluon, typed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental import gluon  # type: ignore[import-not-found,import-untyped,unused-ignore]


def kernel(function: Callable[..., Any]) -> Any:
    """`gluon.jit`."""
    return gluon.jit(function)


def constant(function: Callable[..., Any]) -> Any:
    """`gluon.constexpr_function`: what it returns is known when a kernel is compiled."""
    return gluon.constexpr_function(function)
