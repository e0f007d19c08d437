"""What crosses between stages of lanes, here of threads: rows by the group of tensors, numbers of rows by the host's. And around
graphs of a stage, which nothing crosses in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_simulated import simulated

from enginery.contracts.parallel import Channel, ParallelFacts
from enginery.errors import Unsupported
from enginery.worker.paths.captured_step import Replayable
from enginery.worker.paths.cuda_capture import CudaCapture
from enginery.worker.ranks.gloo import Group, Sending, Standing, open_store
from enginery.worker.ranks.stages import LinkedStage

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


class Nothing:
    """In place of a model."""

    forward = logits = None


def test_numbers_of_rows_go_from_host_to_host(tmp_path: Path) -> None:
    """NCCL takes tensors of GPUs alone."""

    def made(rank: int) -> dict[str, torch.Tensor]:
        own = torch.full((TOKENS, 4), rank, dtype=torch.bfloat16)
        return {"own": own, "of all": torch.full((MESH.num_lanes * TOKENS, 2), rank / 2)}

    def run(rank: int) -> tuple[Any, Any, Any]:
        store, size = open_store(str(tmp_path / "meeting"), MESH.num_ranks), MESH.num_ranks
        host, stages = (Group(store, name, rank=rank, size=size, standing=Standing()) for name in ("all", "stages"))
        device, parallel = OnDevice(stages), MESH.of_rank(rank)
        links = LinkedStage(Nothing(), device, parallel, BOUNDARY, torch.bfloat16, host=host)  # type: ignore[arg-type]
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


class Late:
    """In place of a device's group: 1, 2, 3 .. arrive, and what is sent is read late."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.num_arrived = 0
        self.sent: list[torch.Tensor] = []

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        self.num_arrived += 1
        return torch.full(tuple(shape), float(self.num_arrived), dtype=dtype, device=self.device)

    def send(self, x: torch.Tensor, rank: int) -> tuple[torch.Tensor, Late]:
        self.sent.append(x)
        return x, self

    def is_completed(self) -> bool:
        return False


@dataclass
class Rows:
    """In place of a batch."""

    num_tokens: int
    input_ids: torch.Tensor


class Adds:
    """In place of a model: adds to what arrives where that is, as models do. given: the largest that it was given, each time."""

    logits = None

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def forward(self, batch: Rows, arrived: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        assert arrived is not None
        self.given.append(arrived["residual"].amax())
        return {"delta": arrived["delta"] * 10, "residual": arrived["residual"].add_(100)}


def middle_stage() -> tuple[LinkedStage, Late, Adds]:
    boundary = (Channel(name="delta", width=2), Channel(name="residual", width=2, dtype="float32"))
    group, model = Late(), Adds()
    mesh = ParallelFacts(stage=1, num_stages=3)
    return LinkedStage(model, group, mesh, boundary, torch.bfloat16, host=None), group, model  # type: ignore[arg-type]


def a_step(stage: LinkedStage, size: int) -> Callable[[], None]:
    rows = Rows(size, torch.zeros(size, dtype=torch.int64, device=Late.device))

    def run() -> None:
        assert stage.forward(rows).shape == (size, 0)  # type: ignore[arg-type]

    return run


def test_a_replay_leaves_what_is_on_its_way_as_it_was() -> None:
    with simulated():
        stage, group, model = middle_stage()
        capture = stage.outside(CudaCapture(Late.device))
        graphs = {size: capture(a_step(stage, size)) for size in (4, 2)}
        assert (group.num_arrived, group.sent) == (0, []), "nothing crosses in a capture"
        assert [each.item() for each in model.given[::2]] == [0.0, 0.0], "what is not captured finds zeros"
        for size in (4, 2, 4):
            graphs[size].replay()
        found = [(len(each), each.dtype, set(each.flatten().tolist())) for each in group.sent]
    sizes, dtypes, values = zip(*found, strict=True)
    assert sizes == (4, 4, 2, 2, 4, 4)
    assert dtypes == (torch.bfloat16, torch.float32) * 3
    assert values == ({10.0}, {102.0}, {30.0}, {104.0}, {50.0}, {106.0})


def test_what_cannot_be_captured_crosses_when_it_runs() -> None:
    def refuse(run: Any) -> Replayable:
        run()
        raise Unsupported("no graph of it")

    with simulated():
        stage, group, _ = middle_stage()
        with pytest.raises(Unsupported):
            stage.outside(refuse)(a_step(stage, 2))
        a_step(stage, 2)()
        assert [each.flatten()[0].item() for each in group.sent] == [10.0, 102.0]
