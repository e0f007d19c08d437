"""The compiled part, and why it is absent where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from enginery.api import HostCalls


class Kernels(Protocol):
    """The module `_kernels`, see native/module.cpp. isa: the instruction set that it begins with; supported: all
    that this CPU has."""

    isa: str
    supported: Sequence[str]
    max_dim: int

    def attend(self, *numbers: float) -> None: ...

    def use(self, isa: str) -> None: ...

    def record_calls(self, calls: HostCalls | None) -> None: ...


kernels: Kernels | None = None
why_absent = ""
try:
    from enginery_attn_cpu import _kernels  # type: ignore[attr-defined]

    kernels = cast(Kernels, _kernels)
except ImportError as error:
    why_absent = str(error)
