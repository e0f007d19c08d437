"""A plugin's backend around another's has every hook that the other has."""

from __future__ import annotations

from core.attention.batches import Planner, make_batch

from enginery.attention.hookspecs import BackendHooks
from enginery.attention.relay import HOOKS, BackendRelay
from enginery.attention.wrapper import Wrapper
from enginery.contracts.attention import AttnBackend
from enginery.contracts.plan import ForwardPlan
from enginery.plugin.checker import check
from enginery.plugin.hookspecs import hookimpl


class Graphed(Planner):
    """Has one hook besides planning."""

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        self.asked = (max_batch_size, max_num_tokens)
        return True


class Counting(Wrapper):
    kind = "counting"

    def __init__(self, inner: Planner) -> None:
        super().__init__(inner)
        self.num_plans = 0

    @hookimpl
    def plan_forward_metadata(self, batch, capture):
        self.num_plans += 1
        return super().plan_forward_metadata(batch, capture)


def test_a_wrapper_is_a_backend_with_every_hook_and_its_own_beside_them() -> None:
    inner = Graphed("inner#0")
    outer = Counting(inner)
    assert outer.backend_id == "counting(inner#0)"
    assert check(outer, BackendHooks) == []
    relay = BackendRelay(outer, "plugin mine (mine==1)")
    assert relay.ask("init_graph_state", max_batch_size=4, max_num_tokens=8) is True
    assert inner.asked == (4, 8)
    relay.plan(make_batch([1, 2]))
    assert outer.num_plans == 1


def test_what_the_inner_one_lacks_the_wrapper_lacks() -> None:
    relay = BackendRelay(Counting(Planner("inner#0")), "plugin mine (mine==1)")
    asked = {"plan": relay.plan(make_batch([1, 2])).plan}
    assert relay.ask("init_graph_state", max_batch_size=4, max_num_tokens=8, **asked) is None
    assert relay.ask("device_prologue", **asked) is None
    assert set(HOOKS) >= {"init_graph_state", "device_prologue"}


def test_a_relay_tells_which_hooks_the_inner_one_has_or_the_wrapper_adds() -> None:
    class Adding(Wrapper):
        @hookimpl
        def device_prologue(self, plan: ForwardPlan) -> bool:
            return True

    def hooks(backend: AttnBackend) -> set[str]:
        relay = BackendRelay(backend, "plugin mine (mine==1)")
        return {hook for hook in ("plan_forward_metadata", "init_graph_state", "device_prologue", "verify_mask") if relay.has(hook)}

    assert hooks(Counting(Planner("inner#0"))) == {"plan_forward_metadata"}
    assert hooks(Counting(Counting(Graphed("inner#0")))) == {"plan_forward_metadata", "init_graph_state"}
    assert hooks(Counting(Adding(Planner("inner#0")))) == {"plan_forward_metadata", "device_prologue"}
