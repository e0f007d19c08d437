"""When a batch needs a plan, and which plan is refused: the semantics of the marker, one test each, and what equal sizes cover."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from core.attention.batches import GEOMETRY, Planner, make_batch, nobody_of
from core.attention.nested_children import Child

from enginery.attention.axes import cut_at, pad
from enginery.attention.relay import BackendRelay
from enginery.attention.socket import LayerSocket
from enginery.attention.watch import UnwrittenOutput, Watch, poison
from enginery.contracts.attention import AttnLayerFacts, GlobalLayerId, LayerSpec, LocalLayerId
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.plan import ForwardPlan, PlanKey, covering_plan
from enginery.errors import PluginError, StalePlan, Unsupported
from enginery.plugin.hookspecs import hookimpl

LAYER = LayerSpec(
    global_id=GlobalLayerId(0),
    local_id=LocalLayerId(0),
    facts=AttnLayerFacts(num_heads=1, num_kv_heads=1, head_dim=2),
    scale=1.0,
)


@pytest.fixture
def planner() -> Planner:
    return Planner()


@pytest.fixture
def relay(planner: Planner) -> BackendRelay:
    return BackendRelay(planner, "a test")


def plan_of(batch: ForwardBatch) -> ForwardPlan:
    assert batch.plan is not None
    return batch.plan


def test_a_fresh_batch_needs_a_plan(planner: Planner, relay: BackendRelay) -> None:
    assert make_batch([1, 2]).plan is None
    relay.plan(make_batch([1, 2]))
    assert planner.num_plans == 1


def test_a_planned_batch_skips_planning_and_keeps_its_identity(planner: Planner, relay: BackendRelay) -> None:
    batch = make_batch([1, 2])
    planned = relay.plan(batch)
    assert relay.plan(planned) is planned
    assert planner.num_plans == 1
    assert planned.identity == batch.identity
    assert planned.kv_lens_cpu is batch.kv_lens_cpu


def test_changed_requests_or_tokens_need_a_plan_again(planner: Planner, relay: BackendRelay) -> None:
    batch = relay.plan(make_batch([1, 2]))
    for fewer in (
        dataclasses.replace(batch, input_ids=batch.input_ids[:-1]),
        dataclasses.replace(batch, q_lens_cpu=batch.q_lens_cpu[:-1]),
    ):
        assert fewer.plan is None
        relay.plan(fewer)
    assert planner.num_plans == 3


def test_the_kernel_refuses_what_the_plan_does_not_cover(planner: Planner, relay: BackendRelay) -> None:
    batch = relay.plan(make_batch([1, 2]))
    shorter = dataclasses.replace(batch, input_ids=batch.input_ids[:-1])
    with pytest.raises(StalePlan, match="num_tokens=2"):
        covering_plan(plan_of(batch), shorter, ForwardPlan, backend=planner.backend_id)


def test_planning_again_records_the_new_shapes(planner: Planner, relay: BackendRelay) -> None:
    batch = relay.plan(make_batch([1, 2]))
    shorter = relay.plan(dataclasses.replace(batch, input_ids=batch.input_ids[:-1]))
    assert covering_plan(plan_of(shorter), shorter, ForwardPlan, backend=planner.backend_id).key.num_tokens == 2


def test_another_backend_s_phase_s_or_epoch_s_plan_is_refused(planner: Planner, relay: BackendRelay) -> None:
    batch = relay.plan(make_batch([1, 1], phase=Phase.DECODE))
    other = BackendRelay(Planner("other#0"), "a test")
    assert plan_of(other.plan(batch)).key.backend == "other#0"
    with pytest.raises(StalePlan, match="planner#0"):
        covering_plan(plan_of(batch), batch, ForwardPlan, backend="other#0")
    with pytest.raises(StalePlan, match="epoch=1"):
        covering_plan(plan_of(batch), batch, ForwardPlan, backend=planner.backend_id, epoch=1)
    with pytest.raises(StalePlan, match="PREFILL"):
        covering_plan(plan_of(batch), dataclasses.replace(batch, phase=Phase.PREFILL), ForwardPlan, backend=planner.backend_id)


def test_two_batches_planned_before_either_runs_keep_their_own(planner: Planner, relay: BackendRelay) -> None:
    one, other = relay.plan(make_batch([1, 2])), relay.plan(make_batch([4]))
    assert covering_plan(plan_of(one), one, ForwardPlan, backend=planner.backend_id).key.num_tokens == 3
    assert covering_plan(plan_of(other), other, ForwardPlan, backend=planner.backend_id).key.num_tokens == 4


def test_a_split_leaves_its_parts_unplanned(planner: Planner, relay: BackendRelay) -> None:
    batch = relay.plan(make_batch([1, 2]))
    part = cut_at(batch, 1, 1, (batch.phase, batch.phase))[0].batch
    assert part.plan is None
    with pytest.raises(StalePlan, match="None is no plan"):
        covering_plan(None, part, ForwardPlan, backend=planner.backend_id)  # type: ignore[arg-type]


def test_equal_sizes_cover_nothing(planner: Planner, relay: BackendRelay) -> None:
    """Hole 1: a copy with other lengths, and another batch of the same sizes, were run with a plan that was not theirs."""
    batch = relay.plan(make_batch([1, 2]))
    longer = dataclasses.replace(batch, kv_lens_cpu=batch.kv_lens_cpu + 1)
    for other in (dataclasses.replace(batch), longer, make_batch([1, 2])):
        with pytest.raises(StalePlan, match="plan after padding and before attend"):
            covering_plan(plan_of(batch), other, ForwardPlan, backend=planner.backend_id)
        assert relay.plan(other.planned(plan_of(batch))).plan is not batch.plan


def test_a_backend_that_answers_with_the_plan_of_another_batch_is_refused() -> None:
    """Hole 1: a backend that caches plans by their sizes."""

    class Caches(Planner):
        @hookimpl
        def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
            self.kept = getattr(self, "kept", None) or super().plan_forward_metadata(batch, capture)
            return self.kept

    relay = BackendRelay(Caches(), "plugin bad")
    relay.plan(make_batch([1, 2]))
    with pytest.raises(PluginError, match="plugin bad: planner#0 answered plan_forward_metadata with a plan for"):
        relay.plan(make_batch([1, 2]))


class Writes(Planner):
    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        out.fill_(1.0)


def call(relay: BackendRelay, batch: ForwardBatch) -> None:
    rows = torch.ones(batch.num_tokens, 1, 2)
    LayerSocket(relay).attend(rows, rows, rows, LAYER, batch, torch.zeros_like(rows))


def test_a_host_tensor_that_is_written_after_planning_is_noticed_where_it_is_watched() -> None:
    """Hole 1: `kv_lens_cpu += 1` after planning."""
    relay = BackendRelay(Writes(), "a test", watch=Watch())
    batch = relay.plan(make_batch([1, 2]))
    call(relay, batch)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.kv_lens_cpu += 1  # type: ignore[misc]
    with pytest.raises(StalePlan, match="a host tensor of the batch was written after it was planned"):
        call(relay, batch)


def test_an_eager_plan_covers_no_capture_and_the_other_way_round(planner: Planner, relay: BackendRelay) -> None:
    """Hole 8: `capture=True` after an eager plan never reached the backend."""
    batch = relay.plan(make_batch([1, 1], phase=Phase.DECODE))
    captured = relay.plan(batch, capture=True)
    assert planner.num_plans == 2
    assert plan_of(captured).key.capture
    assert relay.plan(captured, capture=True) is captured
    assert not plan_of(relay.plan(captured)).key.capture


def test_a_backend_that_ignores_capture_is_refused() -> None:
    class Ignores(Planner):
        @hookimpl
        def plan_forward_metadata(self, batch: ForwardBatch) -> ForwardPlan:
            return ForwardPlan(key=PlanKey.of(batch, self.backend_id))

    relay = BackendRelay(Ignores(), "a test")
    relay.plan(make_batch([1], phase=Phase.DECODE))
    with pytest.raises(PluginError, match="capture=True"):
        relay.plan(make_batch([1], phase=Phase.DECODE), capture=True)


@pytest.mark.parametrize(
    ("q_lens", "phase"), [([1, 1], Phase.PREFILL), ([1, 2], Phase.MIXED), ([1, 2], Phase.VERIFY), ([], Phase.DECODE)]
)
def test_what_does_not_decode_as_many_rows_of_each_request_is_not_captured(q_lens: list[int], phase: Phase) -> None:
    planner = Planner()
    with pytest.raises(
        Unsupported, match=rf"only steps that decode as many rows .*; planner#0 was asked to plan a batch of {len(q_lens)} requests"
    ):
        BackendRelay(planner, "a test").plan(make_batch(q_lens, phase=phase), capture=True)
    assert planner.num_plans == 0


def test_a_mixed_step_is_captured_of_rows_alone_by_a_backend_that_takes_memory_for_it() -> None:
    batch = nobody_of(8)
    assert not batch.num_requests
    with pytest.raises(Unsupported, match="0 requests and 8 tokens in phase mixed for a capture"):
        BackendRelay(Planner(), "a test").plan(batch, capture=True)
    relay = BackendRelay(Child("a"), "a test")
    with pytest.raises(Unsupported, match="2 requests and 6 tokens"):
        relay.plan(make_batch([1, 5]), capture=True)
    with pytest.raises(Unsupported, match="0 requests and 0 tokens"):
        relay.plan(make_batch([]), capture=True)
    plan = plan_of(relay.plan(batch, capture=True))
    for q_lens in ([1, 5], [1, 1, 1], [8]):
        relay.refresh(plan, pad(make_batch(q_lens), num_requests=len(q_lens), num_tokens=8, geometry=GEOMETRY))
    for other in (make_batch([1, 5]), make_batch([4, 4], phase=Phase.PREFILL), make_batch([1] * 8, phase=Phase.DECODE)):
        with pytest.raises(StalePlan):
            relay.refresh(plan, other)


def test_a_captured_plan_is_refreshed_for_batches_that_agree_with_it_and_runs_in_its_graph_alone() -> None:
    relay = BackendRelay(Writes(), "a test")
    batch = relay.plan(make_batch([1, 1], phase=Phase.DECODE), capture=True)
    call(relay, batch)  # what is captured is run once before
    others = {
        "phase": make_batch([1, 1], phase=Phase.PREFILL),
        "sizes": make_batch([1], phase=Phase.DECODE),
        "decode_len": dataclasses.replace(make_batch([1, 1], phase=Phase.DECODE), decode_len=2),
        "fields": dataclasses.replace(make_batch([1, 1], phase=Phase.DECODE), kv_lens=torch.ones(2)),
    }
    for what, other in others.items():
        with pytest.raises(StalePlan, match="cannot be refreshed"):
            relay.refresh(plan_of(batch), other)
        assert what
    eager = relay.plan(make_batch([1, 1], phase=Phase.DECODE))
    with pytest.raises(StalePlan, match="cannot be refreshed"):
        relay.refresh(plan_of(eager), make_batch([1, 1], phase=Phase.DECODE))
    anothers = dataclasses.replace(plan_of(batch), key=plan_of(batch).key._replace(backend="another"))
    with pytest.raises(StalePlan, match="cannot be refreshed"):
        relay.refresh(anothers, make_batch([1, 1], phase=Phase.DECODE))
    relay.refresh(plan_of(batch), make_batch([1, 1], phase=Phase.DECODE))
    with pytest.raises(StalePlan, match="was refreshed for another batch; only its graph may run with it"):
        call(relay, batch)


def test_rows_of_nobody_need_not_be_written_where_it_is_watched() -> None:
    out = poison(torch.empty(4, 1, 2))
    Watch().after((), nobody_of(4), out, "planner#0")
    with pytest.raises(UnwrittenOutput, match="left 4 of 4 rows"):
        Watch().after((), make_batch([2, 2]), out, "planner#0")
