"""A capture of device work in pieces: a CUDA graph ends where a backend is called, and the next begins behind the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from enginery.attention.socket import LayerCall, LayerSocket
from enginery.worker.paths.captured_step import Replayable
from enginery.worker.paths.cuda_capture import CudaCapture, keeping_garbage


class GraphPieces(NamedTuple):
    """graphs: one more than calls, each of which comes before the graph of the next index."""

    graphs: Sequence[Replayable]
    calls: Sequence[LayerCall]


PiecewiseCapture = Callable[[Callable[[], None], LayerSocket], GraphPieces]


class CudaPiecewiseCapture:
    """Captures what a function does, a new graph after each call to a backend, into the memory of other graphs."""

    def __init__(self, whole: CudaCapture) -> None:
        self._whole = whole

    def __call__(self, run: Callable[[], None], socket: LayerSocket) -> GraphPieces:
        """`run` is called twice, as `CudaCapture` does, and neither time is a backend called."""
        whole, graphs, calls = self._whole, list[torch.cuda.CUDAGraph](), list[LayerCall]()

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            whole.graphs.add(graphs[-1])
            graphs[-1].capture_begin(whole.pool, capture_error_mode="thread_local")

        def end_piece(call: LayerCall) -> None:
            graphs[-1].capture_end()
            calls.append(call._replace(rows=tuple(map(lent, call.rows)), out=lent(call.out)))
            assert len({len(tensor) for tensor in (*call.rows, call.out)}) == 1, "a row for each token of the graph"
            begin()

        whole.stream.wait_stream(torch.cuda.current_stream(whole.device))
        with torch.cuda.stream(whole.stream), keeping_garbage():
            socket.on_capture = lambda call: call.out.zero_()
            try:
                run()
                torch.cuda.synchronize(whole.device)
                torch.cuda.empty_cache()  # as torch.cuda.graph does: nothing can be given back during a capture
                whole.meet()
                begin()
                socket.on_capture = end_piece
                run()
            finally:
                socket.on_capture = None
                if graphs:
                    graphs[-1].capture_end()
        whole.meet()
        return GraphPieces(graphs, calls)


def lent(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without keeping it: what runs later may use it again, as it did when it was captured."""
    size = tensor.element_size()
    lent = _Memory(tensor.data_ptr(), tuple(tensor.shape), tuple(size * stride for stride in tensor.stride()), size)
    alias = torch.as_tensor(lent, device=tensor.device).view(tensor.dtype)
    assert _memory_of(alias) == _memory_of(tensor), f"a graph piece would read {_memory_of(alias)}, not {_memory_of(tensor)}"
    return alias


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where its elements are and what they are: address, type, device, and the stride of each dimension that has several."""
    strides = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.numel(), strides


class _Memory:
    """CUDA's array interface, version 3, which has no bfloat16: integers of its size."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
        typestr = {1: "|u1", 2: "<i2", 4: "<i4"}[size]
        stated = {"data": (address, False), "shape": shape, "strides": strides, "typestr": typestr}
        self.__cuda_array_interface__: dict[str, Any] = {"version": 3, **stated}
