"""All but FlashInfer itself: the backend over kernels written in torch, on the CPU, that keep plans as FlashInfer's wrappers do."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
import torch
from engine.test_graphs import AgainAndAgain
from stand_ins import LATENT, MLA, StandInSuite, on_the_cpu, plan_that_is_right

from enginery.api import (
    BackendContext,
    ChunkPlan,
    Denied,
    KVPiece,
    LatentFacts,
    Phase,
    PrefillStrategy,
    StalePlan,
    Unsupported,
)
from enginery.testing.cases import AttnCase
from enginery.testing.check_plans import MixedCall, _mixed_steps, verifies_captured
from enginery.testing.rules import compare
from enginery.testing.stage import Turn
from enginery.testing.subject import Subject
from enginery.testing.workbench import Workbench
from enginery_attn_flashinfer_mla import plan
from enginery_attn_flashinfer_mla.backend import FlashInferMla
from enginery_attn_flashinfer_mla.spec import FlashInferMlaOptions, make_spec
from enginery_attn_flashinfer_mla.torch_kernels import TorchKernels

ABSORBED, ONE_SHOT, CHUNKED = PrefillStrategy


def create(context: BackendContext) -> FlashInferMla:
    return FlashInferMla(context, TorchKernels)


class TestOnTorchKernels(StandInSuite):
    backend = "flashinfer-mla"

    @classmethod
    def subject(cls) -> Subject:
        return on_the_cpu(make_spec(), create)


def made(strategy: PrefillStrategy | None = None, *, latent: LatentFacts = LATENT, **options: Any) -> Workbench:
    case = AttnCase(facts=dataclasses.replace(MLA, latent=latent), page_size=4, dtype="bfloat16", strategy=strategy)
    return Workbench(on_the_cpu(make_spec(), create, FlashInferMlaOptions(**options)), case, num_tokens=2000)


def strategies(planned: Any) -> set[str]:
    return {str(part.strategy) if "strategy" in vars(part) else "absorbed" for part in planned.parts}


PROMPTS = [(0, 9), (31, 6), (50, 3), (0, 1)]


@pytest.mark.parametrize("strategy", PrefillStrategy)
def test_a_leaf_that_skips_prefills_has_no_wrappers_for_them_and_absorbs(strategy) -> None:
    bench = made(strategy, skip_prefill=True)
    assert strategies(plan_that_is_right(bench, PROMPTS, Phase.PREFILL)) == {"absorbed"}
    plan_that_is_right(bench, [(5, 1), (90, 1)], Phase.DECODE)
    assert not bench.backend.planner.wrappers().ragged._free
    answer = asked(bench)
    assert isinstance(answer, Denied)
    assert "skip_prefill" in answer.reason
    assert vars(bench.backend).keys() == vars(made(strategy).backend).keys()


def test_a_drafters_steps_are_planned_before_the_first_runs_without_kernels_for_prefills() -> None:
    bench = made(CHUNKED, skip_prefill=True)
    turns = bench.turns([(20, 3), (5, 3), (31, 3)])
    steps = [[Turn(turn.tokens, turn.cached + step, 1) for turn in turns] for step in range(3)]
    batches = [bench.batch(step, Phase.DECODE) for step in steps]
    batches = [bench.relay.plan(batch) for batch in batches]
    for batch, step in zip(batches, steps, strict=True):
        compare(bench.attend(batch, step), [bench.expected(turn) for turn in step], dtype="bfloat16", what="a draft step")


def asked(bench: Workbench) -> ChunkPlan | Denied:
    """For a prefill of 4 tokens after 20, of which 12 are in each of two chunks."""
    batch = bench.batch(bench.turns([(20, 4)]), Phase.PREFILL)
    starts = [torch.tensor([first], dtype=torch.int32) for first in (0, 12)]
    lens = [torch.tensor([length], dtype=torch.int32) for length in (12, 8)]
    chunks = tuple(KVPiece(index=i, starts_cpu=starts[i], lens_cpu=lens[i], causal=False) for i in range(2))
    return bench.leaf.ask("init_mha_chunk_metadata", batch=batch, chunks=chunks, disable_ragged=False)


def test_with_chunks_switched_off_a_cached_prefix_is_absorbed_and_other_prefills_are_ragged() -> None:
    bench = made(CHUNKED, chunked_prefix=False)
    assert strategies(plan_that_is_right(bench, PROMPTS, Phase.PREFILL)) == {"absorbed"}
    assert strategies(plan_that_is_right(bench, [(0, 9), (0, 30)], Phase.PREFILL)) == {"chunked"}
    assert strategies(plan_that_is_right(made(ONE_SHOT, chunked_prefix=False), PROMPTS, Phase.PREFILL)) == {"one-shot"}
    answer = asked(bench)
    assert isinstance(answer, Denied)
    assert "chunked_prefix" in answer.reason
    assert isinstance(asked(made(CHUNKED)), ChunkPlan)


def test_a_pass_over_the_steps_own_tokens_is_planned_where_it_is_run() -> None:
    for strategy, pieces in ((ONE_SHOT, 1), (CHUNKED, 1 + 5)):  # of 8 tokens of each request
        planned = plan_that_is_right(made(strategy), [(0, 9), (33, 6), (2, 3)], Phase.PREFILL)
        assert [len(part.chunk_plan.pieces) for part in planned.parts] == [pieces]


def test_dims_that_have_no_ragged_kernels_are_absorbed() -> None:
    glm = dataclasses.replace(LATENT, nope_dim=192, value_dim=256)
    bench = made(CHUNKED, latent=glm)
    assert strategies(plan_that_is_right(bench, PROMPTS, Phase.PREFILL)) == {"absorbed"}
    answer = asked(bench)
    assert isinstance(answer, Denied)
    assert "(256, 256)" in answer.reason


def test_more_rows_than_flashinfer_can_plan_are_planned_in_parts(monkeypatch) -> None:
    monkeypatch.setattr(plan, "MAX_ITEMS", 10)
    bench = made()
    assert bench.backend.planner.max_rows == 10 * 64 // 68
    planned = plan_that_is_right(bench, [(3, 5), (0, 1), (7, 20), (40, 2), (0, 0), (1, 4)], Phase.PREFILL)
    assert [part.rows for part in planned.parts] == [slice(0, 9), slice(9, 18), slice(18, 27), slice(27, 32)]
    assert [part.wrapper.item.q_lens for part in planned.parts] == [[5, 1, 3], [9], [8, 1], [1, 4]]
    assert [part.wrapper.item.kv_lens for part in planned.parts] == [[8, 1, 10], [19], [27, 41], [42, 5]]


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_no_plan_has_more_items_than_flashinfer_has_room_for(heads) -> None:
    """As FlashInfer counts tiles, whether all rows are of one request or each of its own."""
    rows = plan.max_rows(heads)
    tile = 64 if heads <= 64 else 128
    for q_lens in (np.full(1, rows), np.ones(rows, dtype=np.int64)):
        assert (-(-q_lens * heads // tile)).sum() <= plan.MAX_ITEMS
    assert rows > 5000


def test_wrappers_are_planned_again_when_their_plan_is_gone_and_not_before() -> None:
    bench = made(CHUNKED)
    turns = bench.turns(PROMPTS)
    batches = [bench.batch(turns, Phase.PREFILL) for _ in range(3)]
    batches = [bench.relay.plan(batch) for batch in batches]
    used = [[piece.wrapper.item for piece in batch.plan.parts[0].chunk_plan.pieces] for batch in batches]
    assert len({id(item) for items in used for item in items}) == sum(map(len, used)) > 9
    gone = used[1]
    batches[1] = dataclasses.replace(batches[1])
    gc.collect()
    batches[1] = bench.relay.plan(batches[1])
    assert {id(piece.wrapper.item) for piece in batches[1].plan.parts[0].chunk_plan.pieces} == {id(item) for item in gone}


def test_a_captured_plan_reads_what_was_refreshed_last_whatever_its_size() -> None:
    bench = made()
    bench.relay.ask("init_graph_state", max_batch_size=6, max_num_tokens=6)
    plans = {}
    for size in (6, 4):
        captured = bench.pad(bench.batch([], Phase.DECODE), requests=size, tokens=size)
        captured = bench.relay.plan(captured, capture=True)
        plans[size] = captured
    for size, cached in ((6, (200, 0, 15, 16, 90, 1)), (4, (9, 300)), (6, (1,))):
        turns = bench.turns([(length, 1) for length in cached])
        compare(bench.replay(plans[size], turns), [bench.expected(turn) for turn in turns], dtype="bfloat16", what=f"{cached}")
        assert bench.backend.graphs.wrapper.item.indices is bench.backend.graphs.indices  # where a graph reads them


def test_drafts_are_verified_in_a_graph_and_rows_that_pad_it_are_no_matter() -> None:
    bench = made()
    bench.relay.ask("init_graph_state", max_batch_size=8, max_num_tokens=24)
    assert verifies_captured(bench, AgainAndAgain()) is None


@pytest.mark.parametrize(("rows", "length"), [(96, 1), (512, 1), (512, 4)])
def test_mixed_steps_are_captured_and_rows_of_nobody_are_zero(rows: int, length: int) -> None:
    bench = made()
    bench.relay.ask("init_graph_state", max_batch_size=16, max_num_tokens=16)
    bench.relay.ask("init_mixed_graph_state", max_batch_size=16, max_num_tokens=512)
    step = MixedCall(bench, AgainAndAgain(), size=rows // length, length=length)
    for turns in _mixed_steps(rows, each=length):
        bench.forget()
        step.replay(bench.turns(turns))
        assert bench.backend.graphs.wrapper.item.blocks == 1, "as when it was captured"


def test_what_cannot_be_captured_or_refreshed_is_refused() -> None:
    bench = made()
    with pytest.raises(Unsupported, match="after init_graph_state"):
        bench.relay.plan(bench.pad(bench.batch([], Phase.DECODE), requests=2, tokens=2), capture=True)
    with pytest.raises(Unsupported, match="FlashInfer plans 14938 at most"):
        bench.relay.ask("init_graph_state", max_batch_size=20000, max_num_tokens=20000)
    bench.relay.ask("init_graph_state", max_batch_size=6, max_num_tokens=6)
    for wrong in (
        bench.pad(bench.batch([], Phase.DECODE), requests=7, tokens=7),
        bench.pad(dataclasses.replace(bench.batch([], Phase.VERIFY), decode_len=2), requests=4, tokens=8),
    ):
        with pytest.raises(Unsupported, match="captures steps after init_graph_state and no larger than it was told"):
            wrong = bench.relay.plan(wrong, capture=True)
    captured = bench.pad(bench.batch([], Phase.DECODE), requests=4, tokens=4)
    captured = bench.relay.plan(captured, capture=True)
    with pytest.raises(StalePlan, match="to refresh"):
        bench.relay.ask("refresh_graph_metadata", plan=captured.plan, batch=bench.batch(bench.turns([(5, 1)]), Phase.DECODE))
    bench.relay.ask("init_graph_state", max_batch_size=6, max_num_tokens=6)
    with pytest.raises(StalePlan):
        bench.attend(captured, [])


def test_page_lists_that_do_not_fit_are_refused(monkeypatch) -> None:
    monkeypatch.setattr("enginery_attn_flashinfer_mla.backend.MAX_INDICES", 8)
    bench = made()
    bench.relay.ask("init_graph_state", max_batch_size=2, max_num_tokens=2)
    captured = bench.pad(bench.batch([], Phase.DECODE), requests=2, tokens=2)
    captured = bench.relay.plan(captured, capture=True)
    with pytest.raises(Unsupported, match="run this batch eagerly"):
        bench.relay.ask(
            "refresh_graph_metadata", plan=captured.plan, batch=bench.batch(bench.turns([(20, 1), (20, 1)]), Phase.DECODE)
        )


def test_kernels_that_the_device_does_not_have_are_refused() -> None:
    with pytest.raises(Unsupported, match="kernels=fa3 is for compute capability 9"):
        made(kernels="fa3")
