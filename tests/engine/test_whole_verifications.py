"""Chains of guesses that are verified beside prompts: one graph of the target, and one of the draft model's steps behind it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from engine import captured_backends
from engine.captured_backends import CapturedTorch
from engine.rank_answers import PROMPTS, assert_equal
from engine.rank_pair import request, serve
from engine.test_cuda_paths import by_itself, on_cuda, options

from enginery.api import ForwardBatch, ForwardPlan, Phase, Unsupported, hookimpl
from enginery.config import resolve
from enginery.contracts.request import GenerationRequest
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.drafts.draft_graphs import DraftGraphs
from enginery.worker.drafts.draft_model import DraftModel
from enginery.worker.paths.mixed_graphs import MixedGraphs, MixedKey

ROOM = {"max_batch_requests": 24, "num_pages": 300, "page_size": 8}


class OneRowEach(CapturedTorch):
    """Captures no steps in which requests verify drafts beside prompts."""

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        if capture and batch.phase is Phase.MIXED and batch.decode_len > 1:
            raise Unsupported("one row of each request")
        return super().plan_forward_metadata(batch, capture)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[MixedKey]:
    """What was replayed of steps that verify guesses beside prompts."""
    found, replay = list[MixedKey](), MixedGraphs._replay

    def noting(pieces: MixedGraphs, captured: Any, step: Any, batch: Any) -> Any:
        forwarded = replay(pieces, captured, step, batch)
        found.extend(key for key, each in pieces._captured.items() if each is captured and step.verifies)
        return forwarded

    monkeypatch.setattr(MixedGraphs, "_replay", noting)
    return found


@pytest.fixture
def gone_on(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """By which the steps behind each followed one were run."""
    found, by_model, by_graphs = list[type](), DraftModel.go_on, DraftGraphs.go_on

    def eagerly(model: DraftModel, *given: Any) -> Any:
        found.append(DraftModel)
        return by_model(model, *given)

    def as_graph(graphs: DraftGraphs, *given: Any) -> Any:
        before = len(found)
        guesses = by_graphs(graphs, *given)
        found.extend([DraftGraphs] if len(found) == before else [])
        return guesses

    monkeypatch.setattr(DraftModel, "go_on", eagerly)
    monkeypatch.setattr(DraftGraphs, "go_on", as_graph)
    return found


def waves(**params: object) -> list[GenerationRequest]:
    """The later ones arrive while the first decode, as there is room for few tokens a step."""
    return [request(f"{at}", [at, *PROMPTS[at % 4][:19]], max_tokens=24, **params) for at in range(6)]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("length", ["1", "3"])
def test_they_are_one_graph_and_change_no_token(
    registry: Registry, replayed: list[MixedKey], gone_on: list[type], length: str, params: dict[str, object]
) -> None:
    asked, requests = dataclasses.replace(by_itself(**ROOM), draft_length=length), waves(**params)
    expected = serve(Engine.build(options(**ROOM), registry), requests)
    with on_cuda(asked, registry) as (engine, devices):
        assert_equal(serve(engine, requests), expected)
        assert {(key.whole, key.length) for key in replayed} == {(True, 1 + int(length))}
        assert set(gone_on) == {DraftGraphs}
        drafts = engine.meter.stats().drafts
        assert drafts.accepted > 0.8 * drafts.drafted
        assert not any(device.waits for device in devices)


def test_more_requests_than_graphs_have_room_for_are_guessed_for_eagerly(
    registry: Registry, gone_on: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_graph_sizes", lambda *given, **named: (2, 40))
    asked, requests = dataclasses.replace(by_itself(**ROOM), draft_length="3"), waves()
    expected = serve(Engine.build(options(**ROOM), registry), requests)
    with on_cuda(asked, registry) as (engine, _):
        assert_equal(serve(engine, requests), expected)
    assert set(gone_on) == {DraftGraphs, DraftModel}


def test_a_backend_that_captures_none_of_them_is_called_between_graphs(
    registry: Registry, replayed: list[MixedKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are they asked for again in idle moments."""
    monkeypatch.setattr(captured_backends, "CapturedTorch", OneRowEach)
    asked, requests = dataclasses.replace(by_itself(**ROOM), draft_length="3"), waves()
    expected = serve(Engine.build(options(**ROOM), registry), requests)
    with on_cuda(asked, registry) as (engine, _):
        assert_equal(serve(engine, requests), expected)
        assert {key.whole for key in replayed} == {False}
        idle = 0
        while engine.prepare():
            idle += 1
        assert 0 < idle < 100
        pieces = engine._runner.pieces
        assert pieces is not None
        assert pieces._refused == {4}
