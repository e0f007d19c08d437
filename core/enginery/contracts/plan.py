"""A plan is a value: what a backend computed on the host for one batch, and which batch that was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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


PlanT = TypeVar("PlanT", bound=ForwardPlan)


def covering_plan(batch: ForwardBatch, kind: type[PlanT], *, backend: str, epoch: int = 0) -> PlanT:
    """The batch's plan, if it is of this kind and was made by `backend` in `epoch` for a batch of this shape and phase.

    Raises `StalePlan` otherwise. Every `attend` begins with it.
    """
    wanted = PlanKey(backend=backend, phase=batch.phase, num_requests=batch.num_requests, num_tokens=batch.num_tokens, epoch=epoch)
    plan = batch.plan
    if plan is None:
        raise StalePlan(f"the batch has no plan, and {wanted} is to run; plan after padding and before attend")
    if plan.key != wanted or not isinstance(plan, kind):
        raise StalePlan(
            f"the batch's plan was made for {plan.key}, but {wanted} is to run; plan after padding and before attend, with the "
            "backend that runs"
        )
    return plan
