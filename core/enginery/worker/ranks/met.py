"""What a rank knows of the others while it is built, and what it knows where there are none."""

from __future__ import annotations

from enginery.contracts.attention import KVGeometry
from enginery.contracts.model import Model
from enginery.contracts.ops import OpTable
from enginery.contracts.parallel import Collectives
from enginery.nn.parallel import SingleRank
from enginery.worker.choice import Choice
from enginery.worker.memory_plan import MemoryPlan


class Met:
    """What a rank knows of the others; as it is, that there are none."""

    def compare(self, choice: Choice, *, what: str) -> None:
        """Raise `ConfigError` where ranks have chosen otherwise. what: is compared, for the message."""

    def smallest(self, memory: MemoryPlan) -> MemoryPlan:
        """As many pages of each kind as every rank has room for."""
        return memory

    def collectives(self, ops: OpTable, choice: Choice) -> Collectives:
        """What the model exchanges."""
        return SingleRank(ops)

    def joined(self, model: Model, choice: Choice, geometry: KVGeometry, comm: Collectives) -> Model:
        """The model of this rank, with what arrives from the stage before, and the logits of all ranks. comm: its collectives."""
        return model
