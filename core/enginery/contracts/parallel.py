"""Where a rank stands among others, what it exchanges with them, what crosses from one stage to the next, and their processes.

N rows, C hidden size, V columns of the logits, R ranks of a lane's tensor group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from enginery.contracts.versions import ApiVersion

if TYPE_CHECKING:
    import torch

    from enginery.contracts.weights import Linear


class Cut(StrEnum):
    """Along which axis of a weight [rows, columns] the ranks of a tensor group have a part each."""

    NONE = "none"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, kw_only=True)
class ParallelFacts:
    """Where this process stands. Model plugins never see it: they are given `StageLayers`, `Collectives` and their rank's weights.

    tensor_rank: among the ranks that have a part of each layer. lane: among groups that have requests of their own. stage: among
    the pipeline's stages, each with layers of its own. layers_by_stage: how many decoder layers each has; empty: evenly divided,
    or, before weights are read, by what they cost. cuts_experts: a rank has some of the experts whole, not a part of each.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    lane: int = 0
    num_lanes: int = 1
    stage: int = 0
    num_stages: int = 1
    layers_by_stage: tuple[int, ...] = ()
    cuts_experts: bool = False

    def of_rank(self, rank: int) -> ParallelFacts:
        """Of another rank. They are counted from the first tensor rank of the last stage's first lane, which schedules and samples:
        tensor ranks, then lanes, then the stages before.
        """
        behind, tensor_rank = divmod(rank, self.tensor_size)
        behind, lane = divmod(behind, self.num_lanes)
        return dataclasses.replace(self, tensor_rank=tensor_rank, lane=lane, stage=self.num_stages - 1 - behind)

    def over_lanes(self) -> ParallelFacts:
        """The ranks of all lanes as those of one: each has a part of what is given the rows of all lanes."""
        rank = self.lane * self.tensor_size + self.tensor_rank
        return dataclasses.replace(self, tensor_rank=rank, tensor_size=self.num_lanes * self.tensor_size, lane=0, num_lanes=1)

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the head."""
        return self.stage == self.num_stages - 1

    @property
    def rank(self) -> int:
        """The number of this process among all."""
        return ((self.num_stages - 1 - self.stage) * self.num_lanes + self.lane) * self.tensor_size + self.tensor_rank

    @property
    def num_ranks(self) -> int:
        """How many processes run the model."""
        return self.tensor_size * self.num_lanes * self.num_stages

    def __str__(self) -> str:
        of_lane = f" of lane {self.lane}" if self.num_lanes > 1 else ""
        of_stage = f" of stage {self.stage}" if self.num_stages > 1 else ""
        return f"rank {self.rank}, tensor rank {self.tensor_rank}{of_lane}{of_stage}"


WHOLE: Final = ParallelFacts()  # one process has all of the model


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A tensor [T, width] that crosses from one pipeline stage to the next. dtype: its torch name; None for the model's."""

    name: str
    width: int
    dtype: str | None = None


StageTensors: TypeAlias = Mapping[str, "torch.Tensor"]  # by the names of `ModelFacts.boundary`


class Collectives(Protocol):
    """What a model exchanges with other ranks. Every method is the identity, or plain torch, where its group has one rank.

    All ranks of a group call the same methods in the same order: what they call may depend on the step alone.
    """

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, C], the sum over the lane's tensor ranks: bitwise equal on all of them."""

    def all_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C] -> the rows of all lanes, one lane after the other: what a feed-forward of all lanes is given."""

    def own_rows_sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The rows of all lanes -> [N, C]: the sum over the stage's ranks, of this lane's rows."""

    def add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, of_all_lanes: bool = False
    ) -> torch.Tensor:
        """`sum`, or `own_rows_sum` where the partial sums have the rows of all lanes, then `OpTable.add_rms_norm`.

        partial, residual: [N, C]; residual keeps the sum, and the norm of it is returned. One kernel where there is one.
        """

    def summed_early(self, linear: Linear) -> Linear:
        """A product of partial sums that may send rows to other ranks while it computes more of them.

        Nobody changes its result in place, and `add_rms_norm` is given it as it is, or some of its rows.
        """

    def gather_columns(self, partial: torch.Tensor) -> torch.Tensor:
        """[N, V / R] of each rank -> [N, V] without the columns that only pad: logits, for the rank that samples."""

    def best(self, partial: torch.Tensor) -> torch.Tensor:
        """[N, V / R] of each rank -> [N] int64 on all ranks: the column of the largest, of equal ones the first."""


class Death(NamedTuple):
    """A rank whose process has ended. how: for people. last_lines: of its stderr, where the engine's has not got them yet."""

    rank: int
    exit_code: int
    how: str
    last_lines: tuple[str, ...]


class RunningRanks(Protocol):
    """The processes of ranks 1 .. N, wherever they are."""

    def boot(self, rank: int, frame: bytes) -> None:
        """Give a rank its boot frame."""

    def name(self, rank: int) -> str:
        """What people find it by."""

    def poll(self) -> list[Death]:
        """Those that have ended since the last call."""

    def dump_stacks(self) -> None:
        """Have all write the stacks of their threads to stderr, even if they are stuck."""

    def end(self, *, grace_s: float) -> None:
        """Wait so long for them to end by themselves, then kill them."""


class Joining(Protocol):
    """How ranks of other hosts come to an engine: each is `engine rank --join ADDRESS --rank-key-file FILE`, under any launcher."""

    @property
    def address(self) -> str:
        """tcp://ADDRESS:PORT, of this host."""

    @property
    def key(self) -> str:
        """What the file has. Who knows it can run code as the engine."""

    def wait(self, look: Callable[[], None] = ...) -> RunningRanks:
        """Until all ranks have joined. look: called several times a second meanwhile; what it raises ends the start.

        Raises `EngineDied` with those that have not come in ten times `--step-deadline`.
        """


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What an executor is to start: ranks 1 .. num_others, each by `command`, with a pipe on stdin.

    A frame on stdin is its length in 8 bytes, big-endian, and its bytes. Stdin stays open as long as the rank is to live, and a
    rank ends when it does. start: runs these commands, one for each rank, as processes of this host. joining: for executors with
    `ExecutorSpec.listen`, which take it in place of `command` and `start`; None for others. devices: of each, never auto.
    """

    num_others: int
    command: tuple[str, ...]
    start: Callable[[Sequence[Sequence[str]]], RunningRanks]
    joining: Joining | None = None
    devices: tuple[str, ...] = ()


Launch = Callable[[LaunchPlan], RunningRanks]  # the thread that calls it lives as long as they do


@dataclass(frozen=True, kw_only=True)
class ExecutorSpec:
    """What places the processes of an engine's ranks: all but the first, which is the engine's own. Chosen with `--executor`.

    listen: for ranks of other hosts, which join over tcp: makes the address of this host, tcp://ADDRESS:PORT, from what `--listen`
    says, if it says anything; port 0 is any. None: all ranks are on this host.
    """

    name: str
    api: ApiVersion
    launch: Launch
    summary: str
    listen: Callable[[str | None], str] | None = None
