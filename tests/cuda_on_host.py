"""A CUDA device that is simulated in host memory, so that what an engine does on one alone is run where there is none.

    tensor     of a device: its values are on the host, and an operation may have no other tensor than those of its device
    copy       to the host: what was there is lost at once, and what was copied comes when the device was waited for (`Event`)
    graph      the calls of torch that were made while it was captured, done again in the same memory; of what was there before,
               it keeps nothing alive

What a device refuses during a capture raises here too: waiting for it, copies from and to the host. Kernels of Triton and CUDA do
not run. `cuda_simulated` puts it in torch's place.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

COUNT: Final = 8  # devices
_WAIT: Final = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "equal")
_UNLIKE_OTHERS: Final = {*_WAIT, "copy_", "to", "cpu", "numpy", "__array__", "pin_memory", "cuda"}
_ALIKE: Final = ("contiguous", "reshape", "to", "float", "flatten", "expand_as", "type_as", "long", "int")  # at times no copy
_OF_TENSOR: Final = {
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.storage_offset),
    *(torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__len__, torch.Tensor.is_floating_point),
    *(torch.Tensor.is_contiguous, torch.Tensor.element_size, torch.Tensor.__hash__, torch.Tensor.is_inference),
}
_HOLDERS: Final = (tuple, list, dict)
_NO_TENSORS: Final = {type(None), bool, int, float, str, slice, torch.dtype, torch.device, torch.layout, torch.memory_format}
quietly: Final = torch._C.DisableTorchFunctionSubclass  # operations inside are the host's own


class _Here(threading.local):
    """Of a thread."""

    index = 0
    capturing: Graph | None = None


here: Final = _Here()


class Device:
    """Copies to the host that have not come. waits: how often the host waited for it but at events."""

    def __init__(self) -> None:
        self._coming: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.num_sent = self.num_come = self.waits = 0

    def send(self, values: torch.Tensor, out: torch.Tensor) -> None:
        self._coming.append((out, values.clone()))
        out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).min if out.dtype != torch.bool else 1)
        self.num_sent += 1

    def wait(self, until: int | None = None) -> None:
        with quietly(), torch.inference_mode():
            while self.num_come < (self.num_sent if until is None else until):
                out, values = self._coming.popleft()
                out.copy_(values)
                self.num_come += 1


DEVICES: list[Device] = []


class OnDevice(torch.Tensor):
    """A tensor of one of the devices; each has a class of its own."""

    index = -1
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: torch.device("cuda", self.index))  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if func in _OF_TENSOR or name == "__get__":
            with quietly():
                found = func(*args, **kwargs)
                return found.as_subclass(type(args[0])) if isinstance(found, torch.Tensor) else found
        if name in _UNLIKE_OTHERS:
            if name == "copy_":
                return _copied(*args, **kwargs)
            if name in ("to", "cpu"):
                return _moved(func, name, *args, **kwargs)
            if name not in _WAIT:
                raise TypeError(f"{name} of a tensor of cuda:{cls.index}")
            may_wait(name)
            DEVICES[_of(args, {}).index].waits += 1
        if kwargs and (asked := kwargs.get("device")) is not None:
            assert torch.device(asked).type == "cuda", "made on the host like one of a device"
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        return launched(func, *args, **kwargs)


CLASSES: Final = [type(f"OnDevice{index}", (OnDevice,), {"index": index}) for index in range(COUNT)]


def _tensors(values: Any) -> list[torch.Tensor]:
    """Those among arguments: `tree_leaves` takes ten times as long, and each call of torch asks."""
    found: list[torch.Tensor] = []
    for each in values.values() if isinstance(values, dict) else values:
        if (kind := type(each)) in _NO_TENSORS:
            continue
        if kind in _HOLDERS or issubclass(kind, _HOLDERS):
            found += _tensors(each)
        elif issubclass(kind, torch.Tensor):
            found.append(each)
    return found


def _of(args: Any, kwargs: Any) -> type[OnDevice]:
    """The class of the tensors of a device. Raises AssertionError where there are others beside them."""
    found: type[OnDevice] | None = None
    for each in _tensors(args) + _tensors(kwargs) if kwargs else _tensors(args):
        kind = type(each)
        if kind is found:
            continue
        if issubclass(kind, OnDevice):
            assert found is None, f"tensors of cuda:{found.index} and cuda:{kind.index}"
            found = kind
        else:
            assert each.dim() == 0, f"a tensor {list(each.shape)} of the host beside those of a device"
    assert found is not None, "there is a tensor of a device"
    return found


def launched(func: Callable[..., Any], *args: Any, writes: bool = False, **kwargs: Any) -> Any:
    """What a function gives of tensors of a device, to which it belongs too; done again by the graph that is captured.

    writes: it does more than to give it.
    """
    own = _of(args, kwargs)
    with quietly():
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            result = result if isinstance(result, OnDevice) else result.as_subclass(own)
            leaves = [result]
        else:
            leaves, spec = tree_flatten(result)
            leaves = [
                each.as_subclass(own) if isinstance(each, torch.Tensor) and not isinstance(each, OnDevice) else each
                for each in leaves
            ]
            result = tree_unflatten(leaves, spec)
    if here.capturing is not None:
        here.capturing.add(func, args, kwargs, leaves, writes=writes)
    return result


def may_wait(what: str) -> None:
    if here.capturing is not None:
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


def _copied(out: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(out, OnDevice) and isinstance(values, OnDevice):
        return launched(torch.Tensor.copy_, out, values)
    may_wait("a copy from or to the host")
    with quietly():
        if isinstance(out, OnDevice):
            return out.copy_(values)
        assert isinstance(values, OnDevice)
        device = DEVICES[values.index]
        device.send(values.as_subclass(torch.Tensor), out)
    if not non_blocking:
        device.waits += 1
        device.wait()
    return out


def _moved(func: Any, name: str, values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`to` and `cpu` of a tensor of a device."""
    asked = [torch.device(each) for each in (*args, kwargs.get("device")) if isinstance(each, str | torch.device)]
    if name == "cpu":
        asked = [torch.device("cpu")]
    if not asked or asked[0].type == "cuda":
        args = tuple(each for each in args if not isinstance(each, str | torch.device))
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
        return launched(func, values, *args, **kwargs) if args or kwargs else values
    may_wait(name)
    dtype = next((each for each in (*args, kwargs.get("dtype")) if isinstance(each, torch.dtype)), values.dtype)
    with quietly():
        converted = values.as_subclass(torch.Tensor).to(dtype)
        out = torch.empty_like(converted)
        DEVICES[values.index].send(converted, out)  # type: ignore[attr-defined]
        if not kwargs.get("non_blocking"):
            DEVICES[values.index].waits += 1
            DEVICES[values.index].wait()
    return out


class _Call(NamedTuple):
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[Any]


class Graph:
    """In place of `torch.cuda.CUDAGraph`. What is computed while it is captured is lost: no kernel runs then."""

    def __init__(self, *args: object) -> None:
        self._calls: list[_Call] = []
        self._outer: list[StorageWeakRef] = []
        self._own: dict[int, torch.UntypedStorage] = {}  # by address
        self.is_over = False

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert here.capturing is None, "another graph is captured"
        here.capturing = self
        CAPTURING.add(here.index)

    def capture_end(self) -> None:
        assert here.capturing is self, "it is captured"
        here.capturing = None
        CAPTURING.discard(here.index)
        with quietly(), torch.inference_mode():
            for storage in self._own.values():
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x7F)
            self._calls = [call._replace(args=self._lent(call.args), kwargs=self._lent(call.kwargs)) for call in self._calls]

    def add(self, func: Callable[..., Any], args: Any, kwargs: Any, results: list[Any], *, writes: bool = False) -> None:
        """A call. writes: whatever its name is."""
        with quietly():
            places = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
            name, made = func.__name__, [each for each in results if isinstance(each, torch.Tensor)]
            fresh = [each for each in made if each.untyped_storage().data_ptr() not in places]
            writes |= (name.endswith("_") and not name.startswith("__")) or name == "__setitem__" or name.startswith("__i")
            if not (fresh or writes or "out" in kwargs):
                return  # another view of what there is
            self._own |= {each.untyped_storage().data_ptr(): each.untyped_storage() for each in fresh}
        self._calls.append(_Call(func, args, kwargs, fresh and results))

    def _lent(self, values: Any) -> Any:
        if (kind := type(values)) in _NO_TENSORS:
            return values
        if kind is dict:
            return {key: self._lent(each) for key, each in values.items()}
        if kind in (tuple, list):
            return kind([self._lent(each) for each in values])
        return self._address(values) if issubclass(kind, torch.Tensor) else values

    def _address(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which is not kept: what the graph has not made itself, somebody else has to hold."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._own or not storage.nbytes():
            return tensor
        if isinstance(tensor, OnDevice) and storage.data_ptr() not in LENT:
            self._outer.append(StorageWeakRef(storage))
        return at_address(storage.data_ptr(), storage.nbytes(), tensor).as_subclass(type(tensor))

    def reset(self) -> None:
        self._calls, self._own, self.is_over = [], {}, True

    def replay(self) -> None:
        assert here.capturing is None, "a graph is captured"
        assert not self.is_over
        for each in self._outer:
            assert not each.expired(), "the graph reads or writes memory that nobody holds any more"
        with quietly(), torch.inference_mode():
            for func, args, kwargs, results in self._calls:
                again = func(*args, **kwargs)
                leaves = [again] if isinstance(again, torch.Tensor) else tree_leaves(again)
                for there, value in zip(results, leaves, strict=bool(results)):
                    if isinstance(there, torch.Tensor) and there is not value:
                        there.copy_(value)


CAPTURING: Final = set[int]()  # devices by which a graph is captured now
LENT: set[int] = set()  # addresses of memory that graphs hold


def at_address(address: int, num_bytes: int, like: torch.Tensor) -> torch.Tensor:
    found = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(found, like.storage_offset(), like.size(), like.stride())
