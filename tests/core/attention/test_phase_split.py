"""Which child of a split by phases plans what: one that prefills, one that decodes, and one for steps of one request."""

from __future__ import annotations

import dataclasses

import pytest
from core.attention.batches import GEOMETRY, Planner, make_batch, nobody_of
from core.attention.nested_children import Child, relay, split

from enginery.attention.axes import pad
from enginery.attention.composite import CompositePlan
from enginery.attention.micro_batches import MicroBatches
from enginery.attention.phase_split import PhaseSplit
from enginery.contracts.batch import Phase
from enginery.errors import StalePlan


def test_graphs_of_a_split_are_those_of_the_child_that_decodes() -> None:
    prefill, decode = Child("a"), Child("b")
    assert split(prefill, decode).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is True
    assert not prefill.asked
    assert split(Planner("a"), Child("b")).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is True
    assert split(Child("a"), Planner("b")).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is None


def test_graphs_of_a_split_with_a_third_child_are_those_of_both_that_decode() -> None:
    prefill, decode, single = Child("a"), Child("b"), Child("c")
    assert split(prefill, decode, single).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is True
    assert not prefill.asked
    assert decode.asked == [("init_graph_state", dict(max_batch_size=4, max_num_tokens=8))]
    assert single.asked == [("init_graph_state", dict(max_batch_size=1, max_num_tokens=8))]
    for lacking in ((Child("a"), Planner("b"), Child("c")), (Child("a"), Child("b"), Planner("c"))):
        assert split(*lacking).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is None


def test_captured_mixed_steps_of_a_split_are_those_of_the_child_that_decodes() -> None:
    prefill, decode, single = Child("a"), Child("b"), Child("c")
    nest, sizes = split(prefill, decode, single), {"max_batch_size": 4, "max_num_tokens": 8}
    assert nest.ask("init_mixed_graph_state", **sizes) is True
    assert split(Planner("a"), Child("b")).ask("init_mixed_graph_state", **sizes) is True
    assert split(Child("a"), Planner("b")).ask("init_mixed_graph_state", **sizes) is None
    captured = nest.plan(nobody_of(8), capture=True)
    assert isinstance(captured.plan, CompositePlan)
    batch = pad(make_batch([1, 5]), num_requests=2, num_tokens=8, geometry=GEOMETRY)
    nest.refresh(captured.plan, batch)
    assert decode.asked == [
        ("init_mixed_graph_state", sizes),
        ("refresh_graph_metadata", dict(plan=captured.plan.parts[0].plan, batch=batch)),
    ]
    assert not prefill.asked
    assert not single.asked


@pytest.mark.parametrize(
    ("phase", "q_lens", "served"),
    [
        (Phase.DECODE, [1], ["single"]),
        (Phase.DECODE, [1, 1], ["decode"]),
        (Phase.DECODE, [], ["decode"]),
        (Phase.VERIFY, [3], ["single"]),
        (Phase.VERIFY, [3, 3], ["decode"]),
        (Phase.PREFILL, [5], ["prefill"]),
        (Phase.PREFILL, [5, 4], ["prefill"]),
        (Phase.MIXED, [1, 5], ["single", "prefill"]),
        (Phase.MIXED, [1, 1, 5], ["decode", "prefill"]),
        (Phase.MIXED, [3, 5], ["single", "prefill"]),
    ],
)
def test_a_third_child_has_what_decodes_in_a_step_if_that_is_one_request(
    phase: Phase, q_lens: list[int], served: list[str]
) -> None:
    nest = split(*map(Child, ("prefill", "decode", "single")))
    length = q_lens[0] if q_lens and phase is not Phase.PREFILL else 1
    for capture in {False, phase in (Phase.DECODE, Phase.VERIFY) and bool(q_lens)}:
        batch = nest.plan(dataclasses.replace(make_batch(q_lens, phase=phase), decode_len=length), capture=capture)
        assert isinstance(batch.plan, CompositePlan)
        assert [part.plan.key.backend for part in batch.plan.parts if part.plan is not None] == served


@pytest.mark.parametrize(("count", "served"), [(1, 2), (2, 1)])
def test_a_captured_step_is_refreshed_by_the_child_that_planned_it(count: int, served: int) -> None:
    """Padded to its size; no other size replays it."""
    children = [Child(name) for name in ("prefill", "decode", "single")]
    nest = split(*children)
    batch = nest.plan(make_batch([1] * count, phase=Phase.DECODE), capture=True)
    assert batch.plan is not None
    later = make_batch([1] * count, phase=Phase.DECODE)
    nest.refresh(batch.plan, later)
    assert nest.ask("device_prologue", plan=batch.plan) is True
    asked = [[hook for hook, _ in child.asked] for child in children]
    assert asked == [["refresh_graph_metadata", "device_prologue"] if place == served else [] for place in range(3)]
    (_, refreshed), _ = children[served].asked
    assert refreshed["batch"].identity == later.identity
    with pytest.raises(StalePlan, match="all but the batch's identity must agree"):
        nest.refresh(batch.plan, make_batch([1] * (3 - count), phase=Phase.DECODE))


def test_halves_of_one_request_each_are_two_plans_of_the_third_child() -> None:
    nest = relay(MicroBatches(split(*map(Child, ("prefill", "decode", "single")))))
    for q_lens, served in (([1, 1], ["single", "single"]), ([1, 1, 1], ["single", "decode"])):
        plan = nest.plan(make_batch(q_lens, phase=Phase.DECODE)).plan
        assert isinstance(plan, CompositePlan)
        halves = [part.plan for part in plan.parts]
        assert [half.parts[0].plan.key.backend for half in halves] == served
        assert len({half.parts[0].plan.key.batch for half in halves}) == 2


def test_draft_steps_of_one_request_are_planned_by_the_third_child() -> None:
    nest = split(*map(Child, ("prefill", "decode", "single")))
    for count, served in ((1, "single"), (2, "decode")):
        for step in nest.plan_steps([make_batch([1] * count, phase=Phase.DECODE) for _ in range(2)]):
            assert isinstance(step.plan, CompositePlan)
            assert [part.plan.key.backend for part in step.plan.parts if part.plan is not None] == [served]


def test_one_backend_may_prefill_and_decode_beside_a_third_child() -> None:
    both, single = Child("both"), Child("single")
    shared = relay(both)
    nest = relay(PhaseSplit(prefill=shared, decode=shared, single=relay(single)))
    assert nest.backend_id == "split(both, both, single)"
    batch = nest.plan(make_batch([1, 1, 4]))
    assert isinstance(batch.plan, CompositePlan)
    assert [(part.plan.key.backend, part.plan.key.num_tokens) for part in batch.plan.parts if part.plan] == [
        ("both", 2),
        ("both", 4),
    ]
    assert nest.ask("init_graph_state", max_batch_size=4, max_num_tokens=4) is True
    assert [len(child.asked) for child in (both, single)] == [1, 1]
