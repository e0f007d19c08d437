"""A backend's hooks are checked when it is registered, and called with the arguments they take."""

from __future__ import annotations

import pytest
import torch
from core.attention.batches import Planner, make_batch

from enginery.attention.relay import BackendRelay
from enginery.attention.socket import LayerSocket
from enginery.attention.watch import Watch
from enginery.contracts.attention import AttnLayerFacts, GlobalLayerId, LayerSpec, LocalLayerId
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.plan import ForwardPlan, PlanKey
from enginery.errors import PluginError, StalePlan, Unsupported
from enginery.plugin.hookspecs import hookimpl

LAYER = LayerSpec(
    global_id=GlobalLayerId(0),
    local_id=LocalLayerId(0),
    facts=AttnLayerFacts(num_heads=1, num_kv_heads=1, head_dim=2),
    scale=1.0,
)


def test_hook_plan_forward_metadata_gets_the_arguments_it_names() -> None:
    class Both(Planner):
        @hookimpl
        def plan_forward_metadata(self, capture: bool, batch: ForwardBatch) -> object:
            self.captured = capture
            return super().plan_forward_metadata(batch, capture)

    for backend in (Planner(), Both()):
        batch = BackendRelay(backend, "a test").plan(make_batch([1], phase=Phase.DECODE), capture=True)
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
        attend = Planner.attend

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
    with pytest.raises(PluginError, match=rf"(?s)^plugin bad: .*{said}"):
        BackendRelay(make(), "plugin bad")


def _with(function, name: str = "plan_forward_metadata") -> object:
    function.__name__ = name
    return type("Bad", (), {"backend_id": "bad#0", "attend": Planner.attend, name: hookimpl(function)})()


def test_a_plan_of_none_is_refused() -> None:
    class Lazy(Planner):
        @hookimpl
        def plan_forward_metadata(self, batch: ForwardBatch) -> None:
            return None

    with pytest.raises(PluginError, match="answered plan_forward_metadata with None"):
        BackendRelay(Lazy(), "a test").plan(make_batch([1]))


@pytest.mark.parametrize("wrong", ["string", "foreign"])
def test_a_plan_of_another_type_or_with_a_foreign_key_is_refused(wrong: str) -> None:
    """Hole 5."""

    class Wrong(Planner):
        @hookimpl
        def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> object:
            return "a plan" if wrong == "string" else ForwardPlan(key=PlanKey.of(batch, "other#0", capture=capture))

    with pytest.raises(PluginError, match="plugin bad: planner#0 answered plan_forward_metadata with"):
        BackendRelay(Wrong(), "plugin bad").plan(make_batch([1]))


class Swapped(Planner):
    def attend(self, q, k, v, layer, plan, batch, out) -> None:
        raise AssertionError("never called")


class Advances(Planner):
    def advance(self, mixed, gates, layer, batch, out) -> None:
        raise AssertionError("never called")


class NoMethod(Planner):
    attend = 7  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Swapped, "attend.* of Swapped must take q, k, v, layer, batch, plan, out, in this order"),
        (Advances, "advance.* of Advances must take mixed, gates, layer, batch, plan, out, in this order"),
        (NoMethod, "attend of NoMethod is 7, which cannot be called"),
        (lambda: type("None", (), {"backend_id": "a#0", "plan_forward_metadata": Planner.plan_forward_metadata})(), "neither"),
    ],
)
def test_per_layer_methods_that_are_missing_or_take_other_arguments_are_refused(make, said: str) -> None:
    """Hole 5: a backend without `attend`, or with swapped arguments, was accepted."""
    with pytest.raises(PluginError, match=rf"(?s)^plugin bad: .*{said}"):
        BackendRelay(make(), "plugin bad")


def test_another_id_than_the_one_given_is_refused() -> None:
    """Hole 5."""
    with pytest.raises(PluginError, match=r"backend_id is 'planner#0', but context\.instance is 'target/0/decode/mine#4'"):
        BackendRelay(Planner(), "a test", instance="target/0/decode/mine#4")


class Returns(Planner):
    def attend(self, q, k, v, layer, batch, plan, out):
        return q


class Idle(Planner):
    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        out[:1] = 1.0


WRONG = [
    (Returns(), r"returns a value from attend or advance; it must write to `out`"),
    (Idle(), "left 2 of 3 rows of `out` unwritten"),
]


@pytest.mark.parametrize(("backend", "said"), WRONG)
def test_a_result_that_is_not_written_to_out_is_noticed(backend: Planner, said: str) -> None:
    """Hole 5: wrong tokens, without a word. What is only left as it was, is noticed where it is watched."""
    relay = BackendRelay(backend, "a test", watch=Watch())
    batch = relay.plan(make_batch([1, 2]))
    rows = torch.ones(3, 1, 2)
    assert batch.plan is not None
    with pytest.raises(PluginError, match=said):
        relay.attend(rows, rows, rows, LAYER, batch, batch.plan, torch.zeros_like(rows))


def test_a_layer_for_a_method_that_the_backend_lacks_is_refused() -> None:
    relay = BackendRelay(Planner(), "a test")
    batch = relay.plan(make_batch([1]))
    assert batch.plan is not None
    with pytest.raises(Unsupported, match="planner#0 has no advance"):
        relay.advance(torch.ones(1, 2), torch.ones(1, 1), LAYER, batch, batch.plan, torch.ones(1, 1, 2))


def test_the_socket_hands_the_batch_s_plan_to_the_backend_and_refuses_a_batch_without() -> None:
    class Notes(Planner):
        def attend(self, q, k, v, layer, batch, plan, out) -> None:
            self.given = plan

    backend = Notes()
    relay = BackendRelay(backend, "a test")
    socket, rows = LayerSocket(relay), torch.ones(1, 1, 2)
    batch = make_batch([1])
    with pytest.raises(StalePlan, match="the batch has no plan"):
        socket.attend(rows, rows, rows, LAYER, batch, rows)
    batch = relay.plan(batch)
    socket.attend(rows, rows, rows, LAYER, batch, rows)
    assert backend.given is batch.plan
