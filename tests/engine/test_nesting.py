"""Composites give what the plain backend gives, alone and in each other."""

from __future__ import annotations

import itertools

import pytest
import torch
from engine.nests import GROUPED, LATENT, STEPS, Memory, over, run

from enginery.attention.composite import CompositePlan
from enginery.attention.draft_steps import DraftSteps, plan_steps, step_batch
from enginery.attention.latent import RaggedPart
from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.latent import PrefillStrategy
from enginery.contracts.plan import ForwardPlan
from enginery.plugin.hookspecs import hookimpl

KINDS = ("split", "hybrid", "micro", "draft-steps", "mla")
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
        assert mine is None or torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("pair", PAIRS, ids="-over-".join)
def test_every_pair_of_composites_gives_what_the_plain_backend_gives(pair: tuple[str, str], step: str) -> None:
    assert_same(pair, step, layer=0)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("outer", ["hybrid", "split", "micro", "draft-steps"])
def test_a_recurrent_layer_is_served_through_composites_over_a_hybrid(outer: str, step: str) -> None:
    if outer == "split":  # its two hybrids share the states of the pool
        assert_same(("split", "hybrid"), step, layer=1)
    assert_same((outer, "hybrid"), step, layer=1)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("step", STEPS)
def test_micro_batches_over_a_hybrid_over_a_split_over_mla(step: str, layer: int) -> None:
    assert_same(("micro", "hybrid", "split", "mla"), step, layer)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("step", ["prefill", "mixed"])
def test_every_strategy_gives_the_same_and_is_the_one_asked_for(strategy: PrefillStrategy, step: str) -> None:
    plain, asked = Memory(LATENT, PrefillStrategy.ABSORBED), Memory(LATENT, strategy)
    relay = nest(asked, ("micro", "split", "mla"))
    torch.testing.assert_close(run(asked, relay, step, 0), run(plain, nest(plain, ("mla",)), step, 0), rtol=1e-5, atol=1e-5)
    batch = asked.batch(*STEPS[step])
    nest(asked, ("mla",)).plan(batch)
    assert isinstance(batch.plan, CompositePlan)
    ran = {part.strategy for part in batch.plan.parts if isinstance(part, RaggedPart)}
    assert ran == ({strategy} if strategy is not PrefillStrategy.ABSORBED else set())


def test_two_halves_are_planned_before_either_runs_and_keep_their_own_plans() -> None:
    memory = Memory(GROUPED)
    relay = nest(memory, ("micro",))
    batch = memory.batch(*STEPS["mixed"])
    relay.plan(batch)
    assert isinstance(batch.plan, CompositePlan)
    first, second = batch.plan.parts
    assert first.batch.plan is not None
    assert second.batch.plan is not None
    assert first.batch.plan is not second.batch.plan
    assert first.batch.num_tokens + second.batch.num_tokens == batch.num_tokens


@pytest.mark.parametrize("kinds", [("draft-steps",), ("draft-steps", "micro"), ("micro",), ()], ids=str)
def test_a_plan_of_n_steps_equals_n_single_plans(kinds: tuple[str, ...]) -> None:
    memory, single = Memory(GROUPED), Memory(GROUPED)
    batch = memory.batch(Phase.DECODE, [(9, 1), (1, 1), (17, 1)])
    steps = plan_steps(nest(memory, kinds), batch, 3, page_size=4)
    relay = nest(memory, kinds)
    for index, step in enumerate(steps):
        alone = step_batch(single.batch(Phase.DECODE, [(9, 1), (1, 1), (17, 1)]), index, page_size=4)
        leaf = single.leaf()
        leaf.plan(alone)
        expected = single.attend(leaf, alone, single.layers[0])
        torch.testing.assert_close(memory.attend(relay, step, memory.layers[0]), expected)


class PlansAtOnce:
    """The torch backend with `draft_steps_plan`."""

    def __init__(self, memory: Memory) -> None:
        self.leaf = memory.leaf()
        self.backend_id = self.leaf.backend.backend_id
        self.attend = self.leaf.backend.attend
        self.num_single_plans = 0

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        self.num_single_plans += 1
        return self.leaf.ask("plan_forward_metadata", batch=batch, capture=capture)

    @hookimpl
    def draft_steps_plan(self, batch: ForwardBatch, num_steps: int) -> tuple[ForwardPlan, ...]:
        steps = [step_batch(batch, step, page_size=4) for step in range(num_steps)]
        return tuple(self.leaf.ask("plan_forward_metadata", batch=step, capture=False) for step in steps)


def test_draft_steps_use_what_their_child_plans_at_once() -> None:
    lengths = [(9, 1), (1, 1), (17, 1)]
    memory, single = Memory(GROUPED), Memory(GROUPED)
    leaf = PlansAtOnce(memory)
    relay = over(DraftSteps(over(leaf), page_size=4))
    for index, step in enumerate(plan_steps(relay, memory.batch(Phase.DECODE, lengths), 3, page_size=4)):
        alone = step_batch(single.batch(Phase.DECODE, lengths), index, page_size=4)
        plain = single.leaf()
        plain.plan(alone)
        expected = single.attend(plain, alone, single.layers[0])
        torch.testing.assert_close(memory.attend(relay, step, memory.layers[0]), expected)
    assert leaf.num_single_plans == 0
