"""Ranks that share one GPU, each a process: what NCCL refuses, so that an engine of two ranks can be tested where there is one.

    test's process   rank 0   `sharing()`                        both reach memory of the other on the device, as ranks on
    child            rank 1   `python one_gpu_ranks.py`          two GPUs do, and take sums by the same kernel

All that ranks exchange goes through sums of that kernel in float32, so vocabularies are below 2^24, and graphs capture it. Kernels
that wait for the other process take turns with it on the device: milliseconds each.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from enginery.contracts.ops import PeerMemory
from enginery.contracts.parallel import LaunchPlan, ParallelFacts
from enginery.engine.ranks import process
from enginery.engine.ranks.local import LocalRanks
from enginery.worker import device
from enginery.worker.ranks import groups
from enginery.worker.ranks.gloo import Group, MeetingStore, Sending, Standing
from enginery.worker.ranks.peers import Peers
from enginery_ops_triton.spec import TRITON

COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
WIDTH = 1024  # of rows that are summed


class OneGpuGroup:
    """In place of `enginery.worker.ranks.nccl.DeviceGroup`."""

    def __init__(self, store: MeetingStore, name: str, *, rank: int, size: int, standing: Standing, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        assert TRITON.peer_ops is not None
        beside = Group(store, f"{name}, on the host", rank=rank, size=size, standing=standing)
        peers = Peers(store, beside, ParallelFacts(tensor_rank=rank, tensor_size=size), device)
        memory: PeerMemory = peers.memory(TRITON.peer_ops.num_bytes)
        self.peer_ops = TRITON.peer_ops.bind(memory)
        self._weight = torch.ones(WIDTH, device=device)
        standing.on_sever(self.peer_ops.end)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        count = x.numel()
        rows = torch.zeros(-(-count // WIDTH), WIDTH, device=self.device)
        rows.view(-1)[:count] = x.reshape(-1)
        for block in rows.split(1024):
            total = torch.zeros_like(block)
            assert self.peer_ops.takes_sum(block, total, self._weight)
            self.peer_ops.add_rms_norm(block, total, self._weight, 1.0)
            block.copy_(total)
        return rows.view(-1)[:count].view(x.shape).to(x.dtype)

    def own_part_sum(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum(x).chunk(self.size)[self.rank]

    def of_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.zeros(self.size, *x.shape, device=self.device)
        parts[self.rank] = x.clamp(-1e30, 1e30)  # an infinity would make the zeros of others NaN
        return list(self.sum(parts).to(x.dtype))

    def at_first(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = self.of_all(x)
        return parts if self.rank == 0 else []

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.of_all(x)[0])

    def close(self) -> None:
        """There is nothing of NCCL's to end."""

    def send(self, x: torch.Tensor, rank: int) -> Sending:
        raise NotImplementedError("stages need a device each")

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        raise NotImplementedError("stages need a device each")


def launch(plan: LaunchPlan) -> LocalRanks:
    return LocalRanks([COMMAND] * plan.num_others)


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Engines that are built within have all ranks on the first GPU. Give `Engine.build` the `launch` above."""
    with (
        patch.dict(os.environ, {OVERLAPPING: "1"}),
        patch.object(groups, "DeviceGroup", OneGpuGroup),
        patch.object(Peers, "are_in_reach", lambda self: True),
        patch.object(device, "devices_of_ranks", lambda asked, **_: ("cuda:0",) * asked.num_ranks),
    ):
        yield


if __name__ == "__main__":
    groups.DeviceGroup = OneGpuGroup  # type: ignore[assignment,misc]
    Peers.are_in_reach = lambda self: True  # type: ignore[method-assign]
    status = process.main()
    sys.stderr.flush()
    os._exit(status)
