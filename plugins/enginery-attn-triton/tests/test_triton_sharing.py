"""Requests that begin with the same pages: how few items read those, and that the numbers stay right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginery.api import AttnLayerFacts, ForwardBatch, LatentFacts, Phase
from enginery.kv.shared_prefixes import SharedPrefix
from enginery.testing.cases import AttnCase
from enginery.testing.rules import compare
from enginery.testing.stage import Turn
from enginery.testing.suite import AttnBackendSuite
from enginery.testing.workbench import Workbench
from enginery_attn_triton import tiling
from enginery_attn_triton.splitting import split_decoding
from enginery_attn_triton.tiling import DecodeCut, Device, LayerCut

H200 = Device(num_units=132, shared_bytes=227 << 10)
LLAMA = AttnLayerFacts(num_heads=32, num_kv_heads=8, head_dim=128)
PAGE = 16


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def checked_split(kv_lens: np.ndarray, cut: DecodeCut, shared: Sequence[SharedPrefix]) -> tuple[np.ndarray, np.ndarray]:
    """The items for tall tiles, and the others.

    Each request sees each of its keys once, its parts are numbered in order, and there are no more than there is room for.
    """
    items, splits, num_tall = split_decoding(kv_lens, cut, columns=100, page_size=PAGE, shared=shared)
    num = len(kv_lens)
    assert num_tall <= cut.tall_room(num)
    assert len(items) - num_tall <= num + cut.room(num)
    assert items[:num_tall, 5].max(initial=1) <= cut.tall_together
    assert items[num_tall:, 5].max(initial=1) <= cut.together
    assert (items[:, 1] == items[:, 0] * 100).all()
    assert splits[:, 1].sum() <= cut.parts
    assert (splits[:, 0] == splits[:, 1].cumsum() - splits[:, 1]).all()
    for request, kv_len in enumerate(kv_lens):
        mine = items[(items[:, 0] <= request) & (request < items[:, 0] + items[:, 5])]
        mine = mine[np.argsort(mine[:, 2])]
        assert mine[0, 2] == 0
        assert mine[-1, 3] == kv_len
        assert (mine[1:, 2] == mine[:-1, 3]).all()
        assert (mine[:, 2] < mine[:, 3]).all()
        assert mine[:, 4].tolist() == ([-1] if splits[request, 1] == 0 else list(range(splits[request, 1])))
    return items[:num_tall], items[num_tall:]


@given(
    groups=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(0, 900)), min_size=1, max_size=6),
    together=st.integers(2, 8),
    wave=st.integers(1, 40),
    extra=st.integers(0, 200),
    tall=st.booleans(),
)
def test_each_request_sees_its_keys_once_whatever_is_shared(groups, together, wave, extra, tall) -> None:
    cut = DecodeCut(
        window=None,
        tile_keys=64,
        programs=8,
        wave=wave,
        extra=extra,
        parts=3 * extra + 300,
        together=together,
        tall_together=4 * together if tall else 1,
        tall_wave=wave // 2 + 1 if tall else 0,
    )
    kv_lens, shared, first = [], [], 0
    for count, num_pages, more in groups:
        kv_lens += [num_pages * PAGE + 1 + more] * count
        shared += [SharedPrefix(first, count, num_pages)] if num_pages and count > 1 else []
        first += count
    checked_split(ints(*kv_lens), cut, shared)


def tiles_read(items: np.ndarray, cut: DecodeCut) -> int:
    return int((-(-(items[:, 3] - items[:, 2]) // cut.tile_keys)).sum())


def test_128_requests_with_a_prefix_of_4096_read_it_eight_times_and_not_128_times() -> None:
    cut = LayerCut.of(LLAMA, itemsize=2, device=H200).decode
    kv_lens = np.full(128, 4096 + 96, dtype=np.int32)
    tall, items = checked_split(kv_lens, cut, [])
    assert (tiles_read(tall, cut), tiles_read(items, cut)) == (0, 128 * 66)
    tall, items = checked_split(kv_lens, cut, [SharedPrefix(0, 128, 4096 // PAGE)])
    assert (tiles_read(tall, cut), tiles_read(items, cut)) == (8 * 64, 128 * 2)
    assert (tall[:, 5] == 16).all()
    assert 0.9 <= len(tall) * cut.programs / (2 * H200.num_units) <= 1


def test_eight_requests_with_a_prefix_read_it_twice_in_tiles_of_the_usual_size() -> None:
    cut = LayerCut.of(LLAMA, itemsize=2, device=H200).decode
    kv_lens = np.full(8, 4096 + 96, dtype=np.int32)
    tall, items = checked_split(kv_lens, cut, [SharedPrefix(0, 8, 4096 // PAGE)])
    assert (len(tall), tiles_read(items, cut)) == (0, 2 * 64 + 8 * 2)


def test_what_there_is_no_room_for_is_read_by_each_request() -> None:
    cut = DecodeCut(window=None, tile_keys=64, programs=8, wave=3, extra=4, parts=60, together=4)
    _, items = checked_split(ints(*[1100] * 20), cut, [SharedPrefix(0, 2, 20), SharedPrefix(2, 8, 60), SharedPrefix(10, 8, 61)])
    assert items[items[:, 5] > 1][:, [0, 5]].tolist() == [[10, 4], [14, 4], [2, 4]]


def test_windows_and_latents_share_nothing() -> None:
    windowed = AttnLayerFacts(num_heads=32, num_kv_heads=8, head_dim=128, sliding_window=1024)
    latent = LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
    for facts in (windowed, AttnLayerFacts(num_heads=16, num_kv_heads=1, head_dim=576, latent=latent)):
        cut = LayerCut.of(facts, itemsize=2, device=H200).decode
        assert (cut.together, cut.tall_together, cut.tall_room(256)) == (1, 1, 0)


class Interpreted(AttnBackendSuite):
    backend = "triton"


class OnCuda(AttnBackendSuite):
    backend = "triton"
    device = "cuda"


def bench_of(facts: AttnLayerFacts, *, dtype: str, suite: type[AttnBackendSuite] = Interpreted) -> Workbench:
    made = Workbench(suite.subject(), AttnCase(facts=facts, page_size=PAGE, dtype=dtype), num_tokens=9000)
    made.relay.ask("init_graph_state", max_batch_size=12, max_num_tokens=12)
    return made


def decoding(bench: Workbench, *groups: tuple[int, Sequence[int]]) -> tuple[ForwardBatch, list[Turn]]:
    """A written batch. Of each group, the pages that it shares, and each request's cached tokens beyond those."""
    bench.forget()
    turns = []
    for num_pages, lengths in groups:
        first = bench.tokens(num_pages * PAGE)
        for length in lengths:
            cached = num_pages * PAGE + length
            tokens = bench.sharing(first, num_pages, cached + 1)
            bench.pool.write(bench.layer.local_id, tokens.rows[1][:cached], tokens.rows[2][:cached], tokens.slots[:cached])
            turns.append(Turn(tokens, cached, 1))
    return bench.batch(turns, Phase.DECODE), turns


def sizes_of_shared_items(batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """Requests of each in a tall tile, and of each other."""
    (split,) = batch.plan.tables.decode.values()
    tall = [] if split.tall is None else split.tall[:, 5].tolist()
    return [size for size in tall if size > 1], [size for size in split.items[:, 5].tolist() if size > 1]


MHA, GQA_2, GQA_4, GQA_8 = (4, 4), (4, 2), (8, 2), (8, 1)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("heads", "softcap", "sinks", "dtype", "tall", "sizes"),
    [
        (MHA, None, False, "float32", False, [6, 3]),
        (GQA_2, 2.0, True, "float32", False, [6, 3]),
        (GQA_4, None, True, "float32", False, [3, 3, 3]),
        (GQA_8, 2.0, False, "float32", False, [2, 2, 2, 2]),
        (GQA_4, None, True, "bfloat16", True, [6, 3]),
        (GQA_8, 2.0, False, "bfloat16", True, [6, 3]),
    ],
)
def test_shared_keys_give_the_numbers_of_the_formula(heads, softcap, sinks, dtype, tall, sizes, monkeypatch) -> None:
    monkeypatch.setattr(tiling, "TALL_REQUESTS", 10 if tall else 11)
    facts = AttnLayerFacts(num_heads=heads[0], num_kv_heads=heads[1], head_dim=16, softcap=softcap, sinks=sinks)
    bench = bench_of(facts, dtype=dtype)
    batch, turns = decoding(bench, (17, (0, 3, 40)), (0, (5,)), (19, (1, 16, 33, 70, 0, 2)))
    batch = bench.relay.plan(batch)
    assert sizes_of_shared_items(batch) == ((sizes, []) if tall else ([], sizes))
    compare(bench.attend(batch, turns), [bench.expected(turn) for turn in turns], dtype=dtype, what=str(facts))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_captured_plan_serves_batches_that_share_and_that_do_not(dtype, monkeypatch) -> None:
    monkeypatch.setattr(tiling, "TALL_REQUESTS", 8)
    bench = bench_of(AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=16, sinks=True), dtype=dtype)
    captured = bench.pad(bench.batch([], Phase.DECODE), requests=8, tokens=8)
    captured = bench.relay.plan(captured, capture=True)
    alone = [(0, (300, 20, 5, 290, 1))]
    for groups in (alone, [(17, (0, 33, 2, 1)), (0, (9,))], [(16, (1, 2)), (18, (4, 5, 300))], alone):
        _, turns = decoding(bench, *groups)
        out = bench.replay(captured, turns)
        tall, usual = sizes_of_shared_items(captured)
        assert (bool(tall), bool(usual)) == ((False, False) if groups is alone else (dtype == "bfloat16", dtype == "float32"))
        compare(out, [bench.expected(turn) for turn in turns], dtype=dtype, what=f"{groups}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("heads", [MHA, GQA_2, GQA_4, GQA_8])
def test_shared_keys_give_the_numbers_of_the_formula_on_cuda(heads, tall, monkeypatch) -> None:
    monkeypatch.setattr(tiling, "TALL_REQUESTS", 10 if tall else 11)
    bench = bench_of(
        AttnLayerFacts(num_heads=heads[0], num_kv_heads=heads[1], head_dim=128, sinks=True), dtype="bfloat16", suite=OnCuda
    )
    batch, turns = decoding(bench, (17, (0, 3, 40)), (0, (5,)), (40, (1, 16, 33, 70, 0, 2)))
    batch = bench.relay.plan(batch)
    assert [bool(sizes) for sizes in sizes_of_shared_items(batch)] == [tall, not tall]
    for _ in range(3):
        compare(bench.attend(batch, turns), [bench.expected(turn) for turn in turns], dtype="bfloat16", what=f"{heads}")
