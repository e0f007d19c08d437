"""Tables of captured prefills and mixed steps, at fixed places for every step of so many rows; what a step does not need is empty.

    int32     [ splits | tall items | items | ... | tiles | splits of rows | tiles | ... | page table ]
                decoding, cut 0               ...   prompts, tile size 0

A program for an empty item or tile returns at once. Where requests verify drafts, with several rows each, the sections before the
page table are laid out anew. R rows of a step, as padded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from enginery.api import ForwardBatch, Unsupported
from enginery.kv.shared_prefixes import Ints
from enginery_attn_triton.plan import Layout, Planner, Tables, Tiles, TilesKey, fill, host_ints, rows_at, tiles_of, used_pages
from enginery_attn_triton.spec import MIXED_TABLE_BYTES, MOST_ROWS
from enginery_attn_triton.splitting import Cutting, TileCutting, sharing, split_requests, split_tiles
from enginery_attn_triton.tiling import DecodeCut, Tile, prefill_tile

MOST_PROMPTS = 16  # of a step, each of which may begin a tile that it does not fill


class _Section(NamedTuple):
    """Of layers of equal dims and window: where tiles and splits are. most_items: of tiles whose keys are split; 1: none is."""

    tile: Tile
    cut: DecodeCut
    most_items: int
    tiles: int
    splits: int

    def room(self, num_rows: int) -> int:
        """Tiles of a step of so many rows, at the most."""
        whole = num_rows // self.tile.tokens + MOST_PROMPTS
        return max(whole, self.most_items) if self.splits_keys(num_rows) else whole

    def splits_keys(self, num_rows: int) -> bool:
        """Whether a prompt of so many rows has too few tiles for the device, so that the keys of each are divided."""
        return 2 * -(-num_rows // self.tile.tokens) <= self.most_items

    def cut_tiles(self, tiles: Ints, num_rows: int) -> tuple[Ints, Ints | None]:
        """Tiles, or parts of them and [R, 2] splits."""
        cutting: TileCutting | None = None
        if self.splits_keys(num_rows):
            cutting = split_tiles(tiles, self.cut, self.tile, most=self.most_items // len(tiles))
        return (tiles, None) if cutting is None else cutting


class _Sections(NamedTuple):
    """Of steps whose decoding requests have so many rows each. most: such requests. size: where the last section ends."""

    most: int
    layout: Layout
    prompts: dict[TilesKey, _Section]
    size: int


class MixedState:
    """The memory that captured plans of these steps point into; one of them is refreshed and replayed at a time."""

    def __init__(self, planner: Planner, *, max_requests: int, max_rows: int, num_pages: int) -> None:
        self._planner, lengths = planner, range(1, min(MOST_ROWS, max_rows) + 1)
        self._of = {length: self._sections(length, min(max_requests, max_rows // length), max_rows) for length in lengths}
        self._pages = max(sections.size for sections in self._of.values())
        self._num_entries = min(max_requests * num_pages, MIXED_TABLE_BYTES // 4)
        self._buffer = torch.zeros(self._pages + self._num_entries, dtype=torch.int32, device=planner.device)

    def _sections(self, length: int, most: int, max_rows: int) -> _Sections:
        facts, distinct = self._planner.facts, self._planner.cuts.of(length).distinct
        layout, prompts = Layout.of((each.decode for each in distinct), max_requests=most), dict[TilesKey, _Section]()
        size = layout.size
        for each in distinct:
            tile = prefill_tile(each.dims, facts, max_rows=max_rows * each.dims.group)
            programs = each.dims.num_kv_heads * -(-each.dims.group // tile.group_rows)
            section = _Section(tile, each.decode, facts.num_units // programs, tiles=size, splits=0)
            splits = size + 8 * max(section.room(max_rows), section.most_items)
            prompts[each.dims, each.decode.window] = section._replace(splits=splits)
            size = splits + -(-2 * max_rows // 4) * 4
        return _Sections(most, layout, prompts, size)

    def tables(self, num_rows: int, length: int) -> Tables:
        """What a plan of so many rows runs over. length: rows of a decoding request."""
        if length not in self._of:
            raise Unsupported(f"requests of {length} rows are to be captured beside prompts, and they have {len(self._of)} at most")
        sections = self._of[length]
        prefill = {
            key: Tiles(
                table=rows_at(self._buffer, section.tiles, section.room(num_rows), 8),
                tile=section.tile,
                splits=rows_at(self._buffer, section.splits, num_rows, 2) if section.splits_keys(num_rows) else None,
            )
            for key, section in sections.prompts.items()
        }
        decode = sections.layout.splits(self._buffer, min(sections.most, num_rows // length))
        return Tables(decode=decode, prefill=prefill, pages=self._buffer[self._pages :])

    def refresh(self, batch: ForwardBatch) -> None:
        """Upload what a batch reads, in one copy. Raises `Unsupported` for one that there is no room for."""
        page_size, num_rows, length = self._planner.page_size, batch.num_tokens, batch.decode_len
        table, kv_lens, count = used_pages(batch, page_size=page_size), batch.kv_lens_cpu.numpy(), batch.num_decode_requests
        sections = self._of[length]
        most = min(sections.most, num_rows // length)
        if count > most or table.size > self._num_entries:
            raise Unsupported(
                f"{batch.num_requests} requests of up to {table.shape[1]} pages do not fit the tables of captured steps, which are "
                f"for {most} requests and {self._num_entries} entries"
            )
        seen = self._planner.cuts.seen_by(batch)
        keys = [(layer.dims, layer.decode.window) for layer in seen]
        prompts = {key: self._tiles(sections.prompts[key], batch, columns=table.shape[1]) for key in keys}
        host = host_ints(self._pages + table.size, self._planner.device)
        values = host.numpy()
        for key, (items, splits) in prompts.items():
            section = sections.prompts[key]
            fill(values[section.tiles :], items, 8 * section.room(num_rows))
            fill(values[section.splits :], np.empty(0, dtype=np.int32) if splits is None else splits, 2 * num_rows)
        shares = length == 1 and any(layer.shares for layer in seen)
        shared = sharing(table[:count], kv_lens[:count], page_size=page_size) if shares else ()

        def cut_for(cut: DecodeCut) -> Cutting:
            return split_requests(kv_lens[:count], cut, columns=table.shape[1], page_size=page_size, shared=shared)

        sections.layout.fill(values, most, cut_for, seen)
        values[self._pages :].reshape(table.shape)[:] = table
        self._buffer[: len(values)].copy_(host, non_blocking=True)

    def _tiles(self, section: _Section, batch: ForwardBatch, *, columns: int) -> tuple[Ints, Ints | None]:
        """Of prompts behind the decoding requests, and of the rows that are nobody's: with no keys, `out` is zero there."""
        count, num_rows = batch.num_decode_requests, batch.num_tokens
        first_row = count * batch.decode_len
        q_lens, kv_lens = batch.q_lens_cpu.numpy()[count:], batch.kv_lens_cpu.numpy()[count:]
        bases = np.arange(count, count + len(q_lens) + 1, dtype=np.int32) * np.int32(columns)
        rest = np.int32(num_rows - first_row - int(q_lens.sum()))
        tiles = tiles_of(
            np.append(q_lens, rest), np.append(kv_lens, np.int32(0)), bases, first_row=first_row, tokens=section.tile.tokens
        )
        room = section.room(num_rows)
        if len(tiles) > room:
            raise Unsupported(
                f"the {len(q_lens)} prompts of a step of {num_rows} rows are {len(tiles)} tiles, and {room} are captured"
            )
        return section.cut_tiles(tiles, num_rows) if len(tiles) else (tiles, None)
