"""Runs a module written in Gluon in Triton's interpreter, which cannot run Gluon: with `tl` in place of `gl`.

Layouts say where values are and not what they are, so all of them are one here, and conversions give what they are given. A copy to
shared memory is there when its group has been waited for, and what it replaces is there until then. That threads wait for each
other is not shown.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
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
    """Memory that a program's threads share. Before anything is copied to it, it is not a number."""

    def __init__(self, element: tl.dtype, shape: list[int], _: Anywhere) -> None:
        self.values: Any = np.full([as_number(each) for each in shape], np.nan, dtype=np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def part(self, key: Any) -> Shared:
        found = object.__new__(Shared)
        found.values = self.values[key]
        return found

    def index(self, place: Any) -> Shared:
        return self.part(as_number(place))

    def slice(self, first: Any, length: Any, dim: int = 0) -> Shared:
        return self.part((*[slice(None)] * dim, slice(as_number(first), as_number(first) + as_number(length))))

    def reshape(self, shape: list[int]) -> Shared:
        found = object.__new__(Shared)
        found.values = self.values.reshape([as_number(each) for each in shape])
        return found

    def store(self, value: tl.tensor) -> None:
        self.values[...] = value.to(tl.float32).handle.data

    def load(self, _: Anywhere) -> tl.tensor:
        return as_float32(self.values)


class Copies:
    """`async_copy`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []
        self.groups: list[list[tuple[Any, Any]]] = []

    def async_copy_global_to_shared(self, into: Shared, pointer: tl.tensor, mask: tl.tensor, eviction_policy: str = "") -> None:
        self.asked.append((into.values, tl.load(pointer, mask=mask, other=0.0).to(tl.float32).handle.data.copy()))

    def commit_group(self) -> None:
        self.groups.append(self.asked)
        self.asked = []

    def wait_group(self, left: Any) -> None:
        while len(self.groups) > as_number(left):
            for into, values in self.groups.pop(0):
                into[...] = values


def as_number(value: Any) -> int:
    """Of a constant, or of a scalar that a kernel computed."""
    return int(value.handle.data.item() if isinstance(value, tl.tensor) else getattr(value, "value", value))


def as_float32(values: Any) -> tl.tensor:
    return tl.tensor(TensorHandle(values.copy(), tl.float32), tl.block_type(tl.float32, list(values.shape)))


def multiplied(a: tl.tensor, b: tl.tensor, acc: tl.tensor) -> tl.tensor:
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)


def together() -> None:
    """Programs run one after the other, and all of a program's threads together."""


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
    usual = {"mma_v2": multiplied, "async_copy": Copies(), "all_threads": together}
    for name, value in {"gl": Language(num_warps), **usual, **replaced}.items():
        patch.setattr(module, name, value, raising=name not in usual)  # which not every module uses
    return module
