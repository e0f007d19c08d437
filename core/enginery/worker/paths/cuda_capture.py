"""Captures of device work as CUDA graphs; on a CPU `host_capture` does the same without a device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from enginery.worker.paths.captured_step import Replayable


class CudaCapture:
    """Captures into one memory pool, which all graphs share because they run one after the other.

    On one stream, because cuBLAS keeps a workspace for each. meet: waits on the host for the ranks that graphs exchange something
    with; no exchange is on its way on any GPU while one of them captures.
    """

    def __init__(self, device: torch.device, meet: Callable[[], None] = lambda: None) -> None:
        self.device, self.meet = device, meet
        self.graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()  # all that there are
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], None]) -> Replayable:
        """`run` is called twice: the first time, not captured, kernels may compile and libraries make their plans."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            run()
        torch.cuda.synchronize(self.device)
        self.meet()
        self.graphs.add(graph := torch.cuda.CUDAGraph())
        with keeping_garbage(), torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            run()
        self.meet()
        return graph


@contextmanager
def keeping_garbage() -> Iterator[None]:
    """Whatever is captured meanwhile: where a graph or a kernel of before is destroyed, the capture fails (pytorch#161037)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
