"""When a batch needs a plan, and which plan is refused: the semantics of the marker, one test each."""

from __future__ import annotations

import dataclasses

import pytest
from core.attention.batches import Planner, make_batch

from enginery.attention.axes import slice_requests
from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import Phase
from enginery.contracts.plan import ForwardPlan, covering_plan
from enginery.errors import StalePlan


@pytest.fixture
def planner() -> Planner:
    return Planner()


@pytest.fixture
def relay(planner: Planner) -> BackendRelay:
    return BackendRelay(planner, "a test")


def test_a_fresh_batch_needs_a_plan(planner: Planner, relay: BackendRelay) -> None:
    batch = make_batch([1, 2])
    assert batch.needs_plan(planner.backend_id)
    relay.plan(batch)
    assert planner.num_plans == 1


def test_a_marked_batch_skips_planning(planner: Planner, relay: BackendRelay) -> None:
    batch = make_batch([1, 2])
    relay.plan(batch)
    relay.plan(batch)
    assert planner.num_plans == 1


def test_changed_requests_or_tokens_need_a_plan_again_where_replanning_is_equivalent(planner: Planner, relay: BackendRelay) -> None:
    batch = make_batch([1, 2])
    relay.plan(batch)
    assert batch.plan is not None
    batch.mark_planned(batch.plan, replan_equivalent=True)
    assert not batch.needs_plan(planner.backend_id)
    fewer_tokens = dataclasses.replace(batch, input_ids=batch.input_ids[:-1])
    fewer_requests = dataclasses.replace(batch, q_lens_cpu=batch.q_lens_cpu[:-1])
    assert fewer_tokens.needs_plan(planner.backend_id)
    assert fewer_requests.needs_plan(planner.backend_id)
    relay.plan(fewer_tokens)
    assert planner.num_plans == 2


def test_otherwise_they_skip_and_the_kernel_refuses_what_the_plan_does_not_cover(planner: Planner, relay: BackendRelay) -> None:
    batch = make_batch([1, 2])
    relay.plan(batch)
    batch.input_ids = batch.input_ids[:-1]
    assert not batch.needs_plan(planner.backend_id)
    with pytest.raises(StalePlan, match="num_tokens=2"):
        covering_plan(batch, ForwardPlan, backend=planner.backend_id)


def test_marking_again_records_the_new_shapes(planner: Planner, relay: BackendRelay) -> None:
    batch = make_batch([1, 2])
    relay.plan(batch)
    batch.input_ids = batch.input_ids[:-1]
    batch.mark_planned(planner.plan_forward_metadata(batch))
    assert not batch.needs_plan(planner.backend_id)
    assert covering_plan(batch, ForwardPlan, backend=planner.backend_id).key.num_tokens == 2


def test_another_backend_s_phase_s_or_epoch_s_plan_is_refused(planner: Planner, relay: BackendRelay) -> None:
    batch = make_batch([1, 1], phase=Phase.DECODE)
    relay.plan(batch)
    assert batch.needs_plan("other#0")
    with pytest.raises(StalePlan, match="planner#0"):
        covering_plan(batch, ForwardPlan, backend="other#0")
    with pytest.raises(StalePlan, match="epoch=1"):
        covering_plan(batch, ForwardPlan, backend=planner.backend_id, epoch=1)
    batch.phase = Phase.PREFILL
    with pytest.raises(StalePlan, match="PREFILL"):
        covering_plan(batch, ForwardPlan, backend=planner.backend_id)


def test_two_batches_planned_before_either_runs_keep_their_own(planner: Planner, relay: BackendRelay) -> None:
    one, other = make_batch([1, 2]), make_batch([4])
    relay.plan(one)
    relay.plan(other)
    assert covering_plan(one, ForwardPlan, backend=planner.backend_id).key.num_tokens == 3
    assert covering_plan(other, ForwardPlan, backend=planner.backend_id).key.num_tokens == 4


def test_a_split_leaves_its_parts_unplanned(planner: Planner, relay: BackendRelay) -> None:
    batch = make_batch([1, 2])
    relay.plan(batch)
    part = slice_requests(batch, 0, 1)
    assert part.needs_plan(planner.backend_id)
    with pytest.raises(StalePlan, match="no plan"):
        covering_plan(part, ForwardPlan, backend=planner.backend_id)
