"""What the kit does not reach: what is refused, addresses beyond 2^31, captured plans, graphs that cannot be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import compile_only
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from enginery.api import AttnBackendSpec, AttnLayerFacts, AttnNeeds, ForwardBatch, LatentFacts, Phase, StalePlan, Unsupported
from enginery.kv.arena import DeviceArena
from enginery.testing.cases import AttnCase
from enginery.testing.check_trees import expected_of_tree
from enginery.testing.rules import compare
from enginery.testing.stage import Turn
from enginery.testing.suite import AttnBackendSuite
from enginery.testing.workbench import Workbench
from enginery_attn_triton import splitting
from enginery_attn_triton.plan import tiles_of
from enginery_attn_triton.spec import make_spec
from enginery_attn_triton.splitting import split_decoding
from enginery_attn_triton.tiling import Device, LayerCut, prefill_tile

H200 = Device(num_units=132, shared_bytes=227 << 10)
LLAMA = AttnLayerFacts(num_heads=32, num_kv_heads=8, head_dim=128)


def lens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def its_needs(spec: AttnBackendSpec) -> AttnNeeds:
    """What it has kernels for."""
    return AttnNeeds(
        device=min(spec.capabilities.devices),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=16,
        layers=(LLAMA,),
        compute_capability=(9, 0),
    )


def test_a_machine_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginery_attn_triton.spec.find_spec", lambda name: None)
    spec = make_spec()
    assert [reason.rule for reason in spec.refuse(its_needs(spec))] == ["installed"]


def test_dims_whose_tiles_are_too_large_and_mixed_dtypes_are_refused() -> None:
    spec = make_spec()
    needs = its_needs(spec)
    assert spec.refuse(needs) == []
    wide = dataclasses.replace(LLAMA, head_dim=512)
    assert [reason.rule for reason in spec.refuse(dataclasses.replace(needs, layers=(wide, wide)))] == ["head dim"]
    assert [reason.rule for reason in spec.refuse(dataclasses.replace(needs, kv_dtype="float16"))] == ["kv dtype"]


def test_the_interpreter_makes_it_a_backend_for_the_cpu_and_the_last(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert make_spec().capabilities.devices == {"cpu"}
    assert make_spec().priority < 10
    monkeypatch.delenv("TRITON_INTERPRET")
    assert make_spec().capabilities.devices == {"cuda"}
    assert make_spec().capabilities.min_compute_capability == (8, 0)


def test_it_is_before_others_for_one_request_of_latents_with_few_heads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    spec, latent = make_spec(), LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)

    def rank(*layers: AttnLayerFacts, spec: AttnBackendSpec = spec, single: bool = True) -> int:
        needs = dataclasses.replace(its_needs(spec), layers=layers, phases=frozenset({Phase.DECODE}), single=single)
        return spec.priority_for(needs)

    mla = {heads: AttnLayerFacts(num_heads=heads, num_kv_heads=1, head_dim=576, latent=latent) for heads in (8, 16, 32, 33, 128)}
    assert [heads for heads, layer in mla.items() if rank(layer) == spec.single_priority] == [8, 16, 32]
    assert {rank(mla[33]), rank(mla[128]), rank(mla[16], mla[128]), rank(LLAMA), rank(mla[16], LLAMA)} == {spec.priority}
    assert rank(mla[16], single=False) == spec.priority < 60 < rank(mla[16])  # of FlashInfer's for latents
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert rank(mla[16], spec=make_spec()) == make_spec().priority


@pytest.mark.usefixtures("interpreter")
def test_addresses_are_wide_enough_for_pools_of_more_than_two_to_the_31_values() -> None:
    from enginery_attn_triton.kernels.addresses import addresses

    pages = torch.tensor([3, 1 << 27], dtype=torch.int32)
    out = torch.zeros(16, dtype=torch.int64)
    addresses[(1,)](pages, out, PAGE_SIZE=8, STRIDE=1024)
    assert out.tolist() == [(pages[key // 8].item() * 8 + key % 8) * 1024 for key in range(16)]


class Interpreted(AttnBackendSuite):
    backend = "triton"


@pytest.fixture
def bench(interpreter: None) -> Workbench:
    """A layer with a window, and room for a captured step of six requests."""
    facts = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=16, sliding_window=40, sinks=True)
    made = Workbench(Interpreted.subject(), AttnCase(facts=facts, page_size=16, dtype="float32"))
    made.relay.ask("init_graph_state", max_batch_size=6, max_num_tokens=6)
    return made


@pytest.mark.parametrize("requests", [2, 6])
def test_a_captured_plan_stays_where_it_is_and_is_refreshed_for_other_lengths(bench, requests) -> None:
    captured = bench.pad(bench.batch([], Phase.DECODE), requests=requests, tokens=requests)
    captured = bench.relay.plan(captured, capture=True)
    (split,) = captured.plan.tables.decode.values()
    place = split.items.data_ptr()
    for cached in ((200, 0, 15, 16, 90, 1), (9, 300), (1,)):
        cached = cached[:requests]
        turns = bench.turns([(length, 1) for length in cached])
        compare(bench.replay(captured, turns), [bench.expected(turn) for turn in turns], dtype="float32", what=f"{cached}")
        assert split.items.data_ptr() == place


def test_what_is_never_split_is_not_merged_where_it_is_captured(bench) -> None:
    plain = bench.pad(bench.batch([], Phase.DECODE), requests=2, tokens=2)
    (split,) = bench.relay.plan(plain, capture=True).plan.tables.decode.values()
    assert not split.merged


VERIFYING = {
    "a window": AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=16, sliding_window=40, sinks=True),
    "wide groups": AttnLayerFacts(num_heads=32, num_kv_heads=1, head_dim=16),
    "latents": AttnLayerFacts(
        num_heads=16, num_kv_heads=1, head_dim=48, latent=LatentFacts(rank=32, rope_dim=16, nope_dim=16, value_dim=16)
    ),
}


def verifying(layer: str) -> AttnCase:
    """Latents in two bytes, whose tiles depend on the number of rows."""
    facts = VERIFYING[layer]
    return AttnCase(facts=facts, page_size=16, dtype="float32" if facts.latent is None else "bfloat16")


# Of latents two rows are a tile each, three and four are in one, and more are in two.
VERIFIED = [*((layer, rows) for layer in VERIFYING for rows in (2, 4)), *(("latents", rows) for rows in (3, 5, 8))]


@pytest.mark.parametrize(("layer", "length"), VERIFIED)
def test_a_captured_plan_of_verifications_is_refreshed_for_other_lengths(interpreter, layer, length) -> None:
    bench = Workbench(Interpreted.subject(), verifying(layer))
    bench.relay.ask("init_graph_state", max_batch_size=12, max_num_tokens=24)
    size = 24 // length
    empty = dataclasses.replace(bench.batch([], Phase.VERIFY), decode_len=length)
    captured = bench.relay.plan(bench.pad(empty, requests=size, tokens=size * length), capture=True)
    for cached in ((200, 0, 15, 16, 90, 1), (9, 300), (1,)):
        turns = bench.turns([(kept, length) for kept in cached[:size]])
        found = bench.replay(captured, turns, Phase.VERIFY)
        compare(found, [bench.expected(turn) for turn in turns], dtype=bench.case.dtype, what=f"{cached}")


# The row before each row: two guesses in a row, and beside each of them one other, or two.
@pytest.mark.parametrize(
    ("layer", "parents"),
    [
        *((layer, parents) for layer in ("wide groups", "latents") for parents in ([0, 0, 1, 0, 1], [0, 0, 1, 0, 0, 1, 1])),
        *(("latents", parents) for parents in ([0, 0], [0, 0, 0], [0, 0, 1, 0])),
    ],
    ids=str,
)
def test_a_captured_plan_of_combs_has_its_masks_for_good(interpreter, layer, parents) -> None:
    """Written once; the lengths of requests change, and some are padding."""
    length, size = len(parents), 4
    bench = Workbench(Interpreted.subject(), verifying(layer))
    bench.relay.ask("init_graph_state", max_batch_size=size, max_num_tokens=size * length)

    def padded(turns: list[Turn]) -> ForwardBatch:
        batch, more = dataclasses.replace(bench.batch(turns, Phase.VERIFY), decode_len=length, trees=True), size - len(turns)
        return bench.pad(batch, requests=more, tokens=more * length)

    captured = bench.relay.plan(padded([]), capture=True)
    seen = torch.eye(length, dtype=torch.bool)
    for row, parent in enumerate(parents[1:], start=1):
        seen[row] |= seen[parent]
    ((requests, buffer),) = bench.relay.ask("verify_mask", plan=captured.plan).parts
    assert (requests.start, requests.stop) == (0, size)
    buffer.copy_(seen)
    for cached in ((200, 0, 15, 16), (9, 300), (1,)):
        turns, whole = bench.turns([(kept, length) for kept in cached]), bench.guarded_out(size * length)
        bench.relay.refresh(captured.plan, padded(turns))
        bench.call_leaf(bench.inputs(turns, size * length), captured, captured.plan, whole[1:-1])
        expected = [expected_of_tree(bench, turn, parents) for turn in turns]
        compare(bench.rows_of(whole, turns), expected, dtype=bench.case.dtype, what=f"{cached}")


@pytest.mark.parametrize("layer", VERIFYING)
@pytest.mark.parametrize("capture", [False, True])
def test_keys_behind_lengths_that_the_device_alone_knows_weigh_nothing(interpreter, layer, capture) -> None:
    """By tables of upper bounds, so that whole items lie behind the end, where memory is not even numbers."""
    bench = Workbench(Interpreted.subject(), verifying(layer))
    bench.relay.ask("init_graph_state", max_batch_size=6, max_num_tokens=6)
    turns = bench.turns([(length, 1) for length in (200, 3, 40, 64)])
    exact = bench.pad(bench.batch(turns, Phase.DECODE), requests=2, tokens=2)
    more = torch.tensor([150, 5, 100, 1, 0, 0], dtype=torch.int32)
    columns = -(-int((exact.kv_lens_cpu + more).max()) // 16)
    table = torch.full((6, columns), bench.geometry.scratch_page("full"), dtype=torch.int32)
    table[:, : exact.page_table_cpu.shape[1]] = exact.page_table_cpu
    for pages in bench.pool.layer(bench.layer.local_id):
        for row, length in enumerate(exact.kv_lens_cpu.tolist()):
            last = pages[int(table[row, (length - 1) // 16])]
            last[(length - 1) % 16 + 1 :] = torch.nan
        pages[-1] = torch.nan
        pages[-1, 0] = 0.0  # the only key of padding

    def step(more: torch.Tensor) -> ForwardBatch:
        view = dataclasses.replace(exact.pages, page_table_cpu=table)
        lengths = exact.kv_lens_cpu.clone()
        return dataclasses.replace(exact, kv_lens_cpu=lengths + more, kv_lens=lengths, views={"full": view})

    batches = (step(more - more // 2), step(more))
    first, second = bench.relay.make_step_plans(batches, capture=capture)
    assert first.tables is second.tables
    for batch, plan in zip(batches, (first, second), strict=True):
        whole = bench.guarded_out(6)
        bench.call_leaf(bench.inputs(turns, 6), batch, plan, whole[1:-1])
        compare(bench.rows_of(whole, turns), [bench.expected(turn) for turn in turns], dtype=bench.case.dtype, what="bounds")


@pytest.mark.parametrize(("layer", "length"), VERIFIED)
@pytest.mark.parametrize("capture", [False, True])
def test_verifications_whose_lengths_the_device_alone_knows(interpreter, layer, length, capture) -> None:
    """The host has more keys of each, whole items too; what lies behind the true ones is not even numbers."""
    bench = Workbench(Interpreted.subject(), verifying(layer))
    bench.relay.ask("init_graph_state", max_batch_size=12, max_num_tokens=24)
    size, captured = 24 // length, None
    for cached, more in (((200, 3, 30), 90), ((9, 300, 0), 5), ((1, 45), 1)):
        turns = bench.turns([(kept, length) for kept in cached])
        bench.batch(turns, Phase.VERIFY)  # as a model does, its keys are written first
        for pages in bench.pool.layer(bench.layer.local_id):
            for tokens, kept, new in turns:
                pages[tokens.pages[-1], (kept + new - 1) % 16 + 1 :] = torch.nan
            pages[bench.geometry.scratch_page("full")] = torch.nan
            pages[bench.geometry.scratch_page("full"), :length] = 0.0  # the keys of padding
        exact = dataclasses.replace(bench.batch(turns, Phase.VERIFY), decode_len=length)
        exact = bench.pad(exact, requests=size - len(turns), tokens=(size - len(turns)) * length)
        columns, table = -(-(max(cached) + length + more) // 16), exact.page_table_cpu
        wider = F.pad(table, (0, columns - table.shape[1]), value=bench.geometry.scratch_page("full"))
        view = dataclasses.replace(exact.pages, page_table_cpu=wider)
        longer = exact.kv_lens_cpu + more * (torch.arange(size) < len(turns)).int()
        batch = dataclasses.replace(exact, kv_lens_cpu=longer, kv_lens=exact.kv_lens_cpu, views={"full": view})
        if captured is None or not capture:
            captured = bench.relay.plan(batch, capture=capture)
        elif captured.kv_lens is not None:
            captured.kv_lens.copy_(exact.kv_lens_cpu)
            bench.relay.refresh(captured.plan, batch)
        whole = bench.guarded_out(size * length)
        bench.call_leaf(bench.inputs(turns, size * length), captured, captured.plan, whole[1:-1])
        compare(bench.rows_of(whole, turns), [bench.expected(turn) for turn in turns], dtype=bench.case.dtype, what=f"{cached}")


SPLIT_PROMPTS = (
    AttnLayerFacts(num_heads=4, num_kv_heads=1, head_dim=16, sinks=True),
    AttnLayerFacts(num_heads=8, num_kv_heads=2, head_dim=24, softcap=3.0),
    AttnLayerFacts(num_heads=4, num_kv_heads=1, head_dim=16, sliding_window=150, sinks=True),
    AttnLayerFacts(num_heads=4, num_kv_heads=1, head_dim=48, latent=LatentFacts(rank=32, rope_dim=16, nope_dim=16, value_dim=16)),
)


@pytest.mark.parametrize("facts", SPLIT_PROMPTS, ids=str)
@pytest.mark.parametrize(
    "turns", [[(300, 3)], [(420, 19)], [(130, 1), (261, 2)], [(7, 1), (3, 2), (400, 5)], [(1250, 17)]], ids=str
)
def test_prompts_of_few_rows_have_their_keys_split(interpreter, monkeypatch, facts, turns) -> None:
    monkeypatch.setattr(splitting, "MIN_TILE_KEYS", 48)
    monkeypatch.setattr(Device, "of", lambda device: Device(num_units=24, shared_bytes=1 << 20))
    bench = Workbench(Interpreted.subject(), AttnCase(facts=facts, page_size=16, dtype="float32"))
    made = bench.turns(turns)
    batch = bench.relay.plan(bench.batch(made, Phase.MIXED))
    (tiles,) = batch.plan.tables.prefill.values()
    assert tiles.splits is not None
    compare(bench.attend(batch, made), [bench.expected(turn) for turn in made], dtype="float32", what=str(facts))


@pytest.mark.parametrize("name", ["hopper_decode.py", "hopper_prompts.py", "latents_of_prompts.py"])
def test_kernels_compile_without_a_gpu(name: str) -> None:
    """The interpreter takes what the compiler refuses."""
    compile_only.run(Path(__file__).with_name(name))


def test_a_workspace_that_another_backend_took_smaller_is_replaced(bench) -> None:
    """FlashInfer takes one of the same name before, in a composite of both; what it planned keeps the one it has."""
    bench.backend.arena = DeviceArena(bench.device)
    smaller = bench.backend.arena.take("attention of split requests", 16)
    turns = bench.turns([(200, 1), (9, 1)])
    compare(bench.run(turns, Phase.DECODE), [bench.expected(turn) for turn in turns], dtype="float32", what="a new workspace")
    assert len(smaller) == 16
    assert len(bench.backend.arena.take("attention of split requests", 16)) == bench.backend.cuts.of(1).workspace_bytes


def test_what_cannot_be_captured_or_refreshed_is_refused(bench) -> None:
    with pytest.raises(Unsupported, match="init_graph_state was told 6 rows"):
        bench.relay.plan(bench.pad(bench.batch([], Phase.DECODE), requests=7, tokens=7), capture=True)
    captured = bench.pad(bench.batch([], Phase.DECODE), requests=4, tokens=4)
    captured = bench.relay.plan(captured, capture=True)
    with pytest.raises(StalePlan, match="to refresh"):
        bench.relay.ask("refresh_graph_metadata", plan=captured.plan, batch=bench.batch(bench.turns([(5, 1)]), Phase.DECODE))
    bench.relay.ask("init_graph_state", max_batch_size=6, max_num_tokens=6)
    with pytest.raises(StalePlan):
        bench.attend(captured, [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_keys_beyond_two_to_the_31_values_are_read_on_cuda() -> None:
    from enginery_attn_triton.launch import Memory, Scores, run_decode, run_prefill
    from enginery_attn_triton.plan import Split, Tiles

    facts = AttnLayerFacts(num_heads=8, num_kv_heads=8, head_dim=128)
    num_pages = (1 << 31) // (16 * 8 * 128) + 8
    k = torch.zeros(num_pages, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    k[-2:] = torch.randn(2, 16, 8, 128, device="cuda")
    pages = torch.tensor([num_pages - 2, num_pages - 1], dtype=torch.int32, device="cuda")
    q = torch.randn(16, 8, 128, dtype=torch.bfloat16, device="cuda")
    keys = k[-2:].flatten(0, 1).double()  # [32, 8, 128]
    cut = LayerCut.of(facts, itemsize=2, device=Device.of(torch.device("cuda")))
    scores, memory, out = Scores(scale=0.1), Memory(k=k, v=k, pages=pages), torch.empty_like(q)
    seen = torch.ones(16, 32, dtype=torch.bool, device="cuda").tril(16)
    weights = (torch.einsum("shd,lhd->hsl", q.double(), keys) * 0.1).masked_fill(~seen, float("-inf")).softmax(-1)
    wanted = torch.einsum("hsl,lhd->shd", weights, keys)

    tile = prefill_tile(cut.dims, H200, max_rows=16)
    table = torch.from_numpy(tiles_of(lens(16), lens(32), lens(0), first_row=0, tokens=tile.tokens)).cuda()
    parts = torch.empty(cut.workspace_bytes, dtype=torch.uint8, device="cuda")
    run_prefill(q, memory, out, cut=cut, tiles=Tiles(table=table, tile=tile), parts=parts, scores=scores)
    torch.testing.assert_close(out.double(), wanted, atol=0.02, rtol=0.02)

    items, splits = (torch.from_numpy(part).cuda() for part in split_decoding(lens(32), cut.decode, columns=2)[:2])
    last = torch.empty_like(out[:1])
    run_decode(
        q[-1:],
        memory,
        last,
        cut=cut,
        split=Split(items=items, splits=splits, tall=None, merged=True),
        parts=parts,
        scores=scores,
    )
    torch.testing.assert_close(last.double(), wanted[-1:], atol=0.02, rtol=0.02)
