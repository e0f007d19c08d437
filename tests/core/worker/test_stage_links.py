"""What crosses between stages of lanes, here of threads: rows by the group of tensors, numbers of rows by the host's."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from enginery.contracts.parallel import Channel, ParallelFacts
from enginery.worker.ranks.gloo import Group, Sending, Standing, open_store
from enginery.worker.ranks.stages import StageLinks

MESH = ParallelFacts(num_lanes=2, num_stages=2)
BOUNDARY = (Channel(name="own", width=4), Channel(name="of all", width=2, dtype="float32"))
TOKENS = 3  # of each lane


@dataclass
class OnDevice:
    """In place of `enginery.worker.ranks.nccl.DeviceGroup`: notes what crosses by it."""

    group: Group
    crossed: list[tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=list)

    def send(self, x: torch.Tensor, rank: int) -> Sending:
        self.crossed.append((x.dtype, tuple(x.shape)))
        return self.group.send(x, rank)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        self.crossed.append((dtype, tuple(shape)))
        return self.group.receive(shape, dtype, rank)


def test_numbers_of_rows_go_from_host_to_host(tmp_path: Path) -> None:
    """NCCL takes tensors of GPUs alone."""

    def made(rank: int) -> dict[str, torch.Tensor]:
        own = torch.full((TOKENS, 4), rank, dtype=torch.bfloat16)
        return {"own": own, "of all": torch.full((MESH.num_lanes * TOKENS, 2), rank / 2)}

    def run(rank: int) -> tuple[Any, Any, Any]:
        store, size = open_store(str(tmp_path / "meeting"), MESH.num_ranks), MESH.num_ranks
        host, stages = (Group(store, name, rank=rank, size=size, standing=Standing()) for name in ("all", "stages"))
        device, parallel = OnDevice(stages), MESH.of_rank(rank)
        links = StageLinks(device, parallel, BOUNDARY, torch.bfloat16, host=host)  # type: ignore[arg-type]
        if parallel.is_last_stage:
            return links.arrive(TOKENS), device.crossed, links
        links.pass_on(made(rank), TOKENS)
        return None, device.crossed, links  # which hold what is on its way

    with ThreadPoolExecutor(MESH.num_ranks) as threads:
        found = [each.result(50) for each in [threads.submit(run, rank) for rank in range(MESH.num_ranks)]]
    for rank, (arrived, crossed, _) in enumerate(found):
        assert crossed == [(torch.bfloat16, (TOKENS, 4)), (torch.float32, (2 * TOKENS, 2))]
        if MESH.of_rank(rank).is_last_stage:
            torch.testing.assert_close(arrived, made(rank + MESH.num_lanes), rtol=0, atol=0)
