"""What a rank knows of the others while it is built, and what it knows where there are none."""

from __future__ import annotations

from typing import Protocol

from enginery.contracts.attention import KVGeometry
from enginery.contracts.model import Model
from enginery.contracts.ops import OpTable
from enginery.contracts.parallel import Collectives
from enginery.nn.parallel import SingleRank
from enginery.worker.choice import Choice
from enginery.worker.memory_plan import MemoryPlan


class Met(Protocol):
    """What a rank knows of the others."""

    def compare(self, choice: Choice, *, what: str) -> None:
        """Raise `ConfigError` where ranks have chosen otherwise. what: is compared, for the message."""
        ...

    def smallest(self, memory: MemoryPlan) -> MemoryPlan:
        """As many pages of each kind as every rank has room for."""
        ...

    def collectives(self, ops: OpTable, choice: Choice) -> Collectives:
        """What the model exchanges."""
        ...

    def joined(self, model: Model, choice: Choice, geometry: KVGeometry, comm: Collectives) -> Model:
        """The model of this rank, with what arrives from the stage before, and the logits of all ranks. comm: its collectives."""
        ...


class Alone:
    """Implements `Met` where there is nobody else."""

    def compare(self, choice: Choice, *, what: str) -> None:
        pass

    def smallest(self, memory: MemoryPlan) -> MemoryPlan:
        return memory

    def collectives(self, ops: OpTable, choice: Choice) -> Collectives:
        return SingleRank(ops)

    def joined(self, model: Model, choice: Choice, geometry: KVGeometry, comm: Collectives) -> Model:
        return model
