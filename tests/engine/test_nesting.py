"""Composites give what the plain backend gives, alone and in each other."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from engine.nests import GROUPED, LATENT, STEPS, Memory, over, run
from pairwise import in_turn

from enginery.attention.composite import CompositePlan
from enginery.attention.latent import RaggedPart
from enginery.attention.micro_batches import MicroBatches
from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.latent import PrefillStrategy
from enginery.contracts.plan import ForwardPlan
from enginery.errors import PluginError, StalePlan
from enginery.plugin.hookspecs import hookimpl

KINDS = ("split", "hybrid", "micro", "mla")
PAIRS = [pair for pair in itertools.product(KINDS, KINDS) if pair != ("mla", "mla")]  # what is absorbed cannot be absorbed again
STRATEGIES = list(PrefillStrategy)


def nest(memory: Memory, kinds: tuple[str, ...]) -> BackendRelay:
    """The first kind outermost, the torch backend innermost."""
    if not kinds:
        return memory.leaf()
    return memory.wrap(kinds[0], lambda: nest(memory, kinds[1:]))


def assert_same(kinds: tuple[str, ...], step: str, layer: int) -> None:
    softmax = LATENT if "mla" in kinds else GROUPED
    plain, nested = Memory(softmax), Memory(softmax)
    expected = run(plain, plain.leaf("linear") if layer else nest(plain, ("mla",) if softmax is LATENT else ()), step, layer)
    torch.testing.assert_close(run(nested, nest(nested, kinds), step, layer), expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(nested.states._layers, plain.states._layers, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@in_turn(("pair", PAIRS), ("step", STEPS))
def test_every_pair_of_composites_gives_what_the_plain_backend_gives(pair: tuple[str, str], step: str) -> None:
    assert_same(pair, step, layer=0)


@in_turn(("step", STEPS), ("outer", ["hybrid", "split", "micro"]))
def test_a_recurrent_layer_is_served_through_composites_over_a_hybrid(outer: str, step: str) -> None:
    if outer == "split":  # its two hybrids share the states of the pool
        assert_same(("split", "hybrid"), step, layer=1)
    assert_same((outer, "hybrid"), step, layer=1)


@in_turn(("step", STEPS), ("layer", [0, 1]))
def test_micro_batches_over_a_hybrid_over_a_split_over_mla(step: str, layer: int) -> None:
    assert_same(("micro", "hybrid", "split", "mla"), step, layer)


@in_turn(("strategy", STRATEGIES), ("step", ["prefill", "mixed"]))
def test_every_strategy_gives_the_same_and_is_the_one_asked_for(strategy: PrefillStrategy, step: str) -> None:
    plain, asked = Memory(LATENT, PrefillStrategy.ABSORBED), Memory(LATENT, strategy)
    relay = nest(asked, ("micro", "split", "mla"))
    torch.testing.assert_close(run(asked, relay, step, 0), run(plain, nest(plain, ("mla",)), step, 0), rtol=1e-5, atol=1e-5)
    batch = nest(asked, ("mla",)).plan(asked.batch(*STEPS[step]))
    assert isinstance(batch.plan, CompositePlan)
    ran = {part.strategy for part in batch.plan.parts if isinstance(part, RaggedPart)}
    assert ran == ({strategy} if strategy is not PrefillStrategy.ABSORBED else set())


def test_two_halves_are_planned_before_either_runs_and_keep_their_own_plans() -> None:
    memory = Memory(GROUPED)
    relay = nest(memory, ("micro",))
    batch = relay.plan(memory.batch(*STEPS["mixed"]))
    assert isinstance(batch.plan, CompositePlan)
    first, second = batch.plan.parts
    assert first.plan is not None
    assert second.plan is not None
    assert first.plan is not second.plan
    assert (first.plan.key.batch, second.plan.key.batch) == (first.batch.identity, second.batch.identity)
    assert first.batch.num_tokens + second.batch.num_tokens == batch.num_tokens


def draft_batches(memory: Memory, num_steps: int) -> list[ForwardBatch]:
    """Steps of a drafter, each one token further on."""
    return [memory.batch(Phase.DECODE, [(cached + step, 1) for cached in (9, 1, 17)]) for step in range(num_steps)]


@pytest.mark.parametrize("kinds", [("split", "micro"), ("hybrid",), ("micro",), ()], ids=str)
def test_a_plan_of_n_steps_equals_n_single_plans(kinds: tuple[str, ...]) -> None:
    memory, single = Memory(GROUPED), Memory(GROUPED)
    relay, leaf = nest(memory, kinds), single.leaf()
    steps = relay.plan_steps(draft_batches(memory, 3))
    for step, alone in zip(steps, draft_batches(single, 3), strict=True):
        expected = single.attend(leaf, leaf.plan(alone), single.layers[0])
        torch.testing.assert_close(memory.attend(relay, step, memory.layers[0]), expected)


class PlansAtOnce:
    """The torch backend with `draft_steps_plan`, which may answer wrongly."""

    def __init__(self, memory: Memory, wrong: str = "") -> None:
        self.leaf = memory.leaf()
        self.backend_id = self.leaf.backend_id
        self.attend = self.leaf.attend
        self.num_single_plans = 0
        self.wrong = wrong

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        self.num_single_plans += 1
        return self.leaf.make_plan(batch, capture=capture)

    @hookimpl
    def draft_steps_plan(self, batches: tuple[ForwardBatch, ...], capture: bool) -> tuple[ForwardPlan, ...]:
        plans = tuple(self.leaf.make_plan(batch, capture=capture) for batch in batches)
        wrong = {"too few": plans[:-1], "surplus": (*plans, plans[0]), "one for all": plans[:1] * len(plans)}
        return wrong.get(self.wrong, plans)


def test_draft_steps_use_what_their_child_plans_at_once() -> None:
    memory, single = Memory(GROUPED), Memory(GROUPED)
    leaf, plain = PlansAtOnce(memory), single.leaf()
    relay = over(MicroBatches(over(leaf)))
    for step, alone in zip(relay.plan_steps(draft_batches(memory, 3)), draft_batches(single, 3), strict=True):
        expected = single.attend(plain, plain.plan(alone), single.layers[0])
        torch.testing.assert_close(memory.attend(relay, step, memory.layers[0]), expected)
    assert leaf.num_single_plans == 0


@pytest.mark.parametrize("wrong", ["too few", "surplus", "one for all"])
@pytest.mark.parametrize("micro", [False, True])
def test_plans_of_draft_steps_are_one_for_each_batch(wrong: str, micro: bool) -> None:
    """Hole 9: one plan returned for all was accepted, surplus ones were dropped, too few raised IndexError."""
    memory = Memory(GROUPED)
    relay = over(PlansAtOnce(memory, wrong))
    with pytest.raises(PluginError, match="answered draft_steps_plan with"):
        (over(MicroBatches(relay)) if micro else relay).plan_steps(draft_batches(memory, 3))


@pytest.mark.parametrize("kinds", [("micro",), ()], ids=str)
def test_draft_steps_can_be_captured(kinds: tuple[str, ...]) -> None:
    """Hole 8."""
    memory = Memory(GROUPED)
    steps = nest(memory, kinds).plan_steps(draft_batches(memory, 2), capture=True)
    assert [step.plan.key.capture for step in steps if step.plan is not None] == [True, True]


class PlansOnItsInstance:
    """Keeps its plan on itself, and checks the one it is given all the same."""

    def __init__(self, memory: Memory) -> None:
        self.leaf = memory.leaf()
        self.backend_id = self.leaf.backend_id
        self.kept: ForwardPlan | None = None

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        self.kept = self.leaf.make_plan(batch, capture=capture)
        return self.kept

    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        assert self.kept is not None
        self.leaf.backend.attend(q, k, v, layer, batch, self.kept, out)


def test_a_plan_that_is_kept_on_the_backend_is_refused_under_micro_batches() -> None:
    """Hole 5: it served right alone, and half of the requests wrong in two halves."""
    memory = Memory(GROUPED)
    alone = over(PlansOnItsInstance(memory))
    run(memory, alone, "mixed", 0)
    with pytest.raises(StalePlan, match="plan after padding and before attend"):
        run(memory, over(MicroBatches(alone)), "mixed", 0)


@pytest.mark.parametrize("in_halves", [False, True])
def test_where_lengths_are_true_on_the_device_alone_there_is_one_draft_unless_a_backend_plans_them(in_halves: bool) -> None:
    memory = Memory(GROUPED)
    batches = [dataclasses.replace(step, kv_lens=step.kv_lens_cpu.clone()) for step in draft_batches(memory, 3)]
    without = over(PlansOnItsInstance(memory))
    assert len((over(MicroBatches(without)) if in_halves else without).plan_steps(batches)) == 1
    assert len(nest(memory, ("micro",) if in_halves else ()).plan_steps(batches)) == 3
