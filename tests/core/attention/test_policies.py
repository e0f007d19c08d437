"""A composite's hooks are generated from the specs: none can be forgotten, and each child gets the arguments it takes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from core.attention.batches import Planner, make_batch
from core.attention.nested_children import SOFTMAX, Child, hybrid, relay, split

from enginery.attention.composite import Composite, CompositePlan, Part
from enginery.attention.hookspecs import BackendHooks
from enginery.attention.latent import LatentAttention, LatentSettings
from enginery.attention.layer_kinds import LayerKinds
from enginery.attention.micro_batches import MicroBatches
from enginery.attention.phase_split import PhaseSplit
from enginery.attention.policies import POLICIES, Policy, derived
from enginery.attention.relay import HOOKS, REFRESH, BackendRelay
from enginery.contracts.attention import (
    AttnLayerFacts,
    Capabilities,
    GlobalLayerId,
    KVGeometry,
    LatentFacts,
    LayerSpec,
    LocalLayerId,
)
from enginery.contracts.batch import FULL, ForwardBatch, Phase
from enginery.contracts.latent import ChunkPlan, Denied, PrefillStrategy
from enginery.contracts.plan import (
    Accepted,
    IndexerPlan,
    PlanKey,
    VerifyMask,
)
from enginery.errors import StalePlan, Unsupported
from enginery.kv.pool import PagedKVPool
from enginery.plugin.hookspecs import hookimpl, hookspec

COMPOSITES = (LatentAttention, LayerKinds, MicroBatches, PhaseSplit)


def test_a_spec_without_a_policy_fails_at_import() -> None:
    class MoreHooks(BackendHooks):
        @hookspec(firstresult=True)
        def brand_new(self, batch: ForwardBatch) -> Any:
            """Nobody has thought of a policy for it."""

    with pytest.raises(TypeError, match="MoreHooks and its policies differ in brand_new; give each hook one policy"):
        derived(MoreHooks, POLICIES)


def test_a_policy_without_a_spec_fails_at_import() -> None:
    with pytest.raises(TypeError, match="differ in ghost_hook"):
        derived(BackendHooks, {**POLICIES, "ghost_hook": Policy.EACH_PART})


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
        lambda child: relay(MicroBatches(hybrid(split(child, Planner("decode")).backend, Planner("linear")))),
    ],
    ids=["hybrid", "split", "micro", "micro over hybrid over split"],
)
def test_a_child_is_called_with_the_arguments_it_takes_through_every_composite(
    nest: Callable[[object], BackendRelay], child: object, answer: object
) -> None:
    batch = make_batch([2], phase=Phase.PREFILL)
    assert nest(child).ask("init_mha_chunk_metadata", batch=batch, chunks=(), disable_ragged=True) == answer


@pytest.mark.parametrize(("phase", "wanted"), [(Phase.PREFILL, "prefill"), (Phase.DECODE, "decode"), (Phase.VERIFY, "decode")])
def test_by_phase_asks_the_child_that_serves_the_phase(phase: Phase, wanted: str) -> None:
    ask = partial(split(Child("prefill"), Child("decode")).ask, "init_mha_chunk_metadata")
    assert ask(batch=make_batch([1], phase=phase), chunks=(), disable_ragged=False) == (wanted, "init_mha_chunk_metadata")


def test_all_of_needs_every_child() -> None:
    first, second = Child("a"), Child("b")
    assert hybrid(first, second).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is True
    assert [child.asked for child in (first, second)] == [[("init_graph_state", dict(max_batch_size=4, max_num_tokens=8))]] * 2
    assert hybrid(Child("a"), Planner("b")).ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is None


def test_hooks_about_a_plan_go_to_the_child_of_each_part_with_its_own_plan_and_batch() -> None:
    class Halves(MicroBatches):
        """Cuts what is captured too."""

        def cut(self, batch: ForwardBatch, *, capture: bool) -> Iterator[Part]:
            return super().cut(batch, capture=False)

    child = Child("child")
    nest = relay(Halves(relay(child)))
    batch = nest.plan(make_batch([1, 1, 1], phase=Phase.DECODE), capture=True)
    assert isinstance(batch.plan, CompositePlan)
    nest.refresh(batch.plan, make_batch([1, 1, 1], phase=Phase.DECODE))
    assert nest.ask("device_prologue", plan=batch.plan) is True
    refreshed, prologues = ([given for hook, given in child.asked if hook == name] for name in (REFRESH, "device_prologue"))
    plans = [part.plan for part in batch.plan.parts]
    assert [each["batch"].num_tokens for each in refreshed] == [1, 2]
    assert [each["plan"] for each in refreshed] == [each["plan"] for each in prologues] == plans


NESTS: dict[str, Callable[[object], BackendRelay]] = {
    "hybrid": lambda child: hybrid(child, Planner("linear")),
    "split": lambda child: split(Planner("prefill"), child),
    "micro": lambda child: relay(MicroBatches(relay(child))),
    "micro over split over hybrid": lambda child: relay(
        MicroBatches(split(Planner("prefill"), hybrid(child, Planner("linear")).backend))
    ),
}


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.VERIFY])
def test_an_indexer_is_given_the_part_s_batch_with_the_part_s_plan(nest: Callable[[object], BackendRelay], phase: Phase) -> None:
    """Hole 3: it was given the composite's batch. The child's own check is in `Child.indexer_metadata`."""
    child = Child("child")
    outer = nest(child)
    batch = outer.plan(make_batch([1, 1, 1], phase=phase))
    answer = outer.ask("indexer_metadata", plan=batch.plan, batch=batch)
    assert isinstance(answer, IndexerPlan)
    rows = [place for part in answer.parts for place in range(part.rows.start, part.rows.stop)]
    assert rows == [0, 1, 2]
    assert [len(part.row_lens) for part in answer.parts] == [part.rows.stop - part.rows.start for part in answer.parts]


def test_an_indexer_through_draft_steps_is_given_each_step_s_own_batch() -> None:
    """Hole 3."""
    outer = relay(MicroBatches(relay(Child("child"))))
    for step in outer.plan_steps([make_batch([1, 1], phase=Phase.DECODE) for _ in range(2)]):
        assert isinstance(outer.ask("indexer_metadata", plan=step.plan, batch=step), IndexerPlan)


def test_a_verification_is_asked_of_the_child_that_it_is_planned_by() -> None:
    """Hole 4: the prefill child answered, and a commit went to both children."""
    prefill, decode = Child("prefill"), Child("decode")
    nest = split(prefill, decode)
    batch = nest.plan(dataclasses.replace(make_batch([3, 3], phase=Phase.VERIFY), decode_len=3, trees=True))
    mask = nest.ask("verify_mask", plan=batch.plan)
    assert [part.requests for part in mask.parts] == [slice(0, 2)]
    accepted = Accepted(counts=torch.tensor([1, 2]))
    assert nest.ask("commit_state", plan=batch.plan, accepted=accepted) is True
    assert nest.ask("indexer_metadata", plan=batch.plan, batch=batch) is not None
    assert [hook for hook, _ in decode.asked] == ["verify_mask", "commit_state", "indexer_metadata"]
    assert not prefill.asked


def test_latents_and_the_keys_beside_them_have_masks_each() -> None:
    """Both are given the whole batch."""
    nest = relay(LayerKinds(full=relay(Child("keys")), latents=relay(Child("latents")), state=relay(Planner("states"))))
    batch = nest.plan(dataclasses.replace(make_batch([3, 3], phase=Phase.VERIFY), decode_len=3, trees=True))
    mask = nest.ask("verify_mask", plan=batch.plan)
    assert [part.requests for part in mask.parts] == [slice(0, 2)] * 2


def test_parts_without_trees_are_asked_for_no_mask() -> None:
    """A prefill backend need not have the hook, nor is a half of chunks asked."""
    prefill, decode = Planner("prefill"), Child("decode")
    nest = relay(MicroBatches(split(prefill, decode)))
    chunks = dataclasses.replace(make_batch([3, 3, 5, 7, 9]), decode_len=3, trees=True)
    mask = nest.ask("verify_mask", plan=nest.plan(chunks).plan)
    assert [part.requests for part in mask.parts] == [slice(0, 2)]
    without = dataclasses.replace(chunks, trees=False)
    assert nest.ask("verify_mask", plan=nest.plan(without).plan) is None


def test_each_half_commits_what_of_its_own_requests_was_accepted() -> None:
    """Hole 4: it was committed once for two planned halves."""
    child = Child("child")
    nest = relay(MicroBatches(relay(child)))
    batch = nest.plan(dataclasses.replace(make_batch([3, 3, 3], phase=Phase.VERIFY), decode_len=3, trees=True))
    assert nest.ask("commit_state", plan=batch.plan, accepted=Accepted(counts=torch.tensor([5, 6, 7]))) is True
    halves = [arguments["accepted"].counts.tolist() for _, arguments in child.asked]
    assert sorted(halves, key=lambda half: half[0]) in ([[5], [6, 7]], [[5, 6], [7]])
    mask = nest.ask("verify_mask", plan=batch.plan)
    assert sorted(place for part in mask.parts for place in range(part.requests.start, part.requests.stop)) == [0, 1, 2]


def test_the_plan_of_pieces_is_the_composite_s_own() -> None:
    class Ragged(Child):
        @hookimpl
        def init_mha_chunk_metadata(self, batch: ForwardBatch) -> ChunkPlan:
            return ChunkPlan(key=PlanKey.of(batch, self.backend_id), attend=self.attend)

    nest, batch = split(Ragged("prefill"), Child("decode")), make_batch([4], phase=Phase.PREFILL)
    plan = nest.make_chunk_plan(batch, (), disable_ragged=False)
    assert isinstance(plan, ChunkPlan)
    assert plan.key.covers(batch, nest.backend_id, epoch=plan.key.epoch, capture=False)


def test_a_part_that_the_child_did_not_plan_is_not_asked_about() -> None:
    """Hole 4: `device_prologue` over a ragged MLA part was given None for a plan."""

    class Ragged(Child):
        @hookimpl
        def init_mha_chunk_metadata(self, batch: ForwardBatch) -> ChunkPlan:
            return ChunkPlan(key=PlanKey.of(batch, self.backend_id), attend=self.attend)

    facts = AttnLayerFacts(
        num_heads=2, num_kv_heads=1, head_dim=24, latent=LatentFacts(rank=16, rope_dim=8, nope_dim=4, value_dim=4)
    )
    geometry = KVGeometry(pages={FULL: 8}, page_size=16, layers=(facts,), dtype="float32")
    child, none = Ragged("child"), frozenset[str]()
    latent = LatentAttention(
        relay(child),
        capabilities=Capabilities(devices=none, dtypes=none, kv_dtypes=none, mla=True, mla_ragged=True, lse_base="e"),
        geometry=geometry,
        pool=PagedKVPool(geometry, torch.device("cpu")),
        settings=LatentSettings(strategy=PrefillStrategy.ONE_SHOT, chunk_tokens=64),
    )
    outer = relay(latent)
    batch = outer.plan(make_batch([1, 1, 4]))
    assert outer.ask("device_prologue", plan=batch.plan) is True
    assert [arguments["plan"].key.num_tokens for _, arguments in child.asked] == [2]
    assert outer.ask("device_prologue", plan=outer.plan(make_batch([4], phase=Phase.PREFILL)).plan) is None


def test_a_child_that_lacks_a_hook_answers_none_for_the_whole() -> None:
    nest = split(Planner("prefill"), Planner("decode"))
    batch = nest.plan(dataclasses.replace(make_batch([3], phase=Phase.VERIFY), decode_len=3, trees=True))
    for hook, more in (
        ("verify_mask", {}),
        ("commit_state", {"accepted": Accepted(counts=torch.ones(1))}),
        ("device_prologue", {}),
    ):
        assert nest.ask(hook, plan=batch.plan, **more) is None


def test_a_hook_is_not_answered_for_another_composite_s_plan() -> None:
    batch = split(Child("a"), Child("b")).plan(make_batch([1]))
    with pytest.raises(StalePlan, match="is asked with a plan made for"):
        split(Child("c"), Child("d")).ask("device_prologue", plan=batch.plan)


def test_a_composite_in_which_no_part_serves_a_layer_refuses_it() -> None:
    """Hole 11: `out` was left as it was."""

    class Nobody(LayerKinds):
        def serving_layer(self, layer: LayerSpec) -> Sequence[int]:
            return ()

    nest = relay(Nobody(full=relay(Planner("a")), state=relay(Planner("b"))))
    batch, rows = nest.plan(make_batch([1])), torch.ones(1, 2, 8)
    layer = LayerSpec(global_id=GlobalLayerId(3), local_id=LocalLayerId(0), facts=SOFTMAX, scale=1.0)
    assert batch.plan is not None
    with pytest.raises(Unsupported, match=r"no part of kinds\(a, b\) serves layer 3"):
        nest.attend(rows, rows, rows, layer, batch, batch.plan, rows)


def test_what_is_captured_is_not_cut_in_two_plans_that_share_memory() -> None:
    nest = relay(MicroBatches(relay(Child("child"))))
    batch = nest.plan(make_batch([1, 1], phase=Phase.DECODE), capture=True)
    assert isinstance(batch.plan, CompositePlan)
    assert len(batch.plan.parts) == 1
    nest.refresh(batch.plan, make_batch([1, 1], phase=Phase.DECODE))


def test_a_composite_that_defines_a_hook_itself_keeps_it() -> None:
    class Own(Composite):
        kind = "own"

        def cut(self, batch: ForwardBatch, *, capture: bool) -> Iterator[Part]:
            yield Part(child=0, rows=None, batch=batch)

        @hookimpl
        def verify_mask(self) -> VerifyMask:
            return VerifyMask(parts=())

    nest = relay(Own(relay(Child("a"))))
    assert nest.ask("verify_mask", plan=nest.plan(make_batch([1])).plan).parts == ()
