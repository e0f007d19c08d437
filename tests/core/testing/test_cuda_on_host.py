"""The simulated device refuses, or shows, what breaks on a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_on_host import Device
from cuda_simulated import simulated


@pytest.fixture(autouse=True)
def devices() -> Iterator[list[Device]]:
    with simulated() as made, torch.inference_mode():
        yield made


def test_what_is_copied_to_the_host_is_there_once_it_was_waited_for(devices: list[Device]) -> None:
    values, event = torch.arange(3, device="cuda"), torch.cuda.Event()  # type: ignore[no-untyped-call]
    there = values.to("cpu", non_blocking=True)
    event.record()
    values.fill_(7)
    late = values.to("cpu", non_blocking=True)
    assert (there < 0).all()
    event.synchronize()
    assert there.tolist() == [0, 1, 2]
    assert (late < 0).all()
    assert devices[0].waits == 0
    assert values.tolist() == [7, 7, 7]
    assert devices[0].waits == 1


def test_tensors_of_the_host_and_of_other_devices_are_refused() -> None:
    here, there = torch.ones(2), torch.ones(2, device="cuda:1")
    assert (there.device, (there + 1).device, there.cpu().device) == (torch.device("cuda", 1),) * 2 + (torch.device("cpu"),)
    with pytest.raises(AssertionError, match=r"a tensor \[2\] of the host beside those of a device"):
        there + here
    with pytest.raises(AssertionError, match=r"tensors of cuda:0 and cuda:1"):
        torch.cat((here.to("cuda"), there))
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


@pytest.mark.parametrize("what", ["tolist", "cpu", "copy"])
def test_a_capture_waits_for_nothing(what: str) -> None:
    values = torch.ones(2, device="cuda")
    waiting = {"tolist": values.tolist, "cpu": values.cpu, "copy": lambda: values.copy_(torch.zeros(2))}[what]
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        waiting()


def test_a_graph_reads_and_writes_where_it_was_captured() -> None:
    values, kept, times = torch.zeros(3, 2, device="cuda"), torch.zeros(3, device="cuda"), 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        best = (values * times).max(dim=-1).values
        best[1:].add_(1)
        kept[:2].copy_(best.flip(0)[:2])
    assert best.isnan().all() or (best.abs() > 1e30).all(), "nothing is computed in a capture"
    times = 100  # what the host has later is not in the graph
    for base in (1.0, 5.0):
        values.copy_(base + torch.arange(6.0, device="cuda").view(3, 2))
        graph.replay()
        assert best.tolist() == [2 * (base + 1), 2 * (base + 3) + 1, 2 * (base + 5) + 1]
        assert kept.tolist() == [2 * (base + 5) + 1, 2 * (base + 3) + 1, 0]


def test_a_graph_keeps_no_memory_of_others() -> None:
    values, out, graph = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(values + 1)
    graph.replay()
    assert out.tolist() == [2, 2]
    values = values.clone()
    with pytest.raises(AssertionError, match="memory that nobody holds any more"):
        graph.replay()
