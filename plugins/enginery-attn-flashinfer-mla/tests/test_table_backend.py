"""What the plugins for Blackwell cards share, around a kernel written in torch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from stand_ins import MLA, on_the_cpu, plan_that_is_right

from enginery.api import (
    BackendContext,
    ChunkPlan,
    Denied,
    Phase,
    PrefillStrategy,
    StalePlan,
    Unsupported,
)
from enginery.kv.arena import DeviceArena
from enginery.testing.cases import AttnCase
from enginery.testing.rules import compare
from enginery.testing.workbench import Workbench
from enginery_attn_flashinfer_mla.backend import FlashInferMla
from enginery_attn_flashinfer_mla.spec import FlashInferMlaOptions, blackwell_spec
from enginery_attn_flashinfer_mla.table_backend import TableBackend, Tables, Workspaces
from enginery_attn_flashinfer_mla.torch_kernels import TorchKernels, attend_table

ABSORBED, ONE_SHOT, CHUNKED = PrefillStrategy


class Kernel:
    """Looks at its tables, and that its workspace is clear; leaves it so."""

    columns = 4
    workspace_bytes = 64
    zeroed = True

    def __init__(self) -> None:
        self.widths: list[tuple[int, ...]] = []

    def __call__(
        self, q: torch.Tensor, latents: torch.Tensor, tables: Tables, workspace: torch.Tensor, out: torch.Tensor, *, scale: float
    ) -> None:
        assert q.is_contiguous()
        assert out.is_contiguous()
        assert not workspace.any()
        assert int(tables.lens.max()) <= tables.longest
        assert int(tables.table.max()) < len(latents)
        self.widths.append(tuple(tables.table.shape))
        attend_table(q, latents, tables.table, tables.lens.tolist(), out, scale=scale)


def made(strategy: PrefillStrategy | None = None, **options: Any) -> Workbench:
    def create(context: BackendContext) -> TableBackend:
        return TableBackend(context, Kernel(), FlashInferMla(context, TorchKernels))

    spec = blackwell_spec(
        name="table",
        priority=1,
        summary="",
        dtypes=frozenset({"bfloat16"}),
        page_sizes=frozenset({32}),
        heads=frozenset({4}),
        modules={},
    )
    subject = on_the_cpu(spec, create, FlashInferMlaOptions(**options))
    return Workbench(subject, AttnCase(facts=MLA, page_size=32, dtype="bfloat16", strategy=strategy), num_tokens=4000)


def test_single_rows_at_the_front_are_decoded_by_the_kernel_and_others_beside_it() -> None:
    bench = made()
    planned = plan_that_is_right(bench, [(5, 1), (200, 1), (0, 1), (40, 3), (9, 1), (0, 2)], Phase.MIXED)
    assert planned.tables.lens.tolist() == [6, 201, 1]
    assert planned.tables.longest == 201
    assert [part.rows for part in planned.parts] == [slice(3, 9)]
    assert bench.backend.kernel.widths == [(3, 8)]
    only_others = plan_that_is_right(bench, [(3, 4)], Phase.PREFILL)
    assert only_others.tables is None
    assert bench.backend.kernel.widths == [(3, 8)]


def test_what_lies_past_a_request_in_the_page_table_is_not_shown_to_the_kernel() -> None:
    bench = made()
    turns = bench.turns([(5, 1), (200, 1)])
    batch = bench.batch(turns, Phase.DECODE)
    batch.page_table_cpu[0, 1:] = 1 << 30
    batch = bench.relay.plan(batch)
    compare(bench.attend(batch, turns), [bench.expected(turn) for turn in turns], dtype="bfloat16", what="")
    assert batch.plan.tables.table[0, 1:].tolist() == [0] * 7


@pytest.mark.parametrize("strategy", PrefillStrategy)
def test_prefills_run_by_every_strategy_beside_the_kernel(strategy) -> None:
    bench = made(strategy)
    planned = plan_that_is_right(bench, [(0, 9), (31, 6), (50, 3), (0, 1)], Phase.PREFILL)
    assert {part.strategy if "strategy" in vars(part) else ABSORBED for part in planned.parts} == {strategy}
    assert bench.backend.kernel.widths == []


def answer(bench: Workbench, *, disable_ragged: bool) -> Any:
    batch = bench.batch(bench.turns([(20, 4)]), Phase.PREFILL)
    return bench.leaf.ask("init_mha_chunk_metadata", batch=batch, chunks=(), disable_ragged=disable_ragged)


def test_the_hook_has_no_flag_of_flashinfer_and_is_called_without_it() -> None:
    bench = made(CHUNKED)
    assert "disable_ragged" not in inspect.signature(bench.backend.init_mha_chunk_metadata).parameters
    assert isinstance(answer(bench, disable_ragged=False), ChunkPlan)


@pytest.mark.parametrize("strategy", PrefillStrategy)
def test_without_prefill_kernels_it_decodes_and_absorbs(strategy) -> None:
    bench = made(strategy, skip_prefill=True)
    plan_that_is_right(bench, [(0, 9), (31, 6)], Phase.PREFILL)
    plan_that_is_right(bench, [(31, 1), (77, 1)], Phase.DECODE)
    denied = answer(bench, disable_ragged=False)
    assert isinstance(denied, Denied)
    assert "skip_prefill" in denied.reason
    assert vars(bench.backend).keys() == vars(made(strategy).backend).keys()


@pytest.mark.parametrize("strategy", PrefillStrategy)
def test_without_chunks_of_a_cached_prefix_results_are_the_same(strategy) -> None:
    plan_that_is_right(made(strategy, chunked_prefix=False), [(0, 9), (31, 6), (50, 3)], Phase.PREFILL)


def test_a_captured_plan_reads_what_was_refreshed_last() -> None:
    bench = made()
    bench.relay.ask("init_graph_state", max_batch_size=6, max_num_tokens=6)
    plans = {}
    for size in (6, 4):
        captured = bench.pad(bench.batch([], Phase.DECODE), requests=size, tokens=size)
        captured = bench.relay.plan(captured, capture=True)
        plans[size] = captured
    assert plans[4].plan.tables.longest == bench.backend.captured.longest >= bench.geometry.num_pages * 32
    for size, cached in ((6, (200, 0, 31, 32, 90, 1)), (4, (9, 300)), (6, (1,))):
        turns = bench.turns([(length, 1) for length in cached])
        compare(bench.replay(plans[size], turns), [bench.expected(turn) for turn in turns], dtype="bfloat16", what=f"{cached}")


def test_what_cannot_be_captured_or_refreshed_is_refused(monkeypatch) -> None:
    bench = made()
    with pytest.raises(Unsupported, match="after init_graph_state"):
        bench.relay.plan(bench.pad(bench.batch([], Phase.DECODE), requests=2, tokens=2), capture=True)
    monkeypatch.setattr("enginery_attn_flashinfer_mla.table_backend.MAX_ENTRIES", 8)
    bench.relay.ask("init_graph_state", max_batch_size=2, max_num_tokens=2)
    with pytest.raises(Unsupported, match="one token per request"):
        bench.relay.plan(bench.pad(bench.batch([], Phase.DECODE), requests=3, tokens=3), capture=True)
    captured = bench.pad(bench.batch([], Phase.DECODE), requests=1, tokens=1)
    captured = bench.relay.plan(captured, capture=True)
    long = bench.batch(bench.turns([(200, 1)]), Phase.DECODE)
    with pytest.raises(Unsupported, match="8 pages does not fit"):
        bench.relay.ask("refresh_graph_metadata", plan=captured.plan, batch=long)
    with pytest.raises(StalePlan, match="to refresh"):
        bench.relay.ask(
            "refresh_graph_metadata", plan=captured.plan, batch=bench.batch(bench.turns([(5, 1), (6, 1)]), Phase.DECODE)
        )
    bench.relay.ask("init_graph_state", max_batch_size=2, max_num_tokens=2)
    with pytest.raises(StalePlan):
        bench.attend(captured, [])


def test_a_workspace_is_cleared_once() -> None:
    arena = DeviceArena(torch.device("cpu"))
    arena.take("decoding", 64).fill_(7)
    workspaces = Workspaces(arena, Kernel(), "decoding")
    workspace = workspaces.take()
    assert not workspace.any()
    workspace.fill_(3)
    assert workspaces.take().tolist() == [3] * 64
