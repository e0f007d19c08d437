"""Tables of captured prefills and mixed steps, at fixed places for every step of so many rows; what a step does not need is empty.

    int32     [ splits | tall items | items | ... | tiles | splits of rows | tiles | ... | page table ]
                decoding, cut 0               ...   prompts, tile size 0

A program for an empty item or tile returns at once. R rows of a step, as padded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from enginery.api import ForwardBatch, Unsupported
from enginery.kv.shared_prefixes import Ints
from enginery_attn_triton.plan import Layout, Planner, Tables, Tiles, TilesKey, fill, host_ints, rows_at, tiles_of, used_pages
from enginery_attn_triton.spec import MIXED_TABLE_BYTES
from enginery_attn_triton.splitting import Cutting, TileCutting, sharing, split_decoding, split_tiles
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


class MixedState:
    """The memory that captured plans of these steps point into; one of them is refreshed and replayed at a time."""

    def __init__(self, planner: Planner, *, max_requests: int, max_rows: int, num_pages: int) -> None:
        self._planner, self._max_requests = planner, max_requests
        distinct = planner.cuts.of(1).distinct
        self._layout = Layout.of((each.decode for each in distinct), max_requests=max_requests)
        self._sections: dict[TilesKey, _Section] = {}
        size = self._layout.size
        for each in distinct:
            tile = prefill_tile(each.dims, planner.facts, max_rows=max_rows * each.dims.group)
            programs = each.dims.num_kv_heads * -(-each.dims.group // tile.group_rows)
            section = _Section(tile, each.decode, planner.facts.num_units // programs, tiles=size, splits=0)
            splits = size + 8 * max(section.room(max_rows), section.most_items)
            self._sections[each.dims, each.decode.window] = section._replace(splits=splits)
            size = splits + -(-2 * max_rows // 4) * 4
        self._pages = size
        self._num_entries = min(max_requests * num_pages, MIXED_TABLE_BYTES // 4)
        self._buffer = torch.zeros(size + self._num_entries, dtype=torch.int32, device=planner.device)

    def tables(self, num_rows: int) -> Tables:
        """What a plan of so many rows runs over."""
        prefill = {
            key: Tiles(
                table=rows_at(self._buffer, section.tiles, section.room(num_rows), 8),
                tile=section.tile,
                splits=rows_at(self._buffer, section.splits, num_rows, 2) if section.splits_keys(num_rows) else None,
            )
            for key, section in self._sections.items()
        }
        return Tables(
            decode=self._layout.splits(self._buffer, self._max_requests), prefill=prefill, pages=self._buffer[self._pages :]
        )

    def refresh(self, batch: ForwardBatch) -> None:
        """Upload what a batch reads, in one copy. Raises `Unsupported` for one that there is no room for."""
        page_size, num_rows = self._planner.page_size, batch.num_tokens
        table, kv_lens, count = used_pages(batch, page_size=page_size), batch.kv_lens_cpu.numpy(), batch.num_decode_requests
        if count > self._max_requests or table.size > self._num_entries:
            raise Unsupported(
                f"{batch.num_requests} requests of up to {table.shape[1]} pages do not fit the tables of captured steps, which are "
                f"for {self._max_requests} requests and {self._num_entries} entries"
            )
        prompts = {key: self._tiles(section, batch, columns=table.shape[1]) for key, section in self._sections.items()}
        host = host_ints(self._pages + table.size, self._planner.device)
        values = host.numpy()
        for key, section in self._sections.items():
            items, splits = prompts[key]
            fill(values[section.tiles :], items, 8 * section.room(num_rows))
            fill(values[section.splits :], np.empty(0, dtype=np.int32) if splits is None else splits, 2 * num_rows)
        shared = sharing(table[:count], kv_lens[:count], page_size=page_size)

        def cut_for(cut: DecodeCut) -> Cutting:
            return split_decoding(kv_lens[:count], cut, columns=table.shape[1], page_size=page_size, shared=shared)

        self._layout.fill(values, self._max_requests, cut_for)
        values[self._pages :].reshape(table.shape)[:] = table
        self._buffer[: len(values)].copy_(host, non_blocking=True)

    def _tiles(self, section: _Section, batch: ForwardBatch, *, columns: int) -> tuple[Ints, Ints | None]:
        """Of prompts behind the decoding requests, and of the rows that are nobody's: with no keys, `out` is zero there."""
        count, num_rows = batch.num_decode_requests, batch.num_tokens
        q_lens, kv_lens = batch.q_lens_cpu.numpy()[count:], batch.kv_lens_cpu.numpy()[count:]
        bases = np.arange(count, count + len(q_lens) + 1, dtype=np.int32) * np.int32(columns)
        rest = np.int32(num_rows - count - int(q_lens.sum()))
        tiles = tiles_of(
            np.append(q_lens, rest), np.append(kv_lens, np.int32(0)), bases, first_row=count, tokens=section.tile.tokens
        )
        room = section.room(num_rows)
        if len(tiles) > room:
            raise Unsupported(
                f"the {len(q_lens)} prompts of a step of {num_rows} rows are {len(tiles)} tiles, and {room} are captured"
            )
        return section.cut_tiles(tiles, num_rows) if len(tiles) else (tiles, None)
