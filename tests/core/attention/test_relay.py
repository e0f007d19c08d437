"""A backend's hooks are checked when it is registered, and called with the arguments they take."""

from __future__ import annotations

import pytest
from core.attention.batches import Planner, make_batch

from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import ForwardBatch
from enginery.errors import PluginError
from enginery.plugin.hookspecs import hookimpl


def test_hook_plan_forward_metadata_gets_the_arguments_it_names() -> None:
    class Both(Planner):
        @hookimpl
        def plan_forward_metadata(self, capture: bool, batch: ForwardBatch) -> object:
            self.captured = capture
            return super().plan_forward_metadata(batch)

    for backend in (Planner(), Both()):
        batch = make_batch([2])
        BackendRelay(backend, "a test").plan(batch, capture=True)
        assert batch.plan is not None


def test_hook_init_mha_chunk_metadata_takes_as_many_arguments_as_the_backend_wants() -> None:
    class TakesBatch(Planner):
        @hookimpl
        def init_mha_chunk_metadata(self, batch: ForwardBatch) -> object:
            return ("batch",)

    class TakesFlag(Planner):
        @hookimpl
        def init_mha_chunk_metadata(self, batch: ForwardBatch, disable_ragged: bool) -> object:
            return ("batch", disable_ragged)

    answers = []
    for backend in (TakesBatch(), TakesFlag(), Planner()):
        relay = BackendRelay(backend, "a test")
        answers.append(relay.ask("init_mha_chunk_metadata", batch=make_batch([2]), chunks=(), disable_ragged=True))
    assert answers == [("batch",), ("batch", True), None]


def test_what_is_no_backend_is_refused_with_the_plugin_s_name() -> None:
    with pytest.raises(PluginError, match="plugin bad built 1, which is no attention backend: it has no backend_id"):
        BackendRelay(1, "plugin bad")  # type: ignore[arg-type]


def test_a_backend_that_does_not_plan_is_refused() -> None:
    class Forgot:
        backend_id = "forgot#0"

    with pytest.raises(PluginError, match="plugin bad: Forgot has no @hookimpl plan_forward_metadata"):
        BackendRelay(Forgot(), "plugin bad")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: _with(lambda self, batches: None), "batches"),
        (lambda: _with(lambda self, batch, needed: None), "needed"),
        (lambda: _with(lambda self, batch, **rest: None), "rest"),
        (lambda: _with(lambda self, batch, capture=False: None), "capture"),
        (lambda: _with(lambda self, batch: None, name="plan_forward_metdata"), "plan_forward_metadata"),
    ],
    ids=["wrong name", "extra required argument", "catch-all", "default", "misspelt hook"],
)
def test_a_wrong_signature_is_refused_at_once_by_the_broken_rule(make, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        BackendRelay(make(), "a test")


def _with(function, name: str = "plan_forward_metadata") -> object:
    function.__name__ = name
    return type("Bad", (), {"backend_id": "bad#0", name: hookimpl(function)})()


def test_a_plan_of_none_is_refused() -> None:
    class Lazy(Planner):
        @hookimpl
        def plan_forward_metadata(self, batch: ForwardBatch) -> None:
            return None

    with pytest.raises(PluginError, match="answered plan_forward_metadata with None"):
        BackendRelay(Lazy(), "a test").plan(make_batch([1]))
