"""A composite's hooks are generated from the specs: none can be forgotten, and each child gets the arguments it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from core.attention.batches import Planner, make_batch

from enginery.attention.composite import Composite, CompositePlan, Part
from enginery.attention.draft_steps import DraftSteps
from enginery.attention.hookspecs import BackendHooks
from enginery.attention.latent import LatentAttention
from enginery.attention.layer_hybrid import LayerHybrid
from enginery.attention.micro_batches import MicroBatches
from enginery.attention.phase_split import PhaseSplit
from enginery.attention.policies import POLICIES, Policy, derived
from enginery.attention.relay import HOOKS, BackendRelay
from enginery.contracts.attention import AttnLayerFacts, GlobalLayerId, LayerSpec, LocalLayerId, RecurrentFacts
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.latent import ChunkPlan, Denied
from enginery.contracts.plan import ForwardPlan
from enginery.plugin.hookspecs import hookimpl, hookspec

COMPOSITES = (DraftSteps, LatentAttention, LayerHybrid, MicroBatches, PhaseSplit)
SOFTMAX = AttnLayerFacts(num_heads=2, num_kv_heads=2, head_dim=8)
LINEAR = AttnLayerFacts(num_heads=2, num_kv_heads=2, head_dim=8, recurrent=RecurrentFacts(value_dim=8))


class Child(Planner):
    """Answers every optional hook and remembers what it was asked with."""

    def __init__(self, backend_id: str) -> None:
        super().__init__(backend_id)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def _answer(self, hook: str, **arguments: Any) -> Any:
        self.asked.append((hook, arguments))
        return (self.backend_id, hook)

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch, chunks: tuple[object, ...], disable_ragged: bool) -> Any:
        return self._answer("init_mha_chunk_metadata", batch=batch, chunks=chunks, disable_ragged=disable_ragged)

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        return bool(self._answer("init_graph_state", max_batch_size=max_batch_size, max_num_tokens=max_num_tokens))

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        return bool(self._answer("refresh_graph_metadata", plan=plan, batch=batch))

    @hookimpl
    def device_prologue(self, plan: ForwardPlan) -> bool:
        return bool(self._answer("device_prologue", plan=plan))

    @hookimpl
    def verify_mask(self) -> Any:
        return self._answer("verify_mask")

    @hookimpl
    def commit_state(self, accepted: Any) -> bool:
        return bool(self._answer("commit_state", accepted=accepted))

    @hookimpl
    def indexer_metadata(self, layer: Any, batch: ForwardBatch) -> Any:
        return self._answer("indexer_metadata", layer=layer, batch=batch)


def layer(facts: AttnLayerFacts) -> LayerSpec:
    return LayerSpec(global_id=GlobalLayerId(0), local_id=LocalLayerId(0), facts=facts, scale=1.0)


def relay(backend: object) -> BackendRelay:
    return BackendRelay(backend, "a test")


def split(prefill: object, decode: object) -> BackendRelay:
    return relay(PhaseSplit(prefill=relay(prefill), decode=relay(decode)))


def hybrid(softmax: object, recurrent: object) -> BackendRelay:
    return relay(LayerHybrid(softmax=relay(softmax), recurrent=relay(recurrent)))


def test_a_spec_without_a_policy_fails_at_import() -> None:
    class MoreHooks(BackendHooks):
        @hookspec(firstresult=True)
        def brand_new(self, batch: ForwardBatch) -> Any:
            """Nobody has thought of a policy for it."""

    with pytest.raises(TypeError, match="MoreHooks and its policies differ in brand_new; give each hook one policy"):
        derived(MoreHooks, POLICIES)


def test_a_policy_without_a_spec_fails_at_import() -> None:
    with pytest.raises(TypeError, match="differ in ghost_hook"):
        derived(BackendHooks, {**POLICIES, "ghost_hook": Policy.BOTH})


@pytest.mark.parametrize("composite", COMPOSITES, ids=lambda composite: composite.kind)
def test_every_composite_has_every_hook_with_the_arguments_of_its_spec(composite: type[Composite]) -> None:
    assert set(POLICIES) == set(HOOKS)
    for name, spec in inspect.getmembers(BackendHooks, inspect.isfunction):
        mine = inspect.getattr_static(composite, name)
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(spec).parameters), name


class TakesBatch(Planner):
    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch) -> Any:
        return ("batch", batch.num_tokens)


class TakesFlag(Planner):
    @hookimpl
    def init_mha_chunk_metadata(self, disable_ragged: bool, batch: ForwardBatch) -> Any:
        return ("flag", batch.num_tokens, disable_ragged)


class Denies(Planner):
    @hookimpl
    def init_mha_chunk_metadata(self) -> ChunkPlan | Denied:
        return Denied("not today")


@pytest.mark.parametrize(
    ("child", "answer"),
    [
        (TakesBatch("a"), ("batch", 2)),
        (TakesFlag("a"), ("flag", 2, True)),
        (Denies("a"), Denied("not today")),
        (Planner("a"), None),
    ],
    ids=["batch", "batch and flag", "denies", "lacks it"],
)
@pytest.mark.parametrize(
    "nest",
    [
        lambda child: hybrid(child, Planner("linear")),
        lambda child: split(child, Planner("decode")),
        lambda child: relay(MicroBatches(relay(child))),
        lambda child: relay(DraftSteps(relay(child), page_size=4)),
        lambda child: relay(MicroBatches(hybrid(split(child, Planner("decode")).backend, Planner("linear")))),
    ],
    ids=["hybrid", "split", "micro", "draft-steps", "micro over hybrid over split"],
)
def test_a_child_is_called_with_the_arguments_it_takes_through_every_composite(
    nest: Callable[[object], BackendRelay], child: object, answer: object
) -> None:
    batch = make_batch([2], phase=Phase.PREFILL)
    assert nest(child).ask("init_mha_chunk_metadata", batch=batch, chunks=(), disable_ragged=True) == answer


def test_by_layer_asks_the_child_that_serves_the_layer() -> None:
    softmax, recurrent = Child("softmax"), Child("recurrent")
    ask = partial(hybrid(softmax, recurrent).ask, "indexer_metadata")
    assert ask(layer=layer(SOFTMAX), batch=make_batch([1])) == ("softmax", "indexer_metadata")
    assert ask(layer=layer(LINEAR), batch=make_batch([1])) == ("recurrent", "indexer_metadata")
    assert [len(child.asked) for child in (softmax, recurrent)] == [1, 1]


@pytest.mark.parametrize(("phase", "wanted"), [(Phase.PREFILL, "prefill"), (Phase.DECODE, "decode"), (Phase.VERIFY, "decode")])
def test_by_phase_asks_the_child_that_serves_the_phase(phase: Phase, wanted: str) -> None:
    ask = partial(split(Child("prefill"), Child("decode")).ask, "init_mha_chunk_metadata")
    assert ask(batch=make_batch([1], phase=phase), chunks=(), disable_ragged=False) == (wanted, "init_mha_chunk_metadata")


def test_all_of_needs_every_child() -> None:
    first, second = Child("a"), Child("b")
    assert hybrid(first, second).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is True
    assert [child.asked for child in (first, second)] == [[("init_graph_state", dict(max_batch_size=4, max_num_tokens=8))]] * 2
    assert hybrid(Child("a"), Planner("b")).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is None


def test_graphs_of_a_split_are_those_of_the_child_that_decodes() -> None:
    prefill, decode = Child("a"), Child("b")
    assert split(prefill, decode).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is True
    assert not prefill.asked
    assert split(Planner("a"), Child("b")).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is True
    assert split(Child("a"), Planner("b")).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is None


def test_any_of_takes_the_first_child_that_has_it() -> None:
    assert hybrid(Planner("a"), Child("b")).ask("verify_mask") == ("b", "verify_mask")
    assert hybrid(Planner("a"), Planner("b")).ask("verify_mask") is None


def test_both_asks_every_child_that_has_it() -> None:
    first, second = Child("a"), Child("b")
    assert hybrid(first, second).ask("commit_state", accepted="tokens") is True
    assert [child.asked for child in (first, second)] == [[("commit_state", {"accepted": "tokens"})]] * 2
    assert hybrid(Planner("a"), Planner("b")).ask("commit_state", accepted="tokens") is None


def test_forbidden_hooks_are_never_answered() -> None:
    class Plans(Planner):
        @hookimpl
        def draft_steps_plan(self, batch: ForwardBatch, num_steps: int) -> tuple[ForwardPlan, ...]:
            raise AssertionError("a composite's steps need plans of the composite")

    assert hybrid(Plans("a"), Plans("b")).ask("draft_steps_plan", batch=make_batch([1]), num_steps=2) is None


def test_hooks_about_a_plan_go_to_the_child_of_each_part_with_its_own_plan_and_batch() -> None:
    prefill, decode = Child("prefill"), Child("decode")
    nest = split(prefill, decode)
    batch, later = make_batch([1, 1, 3]), make_batch([1, 1, 3])
    nest.plan(batch)
    assert isinstance(batch.plan, CompositePlan)
    assert nest.ask("refresh_graph_metadata", plan=batch.plan, batch=later) is True
    assert nest.ask("device_prologue", plan=batch.plan) is True
    for child, num_tokens in ((decode, 2), (prefill, 3)):
        (_, refreshed), (_, prologue) = child.asked
        assert refreshed["batch"].num_tokens == num_tokens
        assert refreshed["plan"] is prologue["plan"]
        assert refreshed["plan"].key.backend == child.backend_id


def test_a_composite_that_defines_a_hook_itself_keeps_it() -> None:
    class Own(Composite):
        kind = "own"

        def cut(self, batch: ForwardBatch) -> Iterator[Part]:
            yield Part(child=0, rows=None, batch=batch)

        @hookimpl
        def verify_mask(self) -> str:
            return "mine"

    assert relay(Own(relay(Child("a")))).ask("verify_mask") == "mine"
