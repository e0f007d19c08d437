"""How requests and prompts are cut into items and tiles, and which steps a cut serves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cut_shapes import DEEPSEEK, H200, LLAMA, lens
from hypothesis import given
from hypothesis import strategies as st

from enginery.api import AttnLayerFacts
from enginery_attn_triton.plan import tiles_of
from enginery_attn_triton.spec import WORKSPACE_BYTES, make_spec
from enginery_attn_triton.splitting import (
    MIN_TILE_KEYS,
    split_decoding,
    split_requests,
    split_tiles,
    split_verifying,
)
from enginery_attn_triton.tiling import DecodeCut, HeadDims, LayerCut, decode_tile, part_bytes, prefill_tile, resident


@given(
    kv_lens=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    window=st.none() | st.integers(1, 600),
    tile_keys=st.sampled_from([16, 64]),
    extra=st.integers(0, 50),
)
def test_items_cover_what_each_row_sees_once_and_are_no_more_than_allowed(kv_lens, window, tile_keys, extra) -> None:
    cut = DecodeCut(window=window, tile_keys=tile_keys, programs=2, wave=max(1, extra // 3), extra=extra, parts=2 * extra)
    items, splits, num_tall = split_decoding(lens(*kv_lens), cut, columns=7)
    assert num_tall == 0
    assert len(items) - len(kv_lens) <= extra
    parts = []
    for row, kv_len in enumerate(kv_lens):
        mine = items[items[:, 0] == row]
        mine = mine[np.argsort(mine[:, 2])]
        assert (mine[:, 1] == row * 7).all()
        assert mine[0, 2] == max(0, kv_len - (window or kv_len))
        assert mine[-1, 3] == kv_len
        assert (mine[1:, 2] == mine[:-1, 3]).all()
        assert (mine[:, 2] < mine[:, 3]).all()
        first, count = splits[row]
        assert (mine[:, 5] == 1).all()
        assert mine[:, 4].tolist() == ([-1] if count == 0 else list(range(count)))
        parts += range(first, first + count)
    assert parts == list(range(len(parts)))
    assert len(parts) <= 2 * extra


def test_a_captured_step_of_few_requests_has_one_wave_of_items_that_are_even() -> None:
    cut = LayerCut.of(LLAMA, itemsize=2, device=H200).decode
    assert [cut.room(requests) for requests in (1, 4, 5)] == [cut.wave, cut.wave, 4 * cut.wave - 5]
    for kv_lens in ((500_000,), (90_000, 3_000, 40_000, 17_000), (60_000,) * 3):
        items, _, _ = split_decoding(lens(*kv_lens), cut, columns=7)
        assert len(items) <= cut.wave, "one more would run alone, after all others"
        assert (items[:, 3] - items[:, 2]).max() <= 1.1 * sum(kv_lens) / cut.wave
    items, _, _ = split_decoding(lens(500_000), cut, columns=7)
    lengths = items[:, 3] - items[:, 2]
    assert lengths.max() - lengths.min() <= cut.tile_keys


@pytest.mark.parametrize(("requests", "wave"), [(1, 49), (2, 49), (3, 66)])
def test_few_requests_have_as_many_items_as_their_kernel_runs_at_once(requests: int, wave: int) -> None:
    """Of 128 dims three programs run on a multiprocessor, not four."""
    cut = LayerCut.of(LLAMA, itemsize=2, device=dataclasses.replace(H200, chained=True)).decode
    assert cut.room(requests) == wave
    items, _, _ = split_decoding(lens(*[60_000] * requests), cut, columns=7)
    assert 0.9 * wave < len(items) <= wave


@given(
    kv_lens=st.lists(st.integers(8, 3000), min_size=1, max_size=20),
    window=st.none() | st.integers(1, 600),
    length=st.integers(2, 8),
    together=st.integers(1, 8),
    extra=st.integers(0, 50),
)
def test_items_of_drafts_cover_what_their_rows_see_once(kv_lens, window, length, together, extra) -> None:
    together = min(together, length)
    cut = DecodeCut(
        window=window, tile_keys=16, programs=2, wave=max(1, extra // 3), extra=extra, parts=999, length=length, together=together
    )
    items, splits, num_tall = split_verifying(lens(*kv_lens), cut, columns=7)
    assert (num_tall, len(splits)) == (0, length * len(kv_lens))
    parts = []
    for row in range(length * len(kv_lens)):
        request, inside = divmod(row, length)
        mine = items[(items[:, 0] <= row) & (row < items[:, 0] + items[:, 5])]
        mine = mine[np.argsort(mine[:, 2])]
        assert (mine[:, 1] == request * 7).all()
        assert (mine[:, 0] == request * length + inside // together * together).all()
        position = kv_lens[request] - length + inside
        assert (mine[:, 6] + row - mine[:, 0] == position).all()
        assert mine[0, 2] <= (0 if window is None else max(0, position + 1 - window))
        assert mine[-1, 3] > position
        assert mine[-1, 3] <= kv_lens[request]
        assert (mine[1:, 2] == mine[:-1, 3]).all()
        first, count = splits[row]
        assert mine[:, 4].tolist() == ([-1] if count == 0 else list(range(count)))
        parts += range(first, first + count)
    assert parts == list(range(len(parts)))
    assert len(parts) <= 2 * extra * together


def test_drafts_of_a_few_requests_are_split_over_the_whole_device() -> None:
    """As tiles of a prefill, one request has eight programs."""
    for facts in (LLAMA, DEEPSEEK):
        layer = LayerCut.of(facts, itemsize=2, device=H200, length=4)
        items, *_ = split_verifying(lens(4096), layer.decode, columns=256)
        assert len(items) * layer.decode.programs > 100
        assert layer.workspace_bytes <= WORKSPACE_BYTES


def test_one_long_request_is_split_over_the_whole_device_and_many_short_ones_are_not() -> None:
    layer = LayerCut.of(LLAMA, itemsize=2, device=H200)
    cut = layer.decode
    items, *_ = split_decoding(lens(32768), cut, columns=2048)
    assert 3.5 * H200.num_units <= len(items) * cut.programs <= 4 * H200.num_units
    sizes = items[:, 3] - items[:, 2]
    assert sizes.max() - sizes.min() <= cut.tile_keys
    items, splits, _ = split_decoding(lens(*[60] * 300), cut, columns=4)
    assert len(items) == 300
    assert not splits.any()


@pytest.mark.parametrize("count", [32, 64])
def test_requests_that_fill_a_wave_are_not_cut_into_a_second(count) -> None:
    cut = LayerCut.of(LLAMA, itemsize=2, device=H200).decode
    items, *_ = split_decoding(lens(*[300] * count), cut, columns=20)
    assert len(items) == 64 <= cut.wave
    uneven, *_ = split_decoding(lens(*[300] * count, 100_000), cut, columns=20)
    assert len(uneven) > cut.wave


@given(kv_lens=st.lists(st.integers(1, 5000), min_size=1, max_size=40), window=st.integers(1, 200))
def test_rows_that_see_one_tile_are_never_split(kv_lens, window) -> None:
    facts = AttnLayerFacts(num_heads=64, num_kv_heads=8, head_dim=64, sliding_window=window)
    cut = LayerCut.of(facts, itemsize=2, device=H200).decode
    assert cut.is_one_tile == (window <= 128)
    if cut.is_one_tile:
        assert not split_decoding(lens(*kv_lens), cut, columns=400).splits[:, 1].any()


def test_the_longest_items_come_first() -> None:
    cut = LayerCut.of(LLAMA, itemsize=2, device=H200).decode
    items, *_ = split_decoding(lens(*range(100, 1600, 12)), cut, columns=100)
    assert (np.diff(-(-(items[:, 3] - items[:, 2]) // cut.tile_keys)) <= 0).all()


def test_a_long_request_among_short_ones_is_split() -> None:
    cut = LayerCut.of(LLAMA, itemsize=2, device=H200).decode
    items, *_ = split_decoding(lens(*[200] * 255, 100_000), cut, columns=6250)
    assert (items[:, 3] - items[:, 2]).max() < 4000


@pytest.mark.parametrize("facts", [LLAMA, DEEPSEEK, dataclasses.replace(LLAMA, num_heads=256, num_kv_heads=1, head_dim=256)])
def test_the_workspace_is_within_what_capabilities_state(facts) -> None:
    cut = LayerCut.of(facts, itemsize=2, device=H200)
    assert 0 < cut.workspace_bytes <= WORKSPACE_BYTES < make_spec().capabilities.workspace_bytes
    assert 2 * cut.decode.extra <= cut.decode.parts == cut.workspace_bytes // part_bytes(cut.dims)


@given(requests=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 300)), min_size=1, max_size=12), tokens=st.integers(1, 33))
def test_tiles_cover_each_token_once_the_longest_first(requests, tokens) -> None:
    q_lens, kv_lens = (lens(*values) for values in zip(*[(new, cached + new) for new, cached in requests], strict=True))
    table = tiles_of(q_lens, kv_lens, np.arange(len(q_lens), dtype=np.int32), first_row=5, tokens=tokens)
    covered = sorted(row + token for row, first, end, *_ in table.tolist() for token in range(first, min(first + tokens, end)))
    assert [first + token for first, token in ((5, row) for row in range(int(q_lens.sum())))] == covered
    ends = table[:, 3] - table[:, 2] + table[:, 1]
    assert (ends[:-1] >= ends[1:]).all()


@given(
    requests=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 3000)), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 900),
    most=st.integers(2, 9),
    parts=st.sampled_from([40, 4000]),
)
def test_split_tiles_see_all_keys_once_and_have_parts_of_their_own(requests, window, most, parts) -> None:
    q_lens, kv_lens = (lens(*values) for values in zip(*[(new, cached + new) for new, cached in requests], strict=True))
    tile = dataclasses.replace(prefill_tile(LayerCut.of(LLAMA, itemsize=2, device=H200).dims, H200, max_rows=16), keys=16)
    cut = DecodeCut(window=window, tile_keys=16, programs=2, wave=4, extra=0, parts=parts)
    tiles = tiles_of(q_lens, kv_lens, np.arange(len(q_lens), dtype=np.int32), first_row=3, tokens=tile.tokens)
    found = split_tiles(tiles, cut, tile, most=most)
    if found is None:
        seen = kv_lens if window is None else np.minimum(kv_lens, window + tile.tokens + tile.keys)
        assert (seen < 2 * MIN_TILE_KEYS).all() or parts == 40
        return
    used = []
    for row in tiles.tolist():
        mine = found.items[(found.items[:, :5] == row[:5]).all(1)]
        last = row[3] - row[2] + min(row[1] + tile.tokens, row[2])
        assert mine[0, 5] <= max(0, row[3] - row[2] + row[1] + 1 - (window or last))
        assert mine[-1, 6] >= last
        assert (mine[1:, 5] == mine[:-1, 6]).all()
        assert (mine[:, 5:7] % tile.keys == 0).all()
        assert len(mine) <= most
        for first, count in found.splits[row[0] + row[1] : row[0] + min(row[1] + tile.tokens, row[2])]:
            assert mine[:, 7].tolist() == ([-1] if count == 0 else list(range(count)))
            used += range(first, first + count)
    assert sorted(used) == list(range(len(used)))
    assert len(used) <= parts


def test_a_prompt_whose_prefix_is_known_is_split_over_the_whole_device() -> None:
    gpt_oss = LayerCut.of(AttnLayerFacts(num_heads=64, num_kv_heads=8, head_dim=64), itemsize=2, device=H200)
    tile = prefill_tile(gpt_oss.dims, H200, max_rows=16 * 8)
    tiles = tiles_of(lens(16), lens(8192), lens(0), first_row=0, tokens=tile.tokens)
    found = split_tiles(tiles, gpt_oss.decode, tile, most=132 // 8)
    assert found is not None
    assert len(found.items) == 16
    assert split_tiles(tiles, gpt_oss.decode, tile, most=1) is None


@pytest.mark.parametrize(("heads", "rows", "keys"), [(16, 16, 128), (32, 16, 64), (64, 64, 32), (128, 64, 32)])
def test_a_request_of_latents_is_cut_into_one_wave_of_items_of_one_or_two_tiles(heads: int, rows: int, keys: int) -> None:
    layer = LayerCut.of(dataclasses.replace(DEEPSEEK, num_heads=heads), itemsize=2, device=H200)
    assert (layer.decode_tile.rows, layer.decode_tile.keys) == (rows, keys)
    items = split_decoding(lens(640), layer.decode, columns=40).items
    assert len(items) * layer.decode.programs <= resident(layer.decode_tile, layer.dims, H200) * H200.num_units
    assert (items[:, 3] - items[:, 2]).max() <= max(64, layer.decode_tile.keys)


@pytest.mark.parametrize(
    ("heads", "length", "tile", "together", "programs"),
    [
        (16, 2, (16, 64, 16), 1, 1),  # a token's heads in a tile
        (16, 3, (64, 32, 16), 3, 1),
        (16, 4, (64, 32, 16), 4, 1),
        (16, 5, (64, 32, 16), 4, 1),  # in two chunks
        (8, 2, (16, 128, 8), 2, 1),
        (8, 4, (16, 64, 8), 2, 1),
        (20, 2, (64, 32, 20), 2, 1),
        (32, 2, (64, 32, 32), 2, 1),
        (128, 2, (64, 32, 64), 1, 2),
    ],
)
def test_verified_rows_of_latents_have_the_tiles_of_so_many_heads(
    heads: int, length: int, tile: tuple[int, int, int], together: int, programs: int
) -> None:
    layer = LayerCut.of(dataclasses.replace(DEEPSEEK, num_heads=heads), itemsize=2, device=H200, length=length)
    found, cut = layer.decode_tile, layer.decode
    assert (found.rows, found.keys, found.group_rows) == tile
    assert (cut.together, cut.programs) == (together, programs)
    items = split_verifying(lens(1024), cut, columns=64).items
    assert len(items) * programs <= resident(found, layer.dims, H200) * H200.num_units, "one wave"
    assert (items[:, 3] - items[:, 2]).max() <= max(64, found.keys)
    assert layer.workspace_bytes <= WORKSPACE_BYTES


@pytest.mark.parametrize("length", [1, 2])
def test_devices_with_little_shared_memory_have_small_tiles_of_latents(length: int) -> None:
    small = dataclasses.replace(H200, shared_bytes=99 << 10)
    assert decode_tile(HeadDims.of(DEEPSEEK, 2), small, length=length).keys == 16


def test_verified_rows_of_long_heads_are_with_few_warps() -> None:
    """Qwen3-Next's, with four guesses: eight warps took nearly twice as long."""
    facts = AttnLayerFacts(num_heads=16, num_kv_heads=2, head_dim=256)
    found = LayerCut.of(facts, itemsize=2, device=H200, length=5).decode_tile
    assert (found.rows, found.keys, found.warps) == (64, 32, 4)
    assert LayerCut.of(facts, itemsize=4, device=H200, length=5).decode_tile.warps == 8, "of float32, registers hold no more"
    latents = HeadDims.of(dataclasses.replace(DEEPSEEK, num_heads=32), 1)  # of float8
    assert decode_tile(latents, H200).warps == 8, "they were not measured with fewer"


def test_tiles_fit_into_shared_memory() -> None:
    for facts in (LLAMA, DEEPSEEK, dataclasses.replace(LLAMA, head_dim=256), dataclasses.replace(LLAMA, head_dim=64)):
        for itemsize in (2, 4):
            for device in (H200, dataclasses.replace(H200, shared_bytes=99 << 10)):
                dims = LayerCut.of(facts, itemsize=itemsize, device=device).dims
                tile = prefill_tile(dims, device, max_rows=4096)
                main, rope, _ = dims.blocks
                needed = (
                    tile.rows * (main + (rope if dims.rope else 0)) * itemsize
                    + (tile.stages + 1) // 2 * tile.keys * dims.token_bytes
                )
                assert needed <= device.shared_bytes


@pytest.mark.parametrize(
    ("facts", "length", "tile"),
    [
        (LLAMA, 1, (16, 64, 3)),
        (LLAMA, 4, (16, 64, 3)),
        (LLAMA, 5, (32, 128, 2)),  # four guesses of 8B's shape
        (dataclasses.replace(LLAMA, num_heads=64), 4, (32, 128, 2)),  # three of 70B's
        (dataclasses.replace(LLAMA, num_heads=64), 5, (64, 64, 3)),
        (dataclasses.replace(LLAMA, head_dim=256), 1, (16, 64, 2)),
        (dataclasses.replace(LLAMA, head_dim=256), 8, (32, 64, 2)),
        (dataclasses.replace(LLAMA, head_dim=64), 8, (32, 128, 3)),
    ],
)
def test_long_heads_and_32_rows_have_large_tiles_where_there_is_room(
    facts: AttnLayerFacts, length: int, tile: tuple[int, int, int]
) -> None:
    layer = LayerCut.of(facts, itemsize=2, device=H200, length=length)
    found = layer.decode_tile
    assert (found.rows, found.keys, found.stages) == tile
    assert resident(found, layer.dims, H200) == (4 if found.stages == 3 and found.rows == 16 else 2)
    small = dataclasses.replace(H200, shared_bytes=99 << 10)
    assert LayerCut.of(facts, itemsize=2, device=small, length=length).decode_tile.keys * layer.dims.token_bytes <= 32 << 10
    if layer.tall_tile is not None:
        assert layer.tall_tile.keys * layer.dims.token_bytes <= 32 << 10, "64 rows of more keys take all registers"


@pytest.mark.parametrize(("length", "num"), [(1, 128), (4, 64), (4, 128), (5, 64), (5, 256)])
def test_requests_that_fill_the_device_are_not_split_to_even_them_out(length: int, num: int) -> None:
    """Parts and their merging took 7 to 33 % longer, 101.6 and not 79.1 us of 128 requests with three guesses."""
    cut = LayerCut.of(LLAMA, itemsize=2, device=H200, length=length).decode
    mixed = np.random.default_rng(0).integers(300, 700, num).astype(np.int32)
    items = split_requests(mixed, cut, columns=64).items
    assert len(items) == num * cut.chunks
    if len(items) > cut.wave:
        assert (np.diff(items[:, 3] - items[:, 2]) < cut.tile_keys).all(), "the longest are first"
    skewed = np.full(num, 300, dtype=np.int32)
    skewed[5] = 20000
    counts = split_requests(skewed, cut, columns=2000).splits[:, 1].reshape(num, length)
    assert (np.delete(counts, 5, axis=0) == 0).all()
    assert (counts[5] > 4).all(), "what would be the last to end is split"
