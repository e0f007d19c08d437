"""A plan is a value: what a backend computed on the host for one batch, and which batch that was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginery.errors import StalePlan

if TYPE_CHECKING:
    from enginery.contracts.batch import ForwardBatch, Phase


@dataclass(frozen=True, kw_only=True)
class PlanKey:
    """Which batch a plan covers.

    backend: the id of the backend instance that made it. num_requests, num_tokens: as padded. epoch: counts the times the backend's
    buffers were rebuilt; plans of an earlier epoch point at memory that is gone.
    """

    backend: str
    phase: Phase
    num_requests: int
    num_tokens: int
    epoch: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardPlan:
    """The parent of every backend's plan. Immutable: two batches may be planned before either runs."""

    key: PlanKey

    def check_covers(self, batch: ForwardBatch, *, backend: str, epoch: int = 0) -> None:
        """Raise `StalePlan` unless this plan was made by `backend`, in `epoch`, for a batch of this shape and phase."""
        wanted = PlanKey(
            backend=backend, phase=batch.phase, num_requests=batch.num_requests, num_tokens=batch.num_tokens, epoch=epoch
        )
        if self.key != wanted:
            raise StalePlan(
                f"the batch's plan was made for {self.key}, but the batch to run is {wanted}; plan after padding and before "
                "attend, with the backend that runs"
            )
