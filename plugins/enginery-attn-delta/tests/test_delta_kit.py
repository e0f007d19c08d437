"""The conformance kit, and captured plans: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from few_checks import ABOUT_PLANS, few

from enginery.api import AttnLayerFacts, Phase, RecurrentFacts, Unsupported
from enginery.testing.cases import AttnCase
from enginery.testing.conformance import Check, checks_of
from enginery.testing.rules import compare
from enginery.testing.subject import Subject
from enginery.testing.suite import AttnBackendSuite
from enginery.testing.workbench import Workbench

CAN_INTERPRET = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
interpreted = pytest.mark.skipif(
    not CAN_INTERPRET, reason="kernels are interpreted where Triton is installed, without a CUDA device"
)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes that a test starts."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@interpreted
@pytest.mark.usefixtures("interpreter")
class TestDeltaInterpreted(AttnBackendSuite):
    backend = "delta"

    @classmethod
    def subject(cls) -> Subject:
        """Found with the interpreter switched on. It claims fewer dims: any two claimed values meet in a case."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            found = super().subject()
        can = dataclasses.replace(found.can, head_dims=frozenset({16, 64}))
        return dataclasses.replace(
            found, offer=dataclasses.replace(found.offer, spec=dataclasses.replace(found.offer.spec, capabilities=can))
        )

    @classmethod
    def checks(cls, subject: Subject) -> list[Check]:
        return few(checks_of(subject), without=["another-process"], of_plans=ABOUT_PLANS)


@pytest.mark.gpu
class TestDeltaOnCuda(AttnBackendSuite):
    backend = "delta"
    device = "cuda"


def bench_of(**facts: object) -> Workbench:
    rule = RecurrentFacts(key_heads=2, value_heads=4, key_dim=16, value_dim=8, conv_kernel=4, **facts)
    layer = AttnLayerFacts(num_heads=2, num_kv_heads=2, head_dim=16, recurrent=rule)
    made = Workbench(TestDeltaInterpreted.subject(), AttnCase(facts=layer, page_size=16, dtype="float32"))
    made.relay.ask("init_graph_state", max_batch_size=4, max_num_tokens=4)
    return made


@interpreted
@pytest.mark.parametrize("facts", [{"rule": "delta", "decay": "head"}, {"rule": "linear", "decay": "head", "ssm": True}], ids=str)
def test_a_captured_plan_stays_where_it_is_and_is_refreshed_for_other_pages(facts: dict[str, object]) -> None:
    bench = bench_of(**facts)
    captured = bench.relay.plan(bench.pad(bench.batch([], Phase.DECODE), requests=4, tokens=4), capture=True)
    place = captured.plan.decode.reads.data_ptr()
    for cached in ((20, 0, 15, 16), (9, 30), (1,)):
        turns = bench.turns([(length, 1) for length in cached])
        compare(bench.replay(captured, turns), [bench.expected(turn) for turn in turns], dtype="float32", what=f"{cached}")
        assert captured.plan.decode.reads.data_ptr() == place


@interpreted
def test_two_captured_plans_have_memory_of_their_own() -> None:
    """Micro-batches put two into one graph."""
    bench = bench_of(rule="delta", decay="head")
    plans = [bench.relay.plan(bench.pad(bench.batch([], Phase.DECODE), requests=2, tokens=2), capture=True).plan for _ in range(2)]
    assert plans[0].decode.reads.data_ptr() != plans[1].decode.reads.data_ptr()


@interpreted
def test_a_prefill_is_not_captured() -> None:
    bench = bench_of(rule="delta", decay="head")
    with pytest.raises(Unsupported, match="captures decoding steps of one token"):
        bench.relay.plan(bench.batch(bench.turns([(0, 5)]), Phase.PREFILL), capture=True)
