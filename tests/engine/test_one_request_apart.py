"""Steps that decode one request have an attention backend of their own: on a simulated CUDA device, where these are graphs.

Both are `captured_backends`', each with buffers that its captured plans read, so a graph that is refreshed by the other one, or
not at all, gives other tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from engine.captured_backends import CapturedTorch
from engine.rank_answers import assert_equal, folder_of
from engine.rank_models import RECURRENT
from engine.test_cuda_paths import MESHES, by_itself, every_kind, on_cuda, options, told_of
from offers import offering
from pairwise import in_turn

from enginery.api import AttnBackendSpec, BackendContext, ForwardBatch, ForwardPlan, Phase, hookimpl
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

DECODING = (Phase.DECODE, Phase.VERIFY, Phase.IDLE)  # idle: of a lane without work, padded


class Noted(NamedTuple):
    """That a backend of that name planned such a batch, or refreshed a captured plan for it. untold: the device has its lengths."""

    name: str
    refreshed: bool
    capture: bool
    phase: Phase
    num_requests: int
    untold: bool


def with_another_for_one(registry: Registry, noted: set[Noted]) -> Registry:
    """With `many`, and with `one`, which is better for steps that decode one request, and verifies where the device alone knows
    lengths; both leave notes. No other is for softmax."""

    class Noting(CapturedTorch):
        @hookimpl
        def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
            self.note(batch, capture=capture)
            return super().plan_forward_metadata(batch, capture)

        @hookimpl
        def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
            self.note(batch, capture=True, refreshed=True)
            return super().refresh_graph_metadata(plan, batch)

        def note(self, batch: ForwardBatch, *, capture: bool, refreshed: bool = False) -> None:
            name = self.backend_id.partition("#")[0].rpartition("/")[2]
            noted.add(Noted(name, refreshed, capture, batch.phase, batch.num_requests, batch.kv_lens is not None))

    class Both(Registry):
        def create_attn_backend(self, name: str, context: BackendContext) -> object:
            return Noting(context) if name in ("many", "one") else registry.create_attn_backend(name, context)

    offers = {offer.name: offer for offer in registry.offers(AttnBackendSpec)}
    specs = {name: dataclasses.replace(offers["torch"].spec, name=name) for name in ("many", "one")}
    can = dataclasses.replace(specs["one"].capabilities, verify_lengths=True)
    specs["one"] = dataclasses.replace(specs["one"], priority=1, single_priority=70, capabilities=can)
    found = {name: dataclasses.replace(offers["torch"], name=name, spec=spec) for name, spec in specs.items()}
    both = Both(**{each.name: vars(registry)[each.name] for each in dataclasses.fields(registry)})
    return offering(both, AttnBackendSpec, *found.values(), offers["linear"])


def assert_each_has_its_own(noted: set[Noted]) -> None:
    of_one = {each for each in noted if each.phase in DECODING and each.num_requests == 1}
    assert {each.name for each in of_one} == {"one"}
    assert [each for each in noted - of_one if each.name != "many"] == []


@in_turn(
    ("mesh", ["one", "tp", "lanes", "lanes pp", "pp"]),
    ("family", ["deepseek-v2-lite-experts", "kimi_linear", "llama", "gemma2"]),
    ("changes", [{}, {"overlap": False}, {"micro_batches": True}, {"prefix_cache": False}, {"check_attention": True}]),
)
def test_requests_that_come_and_go_are_told_what_one_backend_tells(
    registry: Registry, tmp_path: Path, *, mesh: str, family: str, changes: Mapping[str, object]
) -> None:
    if "lanes" in mesh or "pp" in mesh:
        changes = {name: value for name, value in changes.items() if name not in ("micro_batches", "overlap")}
    recurrent = {"linear_attention_backend": "linear"} if family in RECURRENT else {}
    asked, every, noted = options(model=folder_of(tmp_path, family), **recurrent), every_kind(), set[Noted]()
    batches = [every[:1], every, every[1:2], every[:2], every[2:3]]
    expected = told_of(Engine.build(asked, registry), batches)
    asked = dataclasses.replace(asked, attention_backend="auto", **changes, **MESHES[mesh])
    with on_cuda(asked, with_another_for_one(registry, noted)) as (engine, devices):
        assert {each.name for each in noted if not each.capture and each.phase is Phase.DECODE} == {"one", "many"}, "warmed up"
        for found, wanted in zip(told_of(engine, batches), expected, strict=True):
            assert_equal(found, wanted, within=1e-4)
        captures = engine._runner.graphs is not None
        assert captures == ("check_attention" not in changes)
        assert not any(device.waits for device in devices) or "check_attention" in changes
        assert "one" in engine.facts.attn_backend
    assert_each_has_its_own(noted)
    assert {each.name for each in noted if each.refreshed} == ({"one", "many"} if captures else set())


@pytest.mark.parametrize(("tp", "changes"), [(1, {}), (2, {}), (1, {"graphs": False}), (1, {"draft_length": "3"})])
def test_so_is_what_is_guessed_and_verified(registry: Registry, tp: int, changes: Mapping[str, object]) -> None:
    """And what the draft model plans, which has a backend of its own for one request, too."""
    asked, noted = by_itself(**{"draft_length": "2", **changes}), set[Noted]()
    requests = [each for each in every_kind() if "logprobs" not in each.request_id and not each.embed]
    requests = [dataclasses.replace(each, prompt_token_ids=each.prompt_token_ids[:20]) for each in requests]
    batches = [requests[:1], requests, requests[:2]]
    here = Engine.build(asked, registry)
    expected = told_of(here, batches)
    asked = dataclasses.replace(asked, attention_backend="auto", tp=tp)
    with on_cuda(asked, with_another_for_one(registry, noted)) as (engine, _):
        for found, wanted in zip(told_of(engine, batches), expected, strict=True):
            assert_equal(found, wanted, within=1e-4)
        assert engine.meter.stats().drafts == here.meter.stats().drafts
    assert_each_has_its_own(noted)
    verified = {(each.name, each.refreshed) for each in noted if each.phase is Phase.VERIFY}
    eagerly = changes.get("graphs") is False
    untold = {each.name for each in noted if each.phase is Phase.VERIFY and each.untold}
    assert untold == (set() if eagerly or tp > 1 else {"one"}), "of one request, the device finds where verifications begin"
    assert verified >= ({("one", False), ("many", False)} if eagerly else {("one", True), ("many", True)})
