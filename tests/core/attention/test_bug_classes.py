"""Design, section 8: one test for each class of bugs that other engines have here. Each fails if its guard is removed."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from core.attention.batches import Planner, make_batch

from enginery.attention.axes import pad
from enginery.attention.composite import Composite
from enginery.attention.hookspecs import BackendHooks
from enginery.attention.layer_kinds import LayerKinds
from enginery.attention.policies import POLICIES, derived
from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import (
    AttnBackendSpec,
    AttnLayerFacts,
    AttnNeeds,
    BackendContext,
    Capabilities,
    GlobalLayerId,
    KVGeometry,
    LayerSpec,
    LocalLayerId,
)
from enginery.contracts.batch import FULL, ForwardBatch, Phase
from enginery.contracts.plan import ForwardPlan, covering_plan
from enginery.contracts.versions import HookGroup
from enginery.errors import PluginError, StalePlan, Unsupported
from enginery.kv.arena import DeviceArena
from enginery.plugin.hookspecs import hookimpl, hookspec
from enginery.plugin.records import Offer
from enginery.plugin.selection import select
from enginery.worker.backends import AttentionParts, build_backend

ROOT = Path(__file__).parents[3]
FACTS = AttnLayerFacts(num_heads=2, num_kv_heads=2, head_dim=8)


def relay(backend: object) -> BackendRelay:
    return BackendRelay(backend, "a test")


def offer(name: str, **claims: object) -> Offer[AttnBackendSpec]:
    one_each = dict(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), kv_dtypes=frozenset({"float32"}))
    spec = AttnBackendSpec(name=name, api=(2, 0), priority=5, summary="", capabilities=Capabilities(**{**one_each, **claims}))
    return Offer(group=HookGroup.ATTN_BACKEND, name=name, spec=spec, plugin=name, distribution=name, version="1")


def test_a_wrapper_cannot_forget_a_hook() -> None:
    class MoreHooks(BackendHooks):
        @hookspec(firstresult=True)
        def added_later(self) -> None:
            """A hook that nobody has told the composites of."""

    with pytest.raises(TypeError, match="added_later"):
        derived(MoreHooks, POLICIES)
    own = {name for name, _ in inspect.getmembers_static(Composite) if name in POLICIES}
    assert own == {name for name, _ in inspect.getmembers(BackendHooks, inspect.isfunction)}


def test_a_drifted_signature_gets_the_arguments_it_takes_or_is_refused_at_once() -> None:
    class Fewer(Planner):
        @hookimpl
        def init_mha_chunk_metadata(self, batch: ForwardBatch) -> object:
            return batch

    class Renamed(Planner):
        @hookimpl
        def init_mha_chunk_metadata(self, batch: ForwardBatch, disable_flashinfer_ragged: bool = False) -> object:
            return batch

    batch = make_batch([3], phase=Phase.PREFILL)
    hybrid = relay(LayerKinds(full=relay(Fewer()), state=relay(Planner("linear#0"))))
    assert hybrid.ask("init_mha_chunk_metadata", batch=batch, chunks=(), disable_ragged=True) is batch
    with pytest.raises(PluginError, match="'disable_flashinfer_ragged' is not in the hook's specification"):
        relay(Renamed())


def test_objects_are_complete_because_workspaces_come_from_the_arena_and_contexts_have_no_later() -> None:
    fields = {field.name: field for field in dataclasses.fields(BackendContext)}
    assert BackendContext.__dataclass_params__.frozen  # type: ignore[attr-defined]
    optional = {name for name, field in fields.items() if field.default is None}
    assert optional == {"coordinator", "options"}, "None in a context means configured off, never not yet"
    arena = DeviceArena(device=torch.device("cpu"))
    first = arena.take("softmax", 64)
    assert arena.take("softmax", 32).data_ptr() == first.data_ptr()
    assert arena.take("linear", 64).data_ptr() != first.data_ptr()
    with pytest.raises(Unsupported, match="'softmax' has 64 bytes and 65 are asked for"):  # hole 11
        arena.take("softmax", 65)
    assert arena.take("softmax", 65, may_move=True).data_ptr() != first.data_ptr()


def test_a_stale_or_foreign_plan_is_refused_instead_of_computed_with() -> None:
    mine = Planner("mine#0")
    batch = relay(mine).plan(make_batch([1, 2]))
    assert batch.plan is not None
    covering_plan(batch.plan, batch, ForwardPlan, backend="mine#0")
    geometry = KVGeometry(pages={FULL: 4}, page_size=16, layers=(), dtype="float32")
    padded = pad(batch, num_requests=4, num_tokens=5, geometry=geometry)
    for stale, backend in ((padded, "mine#0"), (batch, "other#0"), (make_batch([1, 2]), "mine#0")):
        with pytest.raises(StalePlan, match="plan after padding and before attend"):
            covering_plan(batch.plan, stale, ForwardPlan, backend=backend)


def test_attention_backends_cannot_be_built_before_what_their_context_holds() -> None:
    given = inspect.signature(AttentionParts).parameters.values()
    assert {each.name for each in given if each.default is each.empty} == {"asked", "choice", "registry", "pool"}
    assert inspect.signature(build_backend).parameters["parts"].default is inspect.Parameter.empty


def test_static_facts_are_keyword_only_and_not_on_the_batch() -> None:
    for facts in (LayerSpec, BackendContext, KVGeometry, AttnLayerFacts):
        kinds = {parameter.kind for parameter in inspect.signature(facts).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}, facts
    static = {"layer", "layer_id", "start_layer", "pool", "backend", "coordinator", "page_size"}
    assert not static & {field.name for field in dataclasses.fields(ForwardBatch)}


def test_a_backend_of_any_name_is_chosen_by_what_it_can() -> None:
    windowed = dataclasses.replace(FACTS, sliding_window=4)
    needs = AttnNeeds(device="cpu", dtype="float32", kv_dtype="float32", page_size=16, layers=(windowed,))
    offers = [offer("famous"), offer("never-heard-of-it", sliding_window=True)]
    assert select("auto", needs, offers, ()).winner.name == "never-heard-of-it"


def test_a_global_layer_id_is_no_local_one() -> None:
    """The type checker tells them apart: `make lint` runs it over this file, in which a guard that is gone is an error."""
    snippet = (ROOT / "tests/meta/typing_snippets/layer_ids.py").read_text()
    assert "pool.layer(layer.global_id)  # type: ignore[arg-type]" in snippet
    linted = (ROOT / "Makefile").read_text()
    assert "tests/meta/typing_snippets" in linted
    assert LayerSpec(global_id=GlobalLayerId(9), local_id=LocalLayerId(1), facts=FACTS, scale=1.0).local_id == 1


def test_what_is_asked_for_by_name_is_used_or_the_start_fails() -> None:
    offers = [offer("wanted", devices=frozenset({"cuda"})), offer("fine")]
    needs = AttnNeeds(device="cpu", dtype="float32", kv_dtype="float32", page_size=16, layers=(FACTS,))
    with pytest.raises(Unsupported, match="device cpu is not among cuda"):
        select("wanted", needs, offers, ())
