"""All but FlashInfer itself: the backend over kernels written in torch, on the CPU, that keep plans as FlashInfer's wrappers do."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine.test_graphs import AgainAndAgain
from stand_ins import StandInSuite, on_the_cpu
from torch_kernels import TorchKernels, TorchWrapper

from enginery.api import AttnLayerFacts, BackendContext, ForwardBatch, Phase, PlanKey, StalePlan, Unsupported
from enginery.kv.arena import DeviceArena
from enginery.testing.cases import AttnCase
from enginery.testing.check_plans import verifies_captured
from enginery.testing.rules import compare
from enginery.testing.subject import Subject
from enginery.testing.workbench import Workbench
from enginery_attn_flashinfer.backend import FlashInferAttention
from enginery_attn_flashinfer.contract import KernelSettings
from enginery_attn_flashinfer.cuts import Cut
from enginery_attn_flashinfer.leases import Pool
from enginery_attn_flashinfer.pages import Rows
from enginery_attn_flashinfer.plan import Planner, SharedPart
from enginery_attn_flashinfer.prefill import LEAST_READERS, PrefillPlanner
from enginery_attn_flashinfer.spec import FlashInferOptions, make_spec

GQA = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=64)


def subject(*, copies_always: bool = False) -> Subject:
    def create(context: BackendContext) -> FlashInferAttention:
        backend = FlashInferAttention(context, TorchKernels)
        if copies_always:
            backend.planner.prefill.least_readers = 0
        return backend

    return on_the_cpu(dataclasses.replace(make_spec(), options=None), create)


class TestOnTorchKernels(StandInSuite):
    backend = "flashinfer"
    everything = True

    @classmethod
    def subject(cls) -> Subject:
        return subject()


class TestCopiedPagesOnTorchKernels(TestOnTorchKernels):
    @classmethod
    def subject(cls) -> Subject:
        """Whose prefills after cached tokens copy pages first, however few rows there are."""
        return subject(copies_always=True)


def made(facts: AttnLayerFacts = GQA, *, copies_always: bool = False, **options: int) -> Workbench:
    case = AttnCase(facts=facts, page_size=4, dtype="bfloat16")
    return Workbench(subject(copies_always=copies_always), case, num_tokens=4000, options=FlashInferOptions(**options))


def sharing_turns(bench: Workbench, *, pages: int, lengths: Sequence[int]) -> list:
    """Decoding requests with the same first pages, whose keys are in memory."""
    (first,) = bench.turns([(pages * 4 + 1, 1)])
    turns = [first]
    for length in lengths:
        tokens = bench.sharing(first.tokens, pages, length)
        cached = length - 1
        bench.pool.write(bench.layer.local_id, tokens.rows[1][:cached], tokens.rows[2][:cached], tokens.slots[:cached])
        turns.append(type(first)(tokens, cached, 1))
    return turns


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_pages_that_requests_share_are_read_once_and_results_are_the_same(softcap) -> None:
    bench = made(dataclasses.replace(GQA, softcap=softcap), shared_prefix_tokens=32)
    turns = [
        *bench.turns([(5, 1)]),
        *sharing_turns(bench, pages=8, lengths=(33, 40, 36, 50)),
        *bench.turns([(70, 1), (0, 1)]),
        *sharing_turns(bench, pages=10, lengths=(41, 48, 57)),
        *bench.turns([(20, 7), (0, 3)]),
    ]
    batch = bench.batch(turns, Phase.MIXED)
    batch = bench.relay.plan(batch)
    out = bench.attend(batch, turns)
    compare(out, [bench.expected(turn) for turn in turns], dtype="bfloat16", what="shared")
    (part,) = [cut.front for cut in batch.plan.cuts.values()]
    assert isinstance(part, SharedPart)
    assert (part.first, part.last) == (1, 12)
    assert part.prefix.item.q_lens == [5, 2, 4]
    assert part.decode.item.lists[0].tolist()[-5:] == [i + part.decode.item.lists[0].tolist()[-5] for i in (0, 1, 2, 4, 9)]


def test_layers_with_a_window_and_a_switched_off_option_do_not_share() -> None:
    for bench in (
        made(dataclasses.replace(GQA, sliding_window=9), shared_prefix_tokens=32),
        made(shared_prefix_tokens=0),
    ):
        turns = sharing_turns(bench, pages=8, lengths=(33, 40, 36))
        batch = bench.batch(turns, Phase.DECODE)
        batch = bench.relay.plan(batch)
        out = bench.attend(batch, turns)
        compare(out, [bench.expected(turn) for turn in turns], dtype="bfloat16", what="not shared")
        assert not any(isinstance(cut.front, SharedPart) for cut in batch.plan.cuts.values())


def wrappers_of(batch: ForwardBatch) -> list[TorchWrapper]:
    return [lease.item for cut in batch.plan.cuts.values() for lease in (cut.front, cut.prefill.wrapper)]


def test_wrappers_are_planned_again_when_their_plan_is_gone_and_not_before() -> None:
    bench = made()
    turns = bench.turns([(5, 1), (9, 4)])
    batches = [bench.batch(turns, Phase.MIXED) for _ in range(3)]
    batches = [bench.relay.plan(batch) for batch in batches]
    used = [wrappers_of(batch) for batch in batches]
    assert len({id(item) for items in used for item in items}) == 6
    gone = used[1]
    batches[1] = dataclasses.replace(batches[1])
    gc.collect()
    batches[1] = bench.relay.plan(batches[1])
    assert wrappers_of(batches[1]) == gone


def test_prefills_without_cached_tokens_read_the_keys_and_values_of_the_step() -> None:
    for facts in (GQA, dataclasses.replace(GQA, sliding_window=9)):
        bench = made(facts)
        turns = bench.turns([(5, 1), (0, 1), (0, 30), (0, 7)])
        batch = bench.pad(bench.batch(turns, Phase.MIXED), requests=2, tokens=3)
        batch = bench.relay.plan(batch)
        (cut,) = batch.plan.cuts.values()
        assert cut.prefill.own
        written = bench.pool.layer(bench.layer.local_id)
        for turn in turns[2:]:
            for stored in written:
                stored[turn.tokens.pages] = float("nan")
        compare(bench.attend(batch, turns), [bench.expected(turn) for turn in turns], dtype="bfloat16", what=f"{facts}")


def test_pages_are_copied_where_enough_rows_read_them_and_the_copy_fits() -> None:
    many, few = [(3, 1), (40, 300), (0, 40)], [(3, 1), (400, 60), (0, 5)]
    window = dataclasses.replace(GQA, sliding_window=9)
    for facts, lengths, options, copies in (
        (GQA, many, {}, True),
        (GQA, few, {}, False),
        (window, many, {}, False),
        (GQA, many, {"gather_mb": 0}, False),
    ):
        bench = made(facts, **options)
        bench.backend.planner.prefill.least_readers = 200
        turns = bench.turns(lengths)
        batch = bench.batch(turns, Phase.MIXED)
        batch = bench.relay.plan(batch)
        out = bench.attend(batch, turns)
        (cut,) = batch.plan.cuts.values()
        assert not cut.prefill.own
        assert (cut.prefill.gathering is not None) == copies, (facts, lengths, options)
        compare(out, [bench.expected(turn) for turn in turns], dtype="bfloat16", what=f"{facts} {lengths}")


def test_copies_take_what_the_option_says_and_longer_requests_are_read_in_place() -> None:
    bench = made(dataclasses.replace(GQA, num_kv_heads=4), copies_always=True, gather_mb=1)  # 1024 tokens
    taken: dict[str, int] = {}
    take = bench.backend.arena.take

    def recorded(purpose: str, num_bytes: int, **how: bool) -> torch.Tensor:
        taken[purpose] = num_bytes
        return take(purpose, num_bytes, **how)

    bench.backend.planner.prefill.arena.take = recorded
    for lengths, copies in (([(20, 5)], True), ([(600, 400), (9, 15)], True), ([(600, 400), (9, 16)], False)):
        batch = bench.batch(bench.turns(lengths), Phase.PREFILL)
        batch = bench.relay.plan(batch)
        (cut,) = batch.plan.cuts.values()
        assert (cut.prefill.gathering is not None) == copies, lengths
    assert taken["keys and values of prefill"] == 1 << 20


def test_float8_pages_are_copied_into_the_dtype_of_the_model_never_taken_from_the_step() -> None:
    device, plain = torch.device("cpu"), Cut.of(GQA)
    windowed = dataclasses.replace(plain, window=9)
    settings = KernelSettings(device=device, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, page_size=4, prefill="fa2")
    kernels = TorchKernels(settings, ())
    arena = DeviceArena(device)
    planner = PrefillPlanner(kernels, [plain, windowed], settings, arena=arena, gather_bytes=1 << 20)
    assert planner.least_readers < LEAST_READERS
    table = np.arange(500, dtype=np.int32).reshape(1, 500)
    for length, copies in ((600, True), (500, False)):  # two heads in a group, half of all rows see a key
        lens = np.array([length], dtype=np.int32)
        pools = Pool(lambda: kernels.prefill(torch.empty(1))), Pool(lambda: kernels.ragged(torch.empty(1)))
        parts = planner.plan(*pools, Rows(q_lens=lens, kv_lens=lens, table=table))
        assert not any(part.own for part in parts.values())
        assert parts[windowed].gathering is None
        assert (parts[plain].gathering is not None) == copies
    into = planner.plan(*pools, Rows(q_lens=lens + 200, kv_lens=lens + 202, table=table))[plain].gathering.into
    assert [(part.dtype, part.shape) for part in into] == [(torch.bfloat16, (702, 2, 64))] * 2


def test_a_captured_plan_reads_what_was_refreshed_last() -> None:
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


@pytest.mark.parametrize("facts", [GQA, dataclasses.replace(GQA, sliding_window=9, num_kv_heads=1)], ids=str)
def test_drafts_are_verified_in_graphs(facts: AttnLayerFacts) -> None:
    """Planned with empty requests behind, so that tiles are small."""
    bench = made(facts)
    bench.relay.ask("init_graph_state", max_batch_size=8, max_num_tokens=24)
    assert verifies_captured(bench, AgainAndAgain()) is None
    (front,) = bench.backend.graphs._fronts[8, 3].values()
    assert len(front.item.q_lens) > 8
    assert set(front.item.q_lens) == {3, 0}


def test_what_would_need_too_much_memory_is_not_captured() -> None:
    bench = made(dataclasses.replace(GQA, num_heads=32, num_kv_heads=4, head_dim=128), workspace_mb=12)
    bench.relay.ask("init_graph_state", max_batch_size=8, max_num_tokens=24)
    told = verifies_captured(bench, AgainAndAgain())
    assert told is not None
    assert re.search(r"verifies 3 rows of 8 requests may take \d+ MiB for split requests, and of .*=12 others leave \d+", told)


def test_captured_steps_read_shared_pages_once_where_there_are_some() -> None:
    bench = made(shared_prefix_tokens=32, shared_prefix_in_graphs=True)
    bench.relay.ask("init_graph_state", max_batch_size=12, max_num_tokens=12)
    captured = bench.pad(bench.batch([], Phase.DECODE), requests=12, tokens=12)
    captured = bench.relay.plan(captured, capture=True)
    (part,) = [cut.front for cut in captured.plan.cuts.values()]
    assert isinstance(part, SharedPart)
    nobody = bench.turns([(5, 1), (90, 1)])
    some = [*bench.turns([(5, 1)]), *sharing_turns(bench, pages=8, lengths=(33, 40, 36, 50))]
    groups = [sharing_turns(bench, pages=8, lengths=(33, 40, 36)), sharing_turns(bench, pages=10, lengths=(41, 60, 70, 80))]
    for turns, rows in ((nobody, [12]), (some, [1, 5, 6]), ([*groups[0], *groups[1]], [4, 5, 3]), (nobody, [12])):
        compare(bench.replay(captured, turns), [bench.expected(turn) for turn in turns], dtype="bfloat16", what=f"{rows}")
        assert part.prefix.item.q_lens == rows + [0] * (9 - len(rows))


def test_what_cannot_be_captured_or_refreshed_is_refused() -> None:
    bench = made()
    with pytest.raises(Unsupported, match="after init_graph_state"):
        bench.relay.plan(bench.pad(bench.batch([], Phase.DECODE), requests=2, tokens=2), capture=True)
    bench.relay.ask("init_graph_state", max_batch_size=6, max_num_tokens=6)
    with pytest.raises(Unsupported, match="init_graph_state was told 6"):
        bench.relay.plan(bench.pad(bench.batch([], Phase.DECODE), requests=7, tokens=7), capture=True)
    captured = bench.pad(bench.batch([], Phase.DECODE), requests=4, tokens=4)
    captured = bench.relay.plan(captured, capture=True)
    with pytest.raises(StalePlan, match="to refresh"):
        bench.relay.ask("refresh_graph_metadata", plan=captured.plan, batch=bench.batch(bench.turns([(5, 1)]), Phase.DECODE))
    bench.relay.ask("init_graph_state", max_batch_size=6, max_num_tokens=6)
    with pytest.raises(StalePlan):
        bench.attend(captured, [])


def test_options_that_the_device_or_the_model_does_not_allow_are_refused() -> None:
    with pytest.raises(Unsupported, match="prefill=fa3 is for compute capability 9"):
        Workbench(subject(), AttnCase(facts=GQA, page_size=4, dtype="bfloat16"), options=FlashInferOptions(prefill="fa3"))
    with pytest.raises(Unsupported, match="workspace_mb allows 1"):
        made(workspace_mb=1).relay.ask("init_graph_state", max_batch_size=4096, max_num_tokens=4096)


def test_of_layers_with_and_without_a_window_only_those_without_share() -> None:
    plain = Cut.of(GQA)
    windowed = dataclasses.replace(plain, window=9)
    device = torch.device("cpu")
    settings = KernelSettings(device=device, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, page_size=4, prefill="fa2")
    kernels = TorchKernels(settings, ())
    planner = Planner(kernels, [windowed, plain], settings, arena=DeviceArena(device), shared_tokens=32, gather_bytes=0)
    bench = made()
    batch = bench.batch(sharing_turns(bench, pages=8, lengths=(33, 40, 36)), Phase.DECODE)
    key = PlanKey(backend="", phase=Phase.DECODE, num_requests=4, num_tokens=4, batch=0)
    cuts = planner.plan(batch, key, torch.empty(1)).cuts
    assert isinstance(cuts[plain].front, SharedPart)
    assert cuts[windowed].front.item.lists[0].tolist() == [0, 9, 18, 28, 37]
