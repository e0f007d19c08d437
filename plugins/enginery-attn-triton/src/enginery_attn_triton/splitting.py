"""How the keys of decoding requests, and of few rows of prompts, are cut into items, for programs of about the same length.

B requests, P columns of the page table, R rows of keys that are cut, I items.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from enginery.kv.shared_prefixes import Ints, SharedPrefix, shared_prefixes
from enginery_attn_triton.tiling import TALL_WAVES, DecodeCut, Tile

MIN_SHARED_TOKENS: Final = 256  # that requests begin with, for them to be read once
MIN_SHARING: Final = 2  # requests
MIN_SPLIT_KEYS: Final = 64
WAVE_KEYS: Final = 1024  # of an item, where there is more than one wave of items
ITEM_TILES: Final = 2  # what an item costs besides its keys, as so many tiles
MIN_SHARED_KEYS: Final = 512  # of an item for several requests: it writes a part for each of them
MIN_TILE_KEYS: Final = 256  # of a part of a prompt's tile
RECUT_KEYS: Final = 32  # a captured step is cut anew when a request has so many keys more


class Rows(NamedTuple):
    """What items are cut from: keys [first, end) of requests [request, request + size). [R] each, int32."""

    request: Ints
    size: Ints
    first: Ints
    end: Ints


class Cutting(NamedTuple):
    """Items [I, 8] and splits [B, 2]. num_tall: of the items, the first, which are for tall tiles."""

    items: Ints
    splits: Ints
    num_tall: int


def sharing(table: Ints, kv_lens: Ints, *, page_size: int) -> list[SharedPrefix]:
    """Runs of requests that begin alike, long enough to be worth items of their own. table: [B, P], kv_lens: [B]."""
    return shared_prefixes(table, kv_lens, page_size=page_size, min_tokens=MIN_SHARED_TOKENS, min_requests=MIN_SHARING)


def rows_of(kv_lens: Ints, cut: DecodeCut, shared: Sequence[SharedPrefix], *, page_size: int, together: int) -> Rows:
    """First the keys that are shared, each row for `together` requests at the most; then the rest of each request's keys."""
    num = len(kv_lens)
    request, size = np.arange(num, dtype=np.int32), np.ones(num, dtype=np.int32)
    first: Ints = np.zeros(num, dtype=np.int32) if cut.window is None else np.maximum(kv_lens - cut.window, 0)
    if not shared:
        return Rows(request, size, first, kv_lens)
    chunks = []
    for prefix in shared:
        keys, count = prefix.num_pages * page_size, -(-prefix.count // together)
        first[prefix.first : prefix.first + prefix.count] = keys
        bounds = [prefix.first + prefix.count * number // count for number in range(count + 1)]
        chunks += [(low, high - low, 0, keys) for low, high in itertools.pairwise(bounds)]
    own = np.stack((request, size, first, kv_lens))
    return Rows(*np.concatenate((np.array(chunks, dtype=np.int32).T, own), axis=1))


def affordable(
    shared: Sequence[SharedPrefix], cut: DecodeCut, num_requests: int, *, room: int, together: int
) -> list[SharedPrefix]:
    """Those that save the most, and as many of their requests, as there is room for items and parts."""
    kept: list[SharedPrefix] = []
    parts = cut.parts - num_requests - 2 * cut.extra
    for prefix in sorted(shared, key=lambda prefix: -prefix.saved_pages) if together > 1 else ():
        count = min(prefix.count, room * together, parts)
        if count > 1:
            kept.append(SharedPrefix(prefix.first, count, prefix.num_pages))
            room, parts = room - -(-count // together), parts - count
    return kept


def tiles_per_item(tiles: Ints, *, most: int, least: int | Ints) -> int | Ints:
    """Of rows of so many tiles, the fewest for an item with which there are no more than `most` items; not fewer than `least`.

    tiles: [R], no more rows than `most`. least and the result: for all rows, or [R].
    """
    total = int(np.add.reduce(tiles))
    low, high = max(1, total // most), max(1, int(tiles.max(initial=1)))
    if most > len(tiles):
        high = min(high, max(1, -(-total // (most - len(tiles)))))
    while low < high:
        middle = (low + high) // 2
        if int(np.add.reduce(_num_items(tiles, _at_least(middle, least)))) <= most:
            high = middle
        else:
            low = middle + 1
    return _at_least(low, least)


def _at_least(number: int, least: int | Ints) -> int | Ints:
    """Plain numbers stay plain: numpy divides by them three times as fast."""
    if isinstance(least, int):
        return max(number, least)
    larger: Ints = np.maximum(number, least)
    return larger


def _num_items(tiles: Ints, per_item: int | Ints) -> Ints:
    counts: Ints = (tiles + (per_item - 1)) // per_item
    return counts


def split_decoding(
    kv_lens: Ints, cut: DecodeCut, *, columns: int, page_size: int = 1, shared: Sequence[SharedPrefix] = ()
) -> Cutting:
    """Of requests of one row each, the i-th of which has row i of a page table of `columns`.

    shared: disjoint; what there is no room for is read by each request.
    """
    num = len(kv_lens)
    tall = cut.tall_room(num)
    together, room = (cut.tall_together, tall) if tall else (cut.together, cut.room(num, waves=1))
    shared = affordable(shared, cut, num, room=room, together=together) if shared else ()
    rows = rows_of(kv_lens, cut, shared, page_size=page_size, together=together)
    return _split(rows, cut, num=num, columns=columns, tall=bool(tall))


def split_alone(kv_lens: Ints, cut: DecodeCut, *, columns: int, exact: bool) -> Cutting:
    """Of requests of cut.length rows each, whatever they share. exact: whether these are the lengths, or none is longer."""
    return split_requests(kv_lens, cut if exact else without_window(cut), columns=columns)


def split_requests(
    kv_lens: Ints, cut: DecodeCut, *, columns: int, page_size: int = 1, shared: Sequence[SharedPrefix] = ()
) -> Cutting:
    """Of requests of cut.length rows each. shared: what those of one row share."""
    if cut.length > 1:
        return split_verifying(kv_lens, cut, columns=columns)
    return split_decoding(kv_lens, cut, columns=columns, page_size=page_size, shared=shared)


def without_window(cut: DecodeCut) -> DecodeCut:
    """Where lengths are not known, where a window begins is not either."""
    return cut if cut.window is None else dataclasses.replace(cut, window=None)


def split_verifying(kv_lens: Ints, cut: DecodeCut, *, columns: int) -> Cutting:
    """Of requests of cut.length rows each, of which cut.together share an item.

    The i-th request has row i of a page table of `columns`.
    """
    each = cut.chunks
    request = np.arange(len(kv_lens), dtype=np.int32).repeat(each)
    above = np.tile(np.arange(each, dtype=np.int32) * np.int32(cut.together), len(kv_lens))  # rows of the request before these
    size = np.minimum(cut.length - above, cut.together)
    position = kv_lens[request] - cut.length + above
    first = np.zeros_like(position) if cut.window is None else np.maximum(position + 1 - cut.window, 0)
    rows = Rows(np.arange(len(request), dtype=np.int32), np.ones(len(request), dtype=np.int32), first, position + size)
    items, splits, num_tall = _split(rows, cut, num=len(request), columns=columns, tall=False)
    of_item = items[:, 0]
    items[:, 1], items[:, 5], items[:, 6] = request[of_item] * columns, size[of_item], position[of_item]
    items[:, 0] = request[of_item] * cut.length + above[of_item]
    counts = splits[:, 1].repeat(size)
    return Cutting(items, np.stack((counts.cumsum(dtype=np.int32) - counts, counts), axis=1), num_tall)


def _split(rows: Rows, cut: DecodeCut, *, num: int, columns: int, tall: bool) -> Cutting:
    """Into items that all have about the same number of keys: the fewest with which they fill one wave, or some where they remain
    long. rows: the last `num` are one for each request, those before of keys that requests share, in tall tiles or not."""
    num_shared = len(rows.request) - num
    tiles = (rows.end - rows.first + (cut.tile_keys - 1)) // cut.tile_keys  # [R]
    counts = _num_items(tiles, _tiles_per_item(tiles, rows.size, cut, num_shared=num_shared, tall=tall))  # [R]
    stops = counts.cumsum()
    before = np.zeros(num, dtype=np.int32)  # parts of shared keys
    for request, size, count in zip(rows.request[:num_shared], rows.size, counts[:num_shared], strict=False):
        before[request : request + size] = count
    parts = counts[num_shared:] + before
    parts[parts == 1] = 0  # [B]
    row = np.empty((len(counts), 8), dtype=np.int32)
    row[:, 0], row[:, 1], row[:, 2], row[:, 3] = rows.request, rows.request * columns, rows.first, rows.end
    row[:num_shared, 4], row[num_shared:, 4] = 0, np.where(parts > 0, before, -1)
    row[:, 5], row[:, 6], row[:, 7] = rows.size, tiles, counts
    items: Ints = row.repeat(counts, axis=0)  # [I, 8]; each has its row's range yet, and its row's first part
    index = np.arange(len(items)) - (stops - counts).repeat(counts)
    items[:, 2] += items[:, 6] * index // items[:, 7] * cut.tile_keys
    items[:-1, 3] = items[1:, 2]
    items[stops - 1, 3] = rows.end
    items[:, 4] += index  # -1 has one item
    num_tall = int(stops[num_shared - 1]) if num_shared and tall else 0
    if cut.wave < len(items) - num_tall:  # the longest first, so that the last ones to run are short
        usual = items[num_tall:]
        lengths = (usual[:, 2] - usual[:, 3]) // cut.tile_keys  # negative
        items[num_tall:] = usual.take(lengths.astype(np.int16).argsort(kind="stable"), axis=0)  # 16 bits are sorted by radix
    splits = np.empty((num, 2), dtype=np.int32)
    splits[:, 0], splits[:, 1] = parts.cumsum() - parts, parts
    return Cutting(items, splits, num_tall)


def _tiles_per_item(tiles: Ints, sizes: Ints, cut: DecodeCut, *, num_shared: int, tall: bool) -> int | Ints:
    """`tiles_per_item` of all rows; of those that are shared and of the others apart, where they are launched apart."""
    num, least = len(tiles) - num_shared, max(1, MIN_SPLIT_KEYS // cut.tile_keys)
    if not num_shared:
        return _filling_waves(tiles, cut, num_requests=num, least=least)
    above, own = tiles[:num_shared], tiles[num_shared:]
    above_least = max(1, MIN_SHARED_KEYS // cut.tile_keys)
    if tall:
        most = cut.tall_wave * _num_waves(above, cut.tall_wave, tile_keys=cut.tile_keys, most=TALL_WAVES)
        first = tiles_per_item(above, most=max(num_shared, most), least=above_least)
        rest = _filling_waves(own, cut, num_requests=num, least=least)
    else:
        leasts = np.where(sizes > 1, above_least, least)
        first, rest = np.split(_filling_waves(tiles, cut, num_requests=num, least=leasts), [num_shared])
    parts = cut.parts - num - 2 * cut.extra
    while int((-(-above // first)) @ sizes[:num_shared]) > parts:
        first = 2 * first
    return np.concatenate((first * np.ones_like(above), rest * np.ones_like(own)))


def _num_waves(tiles: Ints, wave: int, *, tile_keys: int, most: int) -> int:
    return min(most, max(1, int(np.add.reduce(tiles)) * tile_keys // (wave * WAVE_KEYS)))


def _filling_waves(tiles: Ints, cut: DecodeCut, *, num_requests: int, least: int | Ints) -> int | Ints:
    """One wave where no item of it is much longer than the others; else as many items as there is room for. Where requests fill a
    wave as they are, those alone are split that would be the last to end: parts and their merging cost more than they even out."""
    wave, total = cut.wave_of(num_requests), int(np.add.reduce(tiles))
    if num_requests >= (wave if cut.length == 1 else 3 * wave // 4):
        least = _at_least(max(total // wave, 2 * total // len(tiles)), least)
    waves = _num_waves(tiles, wave, tile_keys=cut.tile_keys, most=cut.most_waves(num_requests))
    one = min(wave, num_requests + cut.extra)
    if waves == 1 and len(tiles) <= one:
        per = tiles_per_item(tiles, most=one, least=least)
        if int(np.max(per)) <= 1.5 * total / wave + ITEM_TILES:
            return per
    return tiles_per_item(tiles, most=num_requests + cut.room(num_requests, waves=waves), least=least)


class TileCutting(NamedTuple):
    """items: [I, 8], tiles of which each has a part of the keys. splits: [S, 2], of all rows up to the last of a tile."""

    items: Ints
    splits: Ints


def split_tiles(tiles: Ints, cut: DecodeCut, tile: Tile, *, most: int) -> TileCutting | None:
    """Of prompts that are too few rows to fill the device: each tile's keys in up to `most` parts. None: all keys stay together.

    tiles: [., 8] as `kernels.prefill` has them, unsplit.
    """
    if most < 2:
        return None
    first_row, token, num_rows, num_keys = tiles[:, :4].T
    rows = np.minimum(num_rows - token, tile.tokens)
    stop = num_keys - num_rows + token + rows
    start = np.zeros_like(stop) if cut.window is None else np.maximum(stop - rows + 1 - cut.window, 0) // tile.keys * tile.keys
    blocks = (stop - start + (tile.keys - 1)) // tile.keys
    counts = np.clip(np.minimum(blocks, blocks * tile.keys // MIN_TILE_KEYS), 1, most)
    parts = np.where(counts > 1, counts, 0)
    if not parts.any() or int(parts @ rows) > cut.parts:
        return None
    items = tiles.repeat(counts, axis=0)
    index = np.arange(len(items)) - (counts.cumsum() - counts).repeat(counts)
    for column, number in ((5, index), (6, index + 1)):
        items[:, column] = start.repeat(counts) + blocks.repeat(counts) * number // counts.repeat(counts) * tile.keys
    items[:, 7] = np.where(parts.repeat(counts) > 0, index, -1)
    splits = np.zeros((int((first_row + num_rows).max()), 2), dtype=np.int32)
    for row, size, count in zip(first_row + token, rows, parts, strict=True):
        splits[row : row + size, 1] = count
    splits[:, 0] = splits[:, 1].cumsum() - splits[:, 1]
    return TileCutting(items, splits)


class RecentCut:
    """The cutting of a captured step, which serves the steps after it while they differ only by some more keys of each request.

    Where a window moves on, so do all items of its request.
    """

    def __init__(self, kv_lens: Ints, cut: DecodeCut, *, columns: int, page_size: int, shared: Sequence[SharedPrefix]) -> None:
        self.cut, self.shared = cut, shared
        self.seen = _seen(kv_lens, cut).copy()  # [B]
        self.firsts = kv_lens - self.seen
        self.cutting = split_requests(kv_lens, cut, columns=columns, page_size=page_size, shared=shared)
        items = self.cutting.items
        self.request, above = np.divmod(items[:, 0], cut.length)
        behind: Ints = cut.length - above - np.minimum(cut.length - above, cut.together) if cut.length > 1 else above
        ends = kv_lens[self.request] - behind  # shared keys end before
        self.last = np.flatnonzero(items[:, 3] == ends)
        self.behind, self.last_request = behind[self.last], self.request[self.last]

    def followed_by(self, kv_lens: Ints, *, columns: int, shared: Sequence[SharedPrefix]) -> bool:
        """Whether it serves these lengths, and if so, now has them."""
        if len(kv_lens) != len(self.seen) or shared != self.shared:
            return False
        seen, length = _seen(kv_lens, self.cut), self.cut.length
        more = seen - self.seen
        most = RECUT_KEYS if self.cut.window is None or length == 1 else 0  # rows whose window is not full yet begin alike
        if int(more.min(initial=0)) < 0 or int(more.max(initial=0)) > most:
            return False
        items, firsts = self.cutting.items, kv_lens - seen
        if self.cut.window is not None:
            items[:, 2:4] += (firsts - self.firsts)[self.request, None]
            self.firsts = firsts
        items[:, 1], items[self.last, 3] = self.request * columns, kv_lens[self.last_request] - self.behind
        if length > 1:
            items[:, 6] = kv_lens[self.request] - length + items[:, 0] % length
        return True


def _seen(kv_lens: Ints, cut: DecodeCut) -> Ints:
    """How many keys the rows of each request see, of one or the other: [B]."""
    return kv_lens if cut.window is None else np.minimum(kv_lens, cut.window + cut.length - 1)
