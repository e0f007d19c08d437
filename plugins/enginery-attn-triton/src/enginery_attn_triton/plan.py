"""What is computed on the host, once per batch, and uploaded in one piece.

    int32     [ items | splits | items | splits | ... | tiles | ... | page table ]      a section begins at a multiple of 4
                cut 0            cut 1                  tile size 0

Layers of one model differ in little, so most share their sections. B requests, P columns of the page table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from enginery.api import ForwardBatch, ForwardPlan, Unsupported
from enginery_attn_triton.tiling import MAX_WAVES, DecodeCut, Device, HeadDims, LayerCut, Tile, prefill_tile

Ints = np.ndarray[Any, np.dtype[np.int32]]

MIN_SPLIT_KEYS: Final = 64
WAVE_KEYS: Final = 1024  # of an item, where there is more than one wave of items
MAX_TABLE_ENTRIES: Final = 16 << 20  # of the page table of captured plans: 64 MiB


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Decoding requests, split. items: [I, 8], splits: [B, 2], int32, as `kernels.decode` has them. merged: whether to merge."""

    items: torch.Tensor
    splits: torch.Tensor
    merged: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiles:
    """Other requests in tiles of rows. table: [tiles, 8] int32, as `kernels.prefill` has it."""

    table: torch.Tensor
    tile: Tile


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """Of one batch. decode: by cut. prefill: by the layer's dims. pages: [B * P] int32."""

    decode: Mapping[DecodeCut, Split]
    prefill: Mapping[HeadDims, Tiles]
    pages: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TritonPlan(ForwardPlan):
    """tables: on the device. parts: the workspace of split requests, uint8."""

    tables: Tables
    parts: torch.Tensor


def split_decoding(kv_lens: Ints, cut: DecodeCut, *, columns: int) -> tuple[Ints, Ints]:
    """Items [I, 8] and splits [B, 2] of requests of one row each, the i-th of which has row i of a page table of `columns`.

    All parts have about the same number of keys: the fewest with which items fill one wave, or some where they remain long.
    """
    first = np.zeros_like(kv_lens) if cut.window is None else np.maximum(kv_lens - cut.window, 0)
    tiles = -(-(kv_lens - first) // cut.tile_keys)  # [B]
    waves = min(MAX_WAVES, max(1, int(tiles.sum()) * cut.tile_keys // (cut.wave * WAVE_KEYS)))
    extra = min(cut.extra, max(waves * cut.wave - len(tiles), cut.wave))
    low, high = max(1, MIN_SPLIT_KEYS // cut.tile_keys), max(1, int(tiles.max(initial=1)))
    while low < high:
        middle = (low + high) // 2
        if int((-(-tiles // middle)).sum()) - len(tiles) <= extra:
            high = middle
        else:
            low = middle + 1
    counts = np.maximum(-(-tiles // low), 1)  # [B]
    request = np.repeat(np.arange(len(counts), dtype=np.int32), counts)  # [I]
    ends = np.cumsum(counts)
    index = np.arange(len(request)) - (ends - counts)[request]

    def bound(number: Any) -> Any:
        keys = first[request] + tiles[request] * number // counts[request] * cut.tile_keys
        return np.minimum(keys, kv_lens[request])

    many = counts > 1
    parts = np.where(many, counts, 0)
    part = (np.cumsum(parts) - parts)[request] + index
    items = np.zeros((len(request), 8), dtype=np.int32)
    items[:, 0], items[:, 1] = request, request * columns
    items[:, 2], items[:, 3] = bound(index), bound(index + 1)
    items[:, 4] = np.where(many[request], part, -1)
    return items, np.stack((np.cumsum(parts) - parts, parts), axis=1).astype(np.int32)


def tiles_of(q_lens: Ints, kv_lens: Ints, bases: Ints, *, first_row: int, tokens: int) -> Ints:
    """[tiles, 8], the longest first: of requests whose rows follow each other from `first_row` on, `tokens` of them in a tile."""
    counts = -(-q_lens // tokens)
    request = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(request)) - (np.cumsum(counts) - counts)[request]) * tokens
    table = np.zeros((len(request), 8), dtype=np.int32)
    table[:, 0] = (first_row + np.cumsum(q_lens) - q_lens)[request]
    table[:, 1] = first
    table[:, 2], table[:, 3], table[:, 4] = q_lens[request], kv_lens[request], bases[request]
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
        whole = torch.empty(self.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        values = whole.numpy()
        for array, place in zip(self.arrays, self.places, strict=True):
            values[place : place + array.size] = array.reshape(-1)
        return whole

    def view(self, uploaded: torch.Tensor, number: int) -> torch.Tensor:
        """The array of this number on the device, in its shape."""
        array, place = self.arrays[number], self.places[number]
        return uploaded[place : place + array.size].view(array.shape)


def used_pages(batch: ForwardBatch, *, page_size: int) -> Ints:
    """The columns of the page table that are read: [B, P]."""
    longest = int(batch.kv_lens_cpu.max()) if batch.num_requests else 0
    table: Ints = batch.page_table_cpu.numpy()[:, : -(-longest // page_size)]
    return table


class GraphState:
    """The memory that captured plans of decoding steps point into; one of them is refreshed and replayed at a time.

    There are as many items as can be, and those that a batch does not need are empty.
    """

    def __init__(self, cuts: Sequence[DecodeCut], *, max_batch_size: int, num_pages: int, device: torch.device) -> None:
        self.cuts = tuple(cuts)
        self.max_batch_size = max_batch_size
        packed = Packed()
        self._numbers = [
            (packed.add(_zeros(max_batch_size + cut.extra, 8)), packed.add(_zeros(max_batch_size, 2))) for cut in self.cuts
        ]
        self._packed = packed
        self.table_entries = min(max_batch_size * num_pages, MAX_TABLE_ENTRIES)
        self.buffer = torch.zeros(packed.size + self.table_entries + 3, dtype=torch.int32, device=device)

    def tables(self, num_requests: int) -> Tables:
        """What a plan of that size runs over."""
        if num_requests > self.max_batch_size:
            raise Unsupported(f"a batch of {num_requests} is to be captured, but init_graph_state was told {self.max_batch_size}")
        found = {}
        for cut, (items, splits) in zip(self.cuts, self._numbers, strict=True):
            found[cut] = Split(
                items=self._packed.view(self.buffer, items)[: num_requests + cut.extra],
                splits=self._packed.view(self.buffer, splits)[:num_requests],
                merged=cut.extra > 0,
            )
        return Tables(decode=found, prefill={}, pages=self.buffer[self._packed.size :])

    def refresh(self, batch: ForwardBatch, *, page_size: int) -> None:
        """Upload what a batch of one token per request reads, in one copy."""
        table, kv_lens = used_pages(batch, page_size=page_size), batch.kv_lens_cpu.numpy()
        if table.size > self.table_entries:
            raise Unsupported(
                f"{batch.num_requests} requests of up to {table.shape[1]} pages do not fit the page table of captured steps, "
                f"which has {self.table_entries} entries; run this batch eagerly"
            )
        packed = Packed()
        for cut in self.cuts:
            items, splits = split_decoding(kv_lens, cut, columns=table.shape[1])
            packed.add(_filled(items, self.max_batch_size + cut.extra))
            packed.add(_filled(splits, self.max_batch_size))
        packed.add(table)
        self.buffer[: packed.size].copy_(packed.host(self.buffer.device), non_blocking=True)


def _zeros(*shape: int) -> Ints:
    return np.zeros(shape, dtype=np.int32)


def _filled(array: Ints, length: int) -> Ints:
    """With zeros up to `length` rows."""
    whole = _zeros(length, array.shape[1])
    whole[: len(array)] = array
    return whole


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Makes tables, from host tensors alone. cuts: of the model's layers, each once."""

    cuts: tuple[LayerCut, ...]
    page_size: int
    device: torch.device
    facts: Device

    def tables(self, batch: ForwardBatch) -> Tables:
        """Of the decoding requests at the front, of the others, and the page table."""
        q_lens, kv_lens = batch.q_lens_cpu.numpy(), batch.kv_lens_cpu.numpy()
        table, count = used_pages(batch, page_size=self.page_size), batch.num_leading_singles
        columns, packed = table.shape[1], Packed()
        splits: dict[DecodeCut, tuple[int, int]] = {}
        merged: dict[DecodeCut, bool] = {}
        for cut in {each.decode: None for each in self.cuts} if count else ():
            items, parts = split_decoding(kv_lens[:count], cut, columns=columns)
            splits[cut], merged[cut] = (packed.add(items), packed.add(parts)), bool(parts[:, 1].any())
        tiles: dict[HeadDims, tuple[int, Tile]] = {}
        longest = int(q_lens[count:].max(initial=0))
        for dims in {each.dims: None for each in self.cuts} if longest else ():
            tile = prefill_tile(dims, self.facts, max_rows=longest * dims.group)
            bases = np.arange(count, len(q_lens), dtype=np.int32) * np.int32(columns)
            numbers = tiles_of(q_lens[count:], kv_lens[count:], bases, first_row=count, tokens=tile.tokens)
            tiles[dims] = packed.add(numbers), tile
        pages = packed.add(table)
        uploaded = packed.host(self.device).to(self.device, non_blocking=True)
        return Tables(
            decode={
                cut: Split(items=packed.view(uploaded, items), splits=packed.view(uploaded, parts), merged=merged[cut])
                for cut, (items, parts) in splits.items()
            },
            prefill={dims: Tiles(table=packed.view(uploaded, number), tile=tile) for dims, (number, tile) in tiles.items()},
            pages=packed.view(uploaded, pages),
        )
