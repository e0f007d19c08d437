"""The devices of `cuda_on_host` in the place of CUDA's: `simulated` replaces functions of torch for the whole process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from cuda_on_host import CLASSES, COUNT, DEVICES, LENT, Device, Graph, OnDevice, at_address, here, may_wait, quietly

from enginery.worker import warm_up

_FREE_BYTES: Final = 1 << 30
_MADE: Final = ("empty", "zeros", "ones", "full", "tensor", "arange", "as_tensor", "rand", "randn", "empty_like", "zeros_like")


class Event:
    """In place of `torch.cuda.Event`."""

    def __init__(self, **named: object) -> None:
        self._mark: tuple[Device, int] | None = None

    def record(self, stream: object = None) -> None:
        may_wait("an event")
        device = DEVICES[here.index]
        self._mark = device, device.num_sent

    def synchronize(self) -> None:
        assert self._mark is not None, "it is recorded"
        self._mark[0].wait(self._mark[1])

    def query(self) -> bool:
        self.synchronize()
        return True


class Stream:
    """In place of `torch.cuda.Stream`: there is one order of things."""

    def __init__(self, device: object = None) -> None:
        self.device = device

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None:
        DEVICES[here.index].wait()

    def record_event(self) -> Event:
        event = Event()
        event.record()
        return event


class _Runtime:
    def cudaHostRegister(self, *given: int) -> int:  # CUDA's names
        return 0

    def cudaHostUnregister(self, *given: int) -> int:
        return 0


@contextlib.contextmanager
def _graph(graph: Graph, **named: object) -> Iterator[None]:
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


@contextlib.contextmanager
def _on(device: torch.device | int) -> Iterator[None]:
    before, here.index = here.index, device if isinstance(device, int) else device.index or 0
    try:
        yield
    finally:
        here.index = before


def _set_device(device: torch.device) -> None:
    here.index = device.index


def _synchronize(device: object = None) -> None:
    may_wait("synchronize")
    DEVICES[here.index if device is None else torch.device(device).index or 0].wait()  # type: ignore[arg-type]


def _making(func: Callable[..., Any]) -> Callable[..., Any]:
    """With `device`, a tensor there."""

    @functools.wraps(func)
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **({} if device is None else {"device": device}), **kwargs)
        own = CLASSES[here.index if (index := torch.device(device).index) is None else index]
        facts = getattr(args[0], "__cuda_array_interface__", None) if args else None
        if facts is not None:  # memory that a graph has
            dtype = {"|u1": torch.uint8, "<i2": torch.int16, "<i4": torch.int32}[facts["typestr"]]
            size = dtype.itemsize
            strides, address = [stride // size for stride in facts["strides"]], facts["data"][0]
            reach = size * (1 + sum((count - 1) * stride for count, stride in zip(facts["shape"], strides, strict=True)))
            LENT.add(address)
            with quietly():
                like = torch.empty_strided(facts["shape"], strides, dtype=dtype, device="meta")
                return at_address(address, reach, like).as_subclass(own)
        with quietly():
            values = func(*args, **kwargs).as_subclass(own)
        if here.capturing is not None:
            here.capturing.add(func, args, kwargs, [values])
        return values

    return made


def _moving(func: Callable[..., Any]) -> Callable[..., Any]:
    """`to` and the like of tensors of the host."""

    @functools.wraps(func)
    def moved(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked = [torch.device(each) for each in (*args, kwargs.get("device")) if isinstance(each, str | torch.device)]
        if isinstance(values, OnDevice) or not asked or asked[0].type != "cuda":
            return func(values, *args, **kwargs)
        may_wait("a copy from the host")
        args = tuple(each for each in args if not isinstance(each, str | torch.device))
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
        found = func(values, *args, **kwargs) if args or kwargs else values
        return found.clone().as_subclass(CLASSES[here.index if asked[0].index is None else asked[0].index])

    return moved


@contextlib.contextmanager
def simulated() -> Iterator[list[Device]]:
    """So many devices, which are new."""
    DEVICES[:] = [Device() for _ in range(COUNT)]
    LENT.clear()
    with pytest.MonkeyPatch.context() as patch:
        for name in _MADE:
            patch.setattr(torch, name, _making(vars(torch)[name]))
        patch.setattr(torch.Tensor, "to", _moving(torch.Tensor.to))
        patch.setattr(torch.Tensor, "pin_memory", lambda values: values.clone())
        generator = torch.Generator
        patch.setattr(torch, "Generator", lambda device=None: generator())
        for name, stands_in in {
            "is_available": lambda: True,
            "device_count": lambda: COUNT,
            "mem_get_info": lambda index=0: (_FREE_BYTES, _FREE_BYTES),
            "get_device_name": lambda index=0: "simulated",
            "get_device_capability": lambda index=0: (9, 0),
            "set_device": _set_device,
            "device": _on,
            "synchronize": _synchronize,
            "empty_cache": lambda: None,
            "cudart": _Runtime,
            "check_error": lambda code: None,
            "Event": Event,
            "Stream": Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": lambda device=None: Stream(device),
            "is_current_stream_capturing": lambda: here.capturing is not None,
            "CUDAGraph": Graph,
            "graph": _graph,
            "graph_pool_handle": lambda: (0, 0),
        }.items():
            patch.setattr(torch.cuda, name, stands_in)
        patch.setattr(warm_up, "LENGTHS", warm_up.LENGTHS[:1])  # no kernel differs by them here; steps of every kind are run
        patch.setattr(warm_up, "COUNTS", warm_up.COUNTS[:1])
        yield DEVICES
