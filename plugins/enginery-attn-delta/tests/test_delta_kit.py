"""The conformance kit, and captured plans: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from engine.test_graphs import AgainAndAgain
from few_checks import ABOUT_PLANS, few
from pairwise import spread

from enginery.api import STATE, Accepted, AttnLayerFacts, Phase, RecurrentFacts, Unsupported
from enginery.testing.cases import AttnCase
from enginery.testing.check_plans import CapturedCall, verifies_captured
from enginery.testing.conformance import Check, checks_of
from enginery.testing.rules import compare
from enginery.testing.subject import Subject
from enginery.testing.suite import AttnBackendSuite
from enginery.testing.workbench import Workbench
from enginery_attn_delta import backend, plan

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


def bench_of(most_rows: int = 4, **facts: object) -> Workbench:
    rule = RecurrentFacts(**{"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 8, "conv_kernel": 4, **facts})
    layer = AttnLayerFacts(num_heads=2, num_kv_heads=2, head_dim=16, recurrent=rule)
    made = Workbench(TestDeltaInterpreted.subject(), AttnCase(facts=layer, page_size=16, dtype="float32"))
    made.relay.ask("init_graph_state", max_batch_size=8, max_num_tokens=most_rows)
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


FORMS = (
    {"rule": "delta", "decay": "head"},
    {"rule": "linear", "decay": "head", "ssm": True},
    {"rule": "scan", "decay": "channel", "value_dim": 1, "conv_kernel": 0},
    {"rule": "conv", "decay": "constant", "key_dim": 0, "value_dim": 1},
)


@interpreted
@pytest.mark.parametrize("facts", spread(FORMS, 2), ids=str)
def test_drafts_are_verified_in_a_graph_and_states_moved_in_another(facts: dict[str, object]) -> None:
    assert verifies_captured(bench_of(24, **facts), AgainAndAgain()) is None


@interpreted
def test_a_graph_makes_the_checkpoints_of_the_batch_that_it_is_replayed_for() -> None:
    """And none of those before: states at these are those of the first rows, if they stand."""
    bench = bench_of(24, rule="delta", decay="head")
    step = CapturedCall(bench, AgainAndAgain(), size=4, length=3)
    for rows, right in (([0, 2, 3], [0, 1, 2]), ([1, 0, 3], [2, 2, 1]), ([0, 0, 0], [1, 1, 1])):
        bench.forget()
        turns = [turn._replace(new=3) for turn in bench.turns([(5, 8), (0, 8), (20, 8)])]
        pages, before = [bench.tokens(1).states[0] for _ in turns], bench.memory()
        batch = step.padded(turns)
        marks = {"checkpoints_cpu": [*pages, 0], "checkpoint_rows_cpu": [*rows, 0]}
        view = dataclasses.replace(
            batch.states, **{name: torch.tensor(values, dtype=torch.int32) for name, values in marks.items()}
        )
        step.replay(turns, dataclasses.replace(batch, views={**batch.views, STATE: view}))
        step.move_states(right)
        passed = [0 < after <= 1 + count for after, count in zip(rows, right, strict=True)]
        for page, made in zip(pages, passed, strict=True):
            assert made or all(torch.equal(old[page], new[page]) for old, new in zip(before, bench.memory(), strict=True))
        resumed = [
            turn._replace(tokens=dataclasses.replace(turn.tokens, states=[page]), cached=turn.cached + after, new=2)
            for turn, page, after, made in zip(turns, pages, rows, passed, strict=True)
            if made
        ]
        if resumed:
            compare(bench.run(resumed, Phase.PREFILL), [bench.expected(turn) for turn in resumed], dtype="float32", what=f"{rows}")


@interpreted
def test_rows_behind_checkpoints_are_not_for_kernels_that_read_states_before_they_wait() -> None:
    """The same step writes these states; those of single tokens that follow nothing were there before."""
    bench = bench_of(rule="delta", decay="head")
    turns = bench.turns([(3, 2), (0, 2)])
    batch, pages = bench.batch(turns, Phase.PREFILL), [bench.tokens(1).states[0] for _ in turns]
    marks = {"checkpoints_cpu": pages, "checkpoint_rows_cpu": [1, 1]}
    view = dataclasses.replace(batch.states, **{name: torch.tensor(values, dtype=torch.int32) for name, values in marks.items()})
    planned = bench.relay.plan(dataclasses.replace(batch, views={**batch.views, STATE: view})).plan
    assert planned.prefill.tiles is None
    assert planned.rest.tiles.tolist() == [[0, 0], [1, 0]]


@interpreted
def test_all_graphs_keep_what_they_verify_in_one_place() -> None:
    """Of twenty sizes each would take what the largest does."""
    bench = bench_of(24, rule="delta", decay="head")
    steps = [CapturedCall(bench, AgainAndAgain(), size=size, length=3) for size in (2, 4)]
    kept = [bench.backend._unsettled[step.batch.plan][bench.layer.local_id] for step in steps]
    assert [len(each.mixed) for each in kept] == [6, 12]
    assert len({(each.mixed.data_ptr(), each.gates.data_ptr()) for each in kept}) == 1


@interpreted
def test_two_captured_plans_have_memory_of_their_own() -> None:
    """Micro-batches put two into one graph."""
    bench = bench_of(rule="delta", decay="head")
    plans = [bench.relay.plan(bench.pad(bench.batch([], Phase.DECODE), requests=2, tokens=2), capture=True).plan for _ in range(2)]
    assert plans[0].decode.reads.data_ptr() != plans[1].decode.reads.data_ptr()


@interpreted
def test_the_first_kernels_of_a_commit_wait_for_the_rows_that_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are made on the device just before, and read before a kernel waits for the one in front of it."""
    chained: list[tuple[int, bool]] = []
    monkeypatch.setattr(plan, "can_chain", lambda device: True)
    bench = bench_of(rule="delta", decay="head")
    batch = bench.relay.plan(bench.batch(bench.turns([(5, 3), (0, 3)]), Phase.VERIFY))
    assert batch.plan.verified is not None
    mixed, gates = bench.inputs(bench.turns([(5, 3), (0, 3)]), batch.num_tokens)
    layers = [dataclasses.replace(bench.layer, local_id=number) for number in range(2)]
    bench.backend._unsettled[batch.plan] = {layer.local_id: backend.Kept(layer, mixed, gates) for layer in layers}
    monkeypatch.setattr(
        bench.backend, "advance_rows", lambda mixed, gates, layer, rows, out: chained.append((layer.local_id, rows.chained))
    )
    bench.leaf.ask("commit_state", plan=batch.plan, accepted=Accepted(counts=torch.tensor([1, 2])))
    assert chained == [(0, False), (1, True)]


@interpreted
@pytest.mark.parametrize(("requests", "rows"), [(5, 5), (4, 12)])
def test_what_is_larger_than_it_was_told_is_not_captured(requests: int, rows: int) -> None:
    bench = bench_of(rule="delta", decay="head")
    bench.relay.ask("init_graph_state", max_batch_size=4, max_num_tokens=8)
    empty = dataclasses.replace(bench.batch([], Phase.VERIFY), decode_len=rows // requests)
    with pytest.raises(Unsupported, match="captures steps of up to 4 requests and 8 rows"):
        bench.relay.plan(bench.pad(empty, requests=requests, tokens=rows), capture=True)
