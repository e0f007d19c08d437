"""The sparse coordinator is there before the backends, which are given it when they are built, or None."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from engine.rank_threads import on_threads
from installed import install

from enginery.config.schema import EngineOptions
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.errors import PluginError, Unsupported
from enginery.plugin.registry import Registry

PLUGIN = '''
import dataclasses

from enginery.api import AttnBackendSpec, SparseCoordinatorSpec, hookimpl
from enginery_attn_torch.spec import TORCH

events = []
places = []


class InMemoryCoordinator:
    """Knows the pool, and nothing of backends: there are none yet."""

    def __init__(self, context):
        self.coordinator_id = context.instance
        self.num_layers = len(context.geometry.layers)
        self.pool = context.pool


@hookimpl
def register_sparse_coordinators():
    return [SparseCoordinatorSpec(name="in-memory", api=(2, 0), summary="pages in a dict")]


@hookimpl
def create_sparse_coordinator(context):
    events.append(("coordinator", context.instance))
    places.append(context.parallel)
    return InMemoryCoordinator(context)


@hookimpl
def register_attn_backends():
    sparse = dataclasses.replace(TORCH.capabilities, sparse=True)
    return [
        AttnBackendSpec(name="watching", api=(2, 0), priority=1, summary="torch", capabilities=sparse),
        AttnBackendSpec(name="dense", api=(2, 0), priority=1, summary="torch", capabilities=TORCH.capabilities),
    ]


@hookimpl
def create_attn_backend(name, context):
    from enginery_attn_torch.backend import TorchAttention

    events.append(("backend", context.coordinator))
    places.append(context.parallel)
    assert context.coordinator is None or context.coordinator.pool is context.pool
    return TorchAttention(context)
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A distribution with a coordinator and a backend, found like any other."""
    install(tmp_path, "watching-plugin", "watching_plugin", PLUGIN, name="watching")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("watching_plugin")
    yield module
    monkeypatch.undo()
    del sys.modules["watching_plugin"]


def test_the_coordinator_is_built_before_the_backend_and_given_to_it(plugin) -> None:
    asked = EngineOptions(attention_backend="watching", sparse_coordinator="in-memory", num_pages=8)
    build_parts(asked, Registry.load())
    (first, second) = plugin.events
    assert first == ("coordinator", "in-memory#0")
    assert second[0] == "backend"
    assert isinstance(second[1], plugin.InMemoryCoordinator)
    assert second[1].num_layers > 0


def test_both_see_which_of_several_ranks_they_are_on(plugin) -> None:
    asked = EngineOptions(attention_backend="watching", sparse_coordinator="in-memory", num_pages=8, tp=2)
    with on_threads(asked, Registry.load()):
        pass
    assert sorted((place.tensor_rank, place.tensor_size) for place in plugin.places) == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_none_means_configured_off(plugin) -> None:
    build_parts(EngineOptions(attention_backend="watching", num_pages=8), Registry.load())
    assert plugin.events == [("backend", None)]


def test_an_unknown_coordinator_is_refused_with_the_near_names_before_anything_is_built(plugin) -> None:
    with pytest.raises(PluginError, match="no sparse coordinator 'in-memry'; did you mean in-memory"):
        Engine.build(EngineOptions(attention_backend="watching", sparse_coordinator="in-memry"), Registry.load())
    assert plugin.events == []


def test_a_coordinator_beside_a_backend_that_is_not_sparse_is_refused_before_anything_is_built(plugin) -> None:
    with pytest.raises(Unsupported, match=r"in-memory, from plugin watching .* never asked: the attention backend dense is not"):
        build_parts(EngineOptions(attention_backend="dense", sparse_coordinator="in-memory", num_pages=8), Registry.load())
    assert plugin.events == []


@pytest.mark.parametrize("built", ["a text", object(), type("Named", (), {"coordinator_id": "x"})])
def test_what_is_no_coordinator_is_refused_with_its_plugin(plugin, monkeypatch, built) -> None:
    monkeypatch.setattr(plugin, "InMemoryCoordinator", lambda context: built)
    with pytest.raises(
        PluginError,
        match=r"\(watching-plugin==1.0\) built .* is no SparseCoordinator: it has no coordinator_id",
    ):
        build_parts(EngineOptions(attention_backend="watching", sparse_coordinator="in-memory", num_pages=8), Registry.load())
