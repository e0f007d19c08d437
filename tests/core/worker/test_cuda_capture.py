"""What CUDA graphs are captured amid."""

from __future__ import annotations

import gc
from unittest.mock import MagicMock

import pytest
import torch

from enginery.attention.socket import LayerSocket
from enginery.worker.paths.cuda_capture import CudaCapture
from enginery.worker.paths.piecewise_capture import CudaPiecewiseCapture

DEVICE_CALLS = ("CUDAGraph", "Stream", "current_stream", "empty_cache", "graph", "graph_pool_handle", "stream", "synchronize")


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> CudaCapture:
    """Without a device, of which everything is imitated."""
    for name in DEVICE_CALLS:
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    return CudaCapture(torch.device("cpu"))


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("piecewise", [True, False])
def test_no_garbage_is_collected_amid_a_capture(capture: CudaCapture, *, piecewise: bool, collects: bool) -> None:
    """An engine that was closed leaves graphs in cycles, which a collection would destroy: the capture would fail."""
    seen = list[bool]()

    def run() -> None:
        seen.append(gc.isenabled())
        if len(seen) == 2 and collects:
            raise ValueError

    (gc.enable if collects else gc.disable)()
    try:
        if piecewise:
            CudaPiecewiseCapture(capture)(run, LayerSocket(None))
        else:
            capture(run)
    except ValueError:
        assert collects
    finally:
        was = gc.isenabled()
        gc.enable()
    assert seen[1] is False
    assert was is collects, "as it was before"


@pytest.mark.gpu
def test_a_graph_in_a_cycle_does_not_end_a_capture() -> None:
    def leave_garbage() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.zeros(1, device="cuda")
        cycle: list[object] = [graph]
        cycle.append(cycle)

    threshold, made = gc.get_threshold(), list[list[object]]()

    def run() -> None:
        torch.zeros(1, device="cuda")
        made.extend([made] for _ in range(2000))  # enough objects for a collection

    capture = CudaCapture(torch.device("cuda"))
    run()
    leave_garbage()
    gc.set_threshold(1000, 1, 1)
    try:
        capture(run)
    finally:
        gc.set_threshold(*threshold)
