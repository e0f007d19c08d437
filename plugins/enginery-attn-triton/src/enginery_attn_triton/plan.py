"""What is computed on the host, once per batch, and uploaded in one piece.

    int32     [ items | splits | items | splits | ... | tiles | ... | page table ]      a section begins at a multiple of 4
                cut 0            cut 1                  tile size 0

Layers of one model differ in little, so most share their sections. B requests, P columns of the page table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from enginery.api import ForwardBatch, ForwardPlan, Unsupported
from enginery.kv.shared_prefixes import Ints, SharedPrefix
from enginery_attn_triton.launches import Launches
from enginery_attn_triton.spec import MOST_ROWS, TABLE_BYTES
from enginery_attn_triton.splitting import Cutting, RecentCut, sharing, split_alone, split_decoding, split_tiles, without_window
from enginery_attn_triton.tiling import DecodeCut, Device, HeadDims, LayerCut, LayerCuts, Tile, prefill_tile

TilesKey = tuple[HeadDims, int | None]  # of layers with such dims and such a window


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Decoding requests, split. items: [I, 8], splits: [B, 2], int32, as `kernels.decode` has them.

    tall: items of tall tiles, which are launched first; None where none are. merged: whether to merge. launches: of its layers.
    """

    items: torch.Tensor
    splits: torch.Tensor
    tall: torch.Tensor | None
    merged: bool
    launches: Launches = field(default_factory=Launches)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiles:
    """Other requests in tiles of rows. table: [tiles, 8] int32, as `kernels.prefill` has it.

    splits: [S, 2] int32, as `kernels.merge` has them, of all rows of the batch; None: no tile's keys are split.
    """

    table: torch.Tensor
    tile: Tile
    splits: torch.Tensor | None = None
    launches: Launches = field(default_factory=Launches)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """Of one batch. decode: by cut. prefill: by the layer's dims and window. pages: [B * P] int32."""

    decode: Mapping[DecodeCut, Split]
    prefill: Mapping[TilesKey, Tiles]
    pages: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TritonPlan(ForwardPlan):
    """tables: on the device. parts: the workspace of split requests, uint8.

    trees: [requests, N, N] bool, device, written after planning, of requests whose drafts may branch; None: there are none.
    """

    tables: Tables
    parts: torch.Tensor
    trees: torch.Tensor | None = None


def tiles_of(q_lens: Ints, kv_lens: Ints, bases: Ints, *, first_row: int, tokens: int) -> Ints:
    """[tiles, 8], the longest first: of requests whose rows follow each other from `first_row` on, `tokens` of them in a tile."""
    counts = -(-q_lens // tokens)
    request = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(request)) - (np.cumsum(counts) - counts)[request]) * tokens
    table = np.zeros((len(request), 8), dtype=np.int32)
    table[:, 0] = (first_row + np.cumsum(q_lens) - q_lens)[request]
    table[:, 1] = first
    table[:, 2], table[:, 3], table[:, 4] = q_lens[request], kv_lens[request], bases[request]
    table[:, 6], table[:, 7] = np.iinfo(np.int32).max, -1
    return table[np.argsort(-(table[:, 3] - table[:, 2] + first), kind="stable")]


class Packed:
    """Arrays for one upload."""

    def __init__(self) -> None:
        self.arrays: list[Ints] = []
        self.places: list[int] = []
        self.size = 0

    def add(self, array: Ints) -> int:
        """Its number."""
        self.arrays.append(array)
        self.places.append(self.size)
        self.size += -(-array.size // 4) * 4
        return len(self.arrays) - 1

    def host(self, device: torch.device) -> torch.Tensor:
        """[size] int32, pinned where the device copies from such."""
        whole = host_ints(self.size, device)
        values = whole.numpy()
        for array, place in zip(self.arrays, self.places, strict=True):
            values[place : place + array.size] = array.reshape(-1)
        return whole

    def view(self, uploaded: torch.Tensor, number: int) -> torch.Tensor:
        """The array of this number on the device, in its shape."""
        array, place = self.arrays[number], self.places[number]
        return uploaded[place : place + array.size].view(array.shape)


def host_ints(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")


def used_pages(batch: ForwardBatch, *, page_size: int) -> Ints:
    """The columns of the page table that are read: [B, P]."""
    longest = int(batch.kv_lens_cpu.numpy().max()) if batch.num_requests else 0
    table: Ints = batch.page_table_cpu.numpy()[:, : -(-longest // page_size)]
    return table


class Layout(NamedTuple):
    """Where the sections of each cut begin: splits, tall items, items; and where the last ends."""

    cuts: tuple[DecodeCut, ...]
    places: tuple[tuple[int, int, int], ...]
    size: int

    @classmethod
    def of(cls, cuts: Iterable[DecodeCut], *, max_requests: int) -> Layout:
        """Of so many requests at the most."""
        size, places, distinct = 0, [], tuple(dict.fromkeys(cuts))
        for cut in distinct:
            tall = size + -(-2 * max_requests * cut.length // 4) * 4
            items = tall + 8 * cut.tall_room(max_requests)
            places.append((size, tall, items))
            size = items + 8 * (max_requests * cut.chunks + cut.extra)
        return cls(distinct, tuple(places), size)

    def splits(self, buffer: torch.Tensor, num_requests: int, *, shares: bool = True) -> dict[DecodeCut, Split]:
        """Of a captured plan for so many requests. shares: whether keys that requests share are read once."""
        found = {}
        for cut, (splits, tall, items) in zip(self.cuts, self.places, strict=True):
            num_tall = cut.tall_room(num_requests) if shares else 0
            found[cut] = Split(
                items=rows_at(buffer, items, cut.captured_items(num_requests), 8),
                splits=rows_at(buffer, splits, num_requests * cut.length, 2),
                tall=rows_at(buffer, tall, num_tall, 8) if num_tall else None,
                merged=cut.extra > 0 and not (shares and cut.is_one_tile),
            )
        return found

    def fill(self, values: Ints, num_requests: int, cut_for: Callable[[DecodeCut], Cutting], seen: Iterable[LayerCut]) -> None:
        """Write what there is of each cut; what else a captured plan for so many requests has room for is empty.

        seen: layers that the batch is planned for.
        """
        wanted = {layer.decode for layer in seen}
        for cut, (splits_place, tall_place, items_place) in zip(self.cuts, self.places, strict=True):
            if cut not in wanted:
                continue
            items, splits, num_tall = cut_for(cut)
            fill(values[splits_place:], splits, 2 * num_requests * cut.length)
            fill(values[tall_place:], items[:num_tall], 8 * cut.tall_room(num_requests))
            fill(values[items_place:], items[num_tall:], 8 * cut.captured_items(num_requests))


class GraphState:
    """The memory that captured plans of decoding steps point into; one of them is refreshed and replayed at a time.

    int32     [ splits | tall items | items | splits | tall items | items | ... | page table ]      each for the largest batch
                cut 0                         cut 1

    There are as many items as can be, and those that a batch does not need are empty. Where requests have several rows, there is
    room for fewer of them, and the sections before the page table are laid out anew.
    """

    def __init__(self, cuts: LayerCuts, *, max_batch_size: int, max_rows: int, num_pages: int, device: torch.device) -> None:
        self.cuts, self.max_rows = cuts, max_rows
        self.recent: dict[DecodeCut, RecentCut] = {}
        self.layouts: dict[int, Layout] = {}
        for length in range(1, min(MOST_ROWS, max_rows) + 1):
            most = min(max_batch_size, max_rows // length)
            self.layouts[length] = Layout.of((cut.decode for cut in cuts.of(length).distinct), max_requests=most)
        self.table_place = max(layout.size for layout in self.layouts.values())
        self.table_entries = min(max_batch_size * num_pages, TABLE_BYTES // 4)
        self.buffer = torch.zeros(self.table_place + self.table_entries + 3, dtype=torch.int32, device=device)

    def tables(self, num_requests: int, *, length: int = 1, shares: bool = True) -> Tables:
        """What a plan of that size runs over. length: rows of a request. shares: whether keys that requests share are read once,
        as they are where the host knows the lengths."""
        if num_requests * length > self.max_rows or length not in self.layouts:
            raise Unsupported(
                f"a batch of {num_requests} requests of {length} rows is to be captured, but init_graph_state was told "
                f"{self.max_rows} rows, and requests have {MOST_ROWS} at the most"
            )
        found = self.layouts[length].splits(self.buffer, num_requests, shares=shares)
        return Tables(decode=found, prefill={}, pages=self.buffer[self.table_place :])

    def refresh(self, batch: ForwardBatch, *, page_size: int) -> None:
        """Upload what a batch of decoding requests reads, in one copy."""
        table, kv_lens, num = used_pages(batch, page_size=page_size), batch.kv_lens_cpu.numpy(), batch.num_requests
        if table.size > self.table_entries:
            raise Unsupported(
                f"{num} requests of up to {table.shape[1]} pages do not fit the page table of captured steps, "
                f"which has {self.table_entries} entries; run this batch eagerly"
            )
        seen, is_plain = self.cuts.seen_by(batch), batch.decode_len == 1 and batch.kv_lens is None
        shared = sharing(table, kv_lens, page_size=page_size) if is_plain and any(layer.shares for layer in seen) else []
        host = host_ints(self.table_place + table.size, self.buffer.device)
        values, layout = host.numpy(), self.layouts[batch.decode_len]

        def cut_for(cut: DecodeCut) -> Cutting:
            known = cut if batch.kv_lens is None else without_window(cut)
            return self._recently_cut(known, kv_lens, table.shape[1], page_size=page_size, shared=shared)

        layout.fill(values, num, cut_for, seen)
        values[self.table_place :].reshape(table.shape)[:] = table
        self.buffer[: len(values)].copy_(host, non_blocking=True)

    def _recently_cut(
        self, cut: DecodeCut, kv_lens: Ints, columns: int, *, page_size: int, shared: Sequence[SharedPrefix]
    ) -> Cutting:
        recent = self.recent.get(cut)
        if recent is None or not recent.followed_by(kv_lens, columns=columns, shared=shared):
            recent = RecentCut(kv_lens, cut, columns=columns, page_size=page_size, shared=shared)
            self.recent[cut] = recent
        return recent.cutting


def rows_at(buffer: torch.Tensor, place: int, count: int, columns: int) -> torch.Tensor:
    """So many rows of a table, from this place on."""
    return buffer[place : place + count * columns].view(count, columns)


def fill(values: Ints, array: Ints, size: int) -> None:
    """The array, then zeros up to `size`."""
    values[: array.size] = array.reshape(-1)
    values[array.size : size] = 0


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Makes tables, from host tensors alone."""

    cuts: LayerCuts
    page_size: int
    device: torch.device
    facts: Device

    def tables(self, batch: ForwardBatch) -> Tables:
        """Of the decoding requests at the front, of the others, and the page table."""
        kv_lens = batch.kv_lens_cpu.numpy()
        table, count = used_pages(batch, page_size=self.page_size), batch.num_decode_requests
        columns, packed, length = table.shape[1], Packed(), batch.decode_len
        cuts = self.cuts.seen_by(batch)
        is_plain = length == 1 and batch.kv_lens is None
        shares = is_plain and any(cut.shares for cut in cuts)
        shared = sharing(table[:count], kv_lens[:count], page_size=self.page_size) if shares else ()
        splits: dict[DecodeCut, tuple[int, int, int]] = {}
        for cut in {each.decode: None for each in cuts} if count else ():
            if not is_plain:
                items, parts, num_tall = split_alone(kv_lens[:count], cut, columns=columns, exact=batch.kv_lens is None)
            else:
                items, parts, num_tall = split_decoding(
                    kv_lens[:count], cut, columns=columns, page_size=self.page_size, shared=shared
                )
            splits[cut] = packed.add(items[num_tall:]), packed.add(parts), packed.add(items[:num_tall])
        tiles = self._prompts(batch, packed, columns=columns)
        pages = packed.add(table)
        uploaded = packed.host(self.device).to(self.device, non_blocking=True)

        def split_of(cut: DecodeCut) -> Split:
            items, parts, tall = (packed.view(uploaded, number) for number in splits[cut])
            merged = bool(packed.arrays[splits[cut][1]][:, 1].any())
            return Split(items=items, splits=parts, tall=tall if len(tall) else None, merged=merged)

        def tiles_at(table: int, of_rows: int | None, tile: Tile) -> Tiles:
            splits_at = None if of_rows is None else packed.view(uploaded, of_rows)
            return Tiles(table=packed.view(uploaded, table), tile=tile, splits=splits_at)

        return Tables(
            decode={cut: split_of(cut) for cut in splits},
            prefill={key: tiles_at(*placed) for key, placed in tiles.items()},
            pages=packed.view(uploaded, pages),
        )

    def _prompts(self, batch: ForwardBatch, packed: Packed, *, columns: int) -> dict[TilesKey, tuple[int, int | None, Tile]]:
        """Of the requests behind the decoding ones, where in `packed` their tiles are, and their splits if there are some."""
        count, first_row = batch.num_decode_requests, batch.num_decode_requests * batch.decode_len
        q_lens, kv_lens = batch.q_lens_cpu.numpy()[count:], batch.kv_lens_cpu.numpy()[count:]
        bases = np.arange(count, count + len(q_lens), dtype=np.int32) * np.int32(columns)
        longest = int(q_lens.max(initial=0))
        whole: dict[HeadDims, tuple[Ints, int, Tile]] = {}
        found: dict[TilesKey, tuple[int, int | None, Tile]] = {}
        for each in self.cuts.seen_by(batch) if longest else ():
            if each.dims not in whole:
                tile = prefill_tile(each.dims, self.facts, max_rows=longest * each.dims.group)
                tiles = tiles_of(q_lens, kv_lens, bases, first_row=first_row, tokens=tile.tokens)
                whole[each.dims] = tiles, packed.add(tiles), tile
            tiles, place, tile = whole[each.dims]
            programs = each.dims.num_kv_heads * -(-each.dims.group // tile.group_rows)
            cut = split_tiles(tiles, each.decode, tile, most=self.facts.num_units // (programs * len(tiles)))
            key = each.dims, each.decode.window
            found[key] = (place, None, tile) if cut is None else (packed.add(cut.items), packed.add(cut.splits), tile)
        return found
