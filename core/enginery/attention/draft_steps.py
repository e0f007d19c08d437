"""Several decoding steps of a drafter, planned before the first of them runs."""

from __future__ import annotations

from collections.abc import Sequence

from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import ForwardBatch


def plan_steps(relay: BackendRelay, batches: Sequence[ForwardBatch], *, capture: bool = False) -> list[ForwardBatch]:
    """The batches of the steps, each with its own plan: all at once by a backend that can, else one by one.

    Where lengths are true on the device alone (`kv_lens`), a backend that cannot plans the first step, and there is no other.
    """
    plans = relay.make_step_plans(batches, capture=capture)
    return [batch.planned(plan) for batch, plan in zip(batches, plans, strict=False)]
