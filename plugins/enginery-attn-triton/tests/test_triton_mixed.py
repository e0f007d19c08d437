"""Captured prefills and mixed steps, without a graph: one plan serves steps of any requests, and rows of nobody are zero."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from enginery.api import AttnLayerFacts, LatentFacts, Phase, StalePlan, Unsupported
from enginery.testing.cases import AttnCase
from enginery.testing.rules import compare
from enginery.testing.suite import AttnBackendSuite
from enginery.testing.workbench import Workbench
from enginery_attn_triton.mixed import MixedState
from enginery_attn_triton.plan import Planner
from enginery_attn_triton.tiling import Device, LayerCuts

PLAIN = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=64)
LATENT = AttnLayerFacts(
    num_heads=4, num_kv_heads=1, head_dim=48, latent=LatentFacts(rank=32, rope_dim=16, nope_dim=32, value_dim=32)
)
MOST_REQUESTS = 8
STEPS = (
    ((5, 1), (40, 1), (0, 20), (17, 3)),
    ((700, 20),),
    ((700, 1), (700, 1), (300, 9)),
    ((3, 1),) * MOST_REQUESTS,
    ((0, 3),) * MOST_REQUESTS,
    ((64, 1),),
)


class InTriton(AttnBackendSuite):
    """Its subject alone is used here."""

    __test__ = False
    backend = "triton"


def bench_of(facts: AttnLayerFacts, *, most_rows: int) -> Workbench:
    case = AttnCase(facts=facts, page_size=16, dtype="float32")
    bench = Workbench(InTriton.subject(), case, num_tokens=3000)
    assert bench.relay.ask("init_graph_state", max_batch_size=MOST_REQUESTS, max_num_tokens=MOST_REQUESTS)
    assert bench.relay.ask("init_mixed_graph_state", max_batch_size=MOST_REQUESTS, max_num_tokens=most_rows)
    return bench


def padded(bench: Workbench, turns, num_rows: int, *, length: int = 1):
    batch = dataclasses.replace(bench.batch(turns, Phase.MIXED), decode_len=length)
    return bench.pad(batch, requests=0, tokens=num_rows - batch.num_tokens)


def nobody(bench: Workbench, num_rows: int, *, length: int = 1):
    return padded(bench, [], num_rows, length=length)


def mixed_step(bench: Workbench, steps):
    """Of 64 rows."""
    return padded(bench, bench.turns(steps), 64)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "facts",
    [PLAIN, dataclasses.replace(PLAIN, sliding_window=40), dataclasses.replace(PLAIN, sinks=True), LATENT],
    ids=["plain", "window", "sinks", "latents"],
)
@pytest.mark.parametrize("length", [1, 4])
def test_a_captured_plan_serves_steps_of_any_requests(facts: AttnLayerFacts, length: int) -> None:
    """length: rows of each that decodes; where there are several, drafts are verified."""
    bench = bench_of(facts, most_rows=160)
    for num_rows, steps in ((160, STEPS[:1]), (40, STEPS)):  # the smaller is planned when tables of the larger are full
        captured = bench.relay.plan(nobody(bench, num_rows, length=length), capture=True)
        assert captured.plan is not None
        whole = bench.guarded_out(num_rows)
        bench.call_leaf(bench.inputs([], num_rows), captured, captured.plan, whole[1:-1])
        assert not whole[1:-1].any(), "as it is captured, all rows are nobody's"
        for cached_and_new in (*steps, ((0, num_rows),)):
            bench.forget()
            turns = bench.turns([(cached, length if new == 1 else new) for cached, new in cached_and_new])
            bench.relay.refresh(captured.plan, padded(bench, turns, num_rows, length=length))
            whole = bench.guarded_out(num_rows)
            bench.call_leaf(bench.inputs(turns, num_rows), captured, captured.plan, whole[1:-1])
            found, expected = bench.rows_of(whole, turns), [bench.expected(turn) for turn in turns]
            compare(found, expected, dtype=bench.case.dtype, leeway=1.0, what=f"{cached_and_new} in {num_rows} rows")
            assert not whole[1 + sum(turn.new for turn in turns) : -1].any(), "rows of nobody are zero"


@pytest.mark.usefixtures("interpreter")
def test_a_step_that_there_is_no_room_for_is_refused() -> None:
    bench = bench_of(PLAIN, most_rows=64)
    captured = bench.relay.plan(nobody(bench, 64), capture=True)
    assert captured.plan is not None
    for steps, why in (
        (((1, 1),) * 9, "9 requests of up to 1 pages do not fit"),
        (((0, 2),) * 30, "the 30 prompts of a step of 64"),
    ):
        batch = mixed_step(bench, steps)
        with pytest.raises(Unsupported, match=why):
            bench.relay.refresh(captured.plan, batch)


@pytest.mark.usefixtures("interpreter")
def test_a_page_table_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginery_attn_triton.mixed.MIXED_TABLE_BYTES", 4 * 11)
    bench = bench_of(PLAIN, most_rows=64)
    captured = bench.relay.plan(nobody(bench, 64), capture=True)
    assert captured.plan is not None
    bench.relay.refresh(captured.plan, mixed_step(bench, [(160, 1)]))
    with pytest.raises(Unsupported, match=r"2 requests of up to 11 pages do not fit .* 8 requests and 11 entries"):
        bench.relay.refresh(captured.plan, mixed_step(bench, [(160, 1), (3, 2)]))


@pytest.mark.usefixtures("interpreter")
def test_a_plan_of_before_the_memory_was_taken_anew_is_stale() -> None:
    bench = bench_of(PLAIN, most_rows=64)
    captured = bench.relay.plan(nobody(bench, 64), capture=True)
    assert captured.plan is not None
    bench.relay.ask("init_mixed_graph_state", max_batch_size=MOST_REQUESTS, max_num_tokens=64)
    with pytest.raises(StalePlan, match="memory of before it was taken anew, which is epoch 1"):
        bench.relay.refresh(captured.plan, nobody(bench, 64))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "num_units"), [(16, 2, 128, 170), (8, 1, 128, 188), (4, 1, 256, 170)])
@pytest.mark.parametrize("most_requests", [4, 16, 64])
def test_what_is_captured_has_room_for_all_keys_of_one_request_on_a_device_with_little_shared_memory(
    heads: int, kv_heads: int, head_dim: int, num_units: int, most_requests: int
) -> None:
    """Compute capability 12.0, where fewer programs run at once than on Hopper. Of few requests, it used to cut more parts."""
    facts = AttnLayerFacts(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    device = Device(num_units=num_units, shared_bytes=99 << 10, chained=True)
    planner = Planner(cuts=LayerCuts((facts,), itemsize=2, device=device), page_size=16, device=torch.device("cpu"), facts=device)
    num_rows, length = 64, 32000
    mixed = MixedState(planner, max_requests=most_requests, max_rows=num_rows, num_pages=2 * length // 16)
    (split,) = mixed.tables(num_rows, 1).decode.values()
    case = AttnCase(facts=PLAIN, page_size=16, dtype="float32")
    bench = Workbench(InTriton.subject(), case, num_tokens=100)
    batch = bench.batch(bench.turns([(0, 1), (0, num_rows - 1)]), Phase.MIXED)
    pages = torch.arange(2 * length // 16, dtype=torch.int32).view(2, -1)
    mixed.refresh(
        dataclasses.replace(
            batch,
            kv_lens_cpu=torch.tensor([length, num_rows - 1], dtype=torch.int32),
            views={**batch.views, "full": dataclasses.replace(batch.views["full"], page_table_cpu=pages)},
        )
    )
    seen = torch.zeros(length, dtype=torch.bool)
    for request, _, begin, end, *_ in split.items.tolist():
        if request == 0:
            seen[begin:end] = True
    assert bool(seen.all())
