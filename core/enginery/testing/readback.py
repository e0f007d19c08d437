"""Notices that values are read from the device: on CUDA by its synchronisation, on a CPU by the operations that would cause one."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from enginery.testing.rules import BrokenRule
from enginery.worker.paths.host_capture import OperatorMode

# Methods of a tensor, and operations, whose results are values on the host or have a shape that depends on values.
_METHODS: Final = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
_OPERATIONS: Final = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}


@contextmanager
def no_reads(device: torch.device) -> Iterator[None]:
    """Raises `BrokenRule` where a value is read, of a tensor on the host too: on a CPU they look alike."""
    if device.type != "cuda":
        with _Methods(), _Operations():  # type: ignore[no-untyped-call]
            yield
        return
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Methods(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = func.__name__
        waits = name == "to" and "cpu" in [value for value in args if isinstance(value, str)]
        if name in _METHODS or (waits and not (kwargs or {}).get("non_blocking")):
            raise _seen(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


class _Operations(OperatorMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and _has_mask(args[1])
        if name in _OPERATIONS or by_mask:
            raise _seen(f"torch.{name}" + (" with a mask" if by_mask else ""))
        return func(*args, **(kwargs or {}))


def _has_mask(indices: object) -> bool:
    """Whether one of the indices of `aten.index` is a mask."""
    return isinstance(indices, list | tuple) and any(index is not None and index.dtype == torch.bool for index in indices)


def _seen(what: str) -> BrokenRule:
    """With the line that did it: the last that is neither torch's nor this file's."""
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename and frame.filename != __file__]
    return BrokenRule(f"{what} is called in {frames[-1].filename}:{frames[-1].lineno}")
