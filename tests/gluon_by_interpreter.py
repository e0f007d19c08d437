"""Runs a module written in Gluon in Triton's interpreter, which cannot run Gluon: with `tl` in place of `gl`.

Layouts say where values are and not what they are, so all of them are one here, and conversions give what they are given. Nothing
is asynchronous: a copy to shared memory is there at once. So this shows what kernels compute, and not that they wait for it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.runtime.interpreter import TensorHandle


class Anywhere:
    """Every layout."""

    def __init__(self, *_: object, **__: object) -> None:
        self.parent = self


class Shared:
    """A matrix in shared memory. Before anything is copied to it, it is not a number."""

    def __init__(self, element: tl.dtype, shape: list[int], _: Anywhere) -> None:
        self.values: Any = np.full(shape, np.nan, dtype=np.float32)

    def slice(self, first: Any, length: Any) -> SimpleNamespace:
        first, length = (int(getattr(each, "value", each)) for each in (first, length))
        return SimpleNamespace(load=lambda _: as_float32(self.values[first : first + length]))


def as_float32(values: Any) -> tl.tensor:
    return tl.tensor(TensorHandle(values.copy(), tl.float32), tl.block_type(tl.float32, list(values.shape)))


def copied(into: Shared, pointer: tl.tensor, mask: tl.tensor) -> None:
    into.values = tl.load(pointer, mask=mask, other=0.0).to(tl.float32).handle.data


def multiplied(a: tl.tensor, b: tl.tensor, acc: tl.tensor) -> tl.tensor:
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)


class Language:
    """`gl`: what `tl` has under the same name, as the interpreter puts it there for each launch, and what it has not."""

    SliceLayout = DotOperandLayout = SwizzledSharedLayout = Anywhere
    allocate_shared_memory = Shared

    def __init__(self, num_warps: int) -> None:
        self.num_warps = lambda: num_warps

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    def arange(self, start: int, end: int, layout: Anywhere) -> tl.tensor:
        return tl.arange(start, end)

    def zeros(self, shape: list[int], dtype: tl.dtype, layout: Anywhere) -> tl.tensor:
        return tl.zeros(shape, dtype)

    def convert_layout(self, value: tl.tensor, layout: Anywhere, assert_trivial: bool = False) -> tl.tensor:
        return value

    def thread_barrier(self) -> None:
        """Programs run one after the other, and all of a program's threads together."""


def interpreted(patch: pytest.MonkeyPatch, path: Path, *, num_warps: int, **replaced: object) -> ModuleType:
    """A second copy of the module, for as long as the patch lasts. replaced: its other names."""
    patch.setenv("TRITON_INTERPRET", "1")  # what `jit` makes of a function follows from it then
    patch.setattr(gluon, "jit", triton.jit)
    patch.setattr(gluon, "constexpr_function", lambda function: lambda *_, **__: Anywhere())
    patch.setattr(tl.block_type, "layout", Anywhere(), raising=False)
    spec = importlib.util.spec_from_file_location(f"{path.stem}_interpreted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    nothing = SimpleNamespace(async_copy_global_to_shared=copied, commit_group=lambda: None, wait_group=lambda _: None)
    for name, value in {"gl": Language(num_warps), "mma_v2": multiplied, "async_copy": nothing, **replaced}.items():
        patch.setattr(module, name, value, raising=name not in ("mma_v2", "async_copy"))  # which not every module uses
    return module
