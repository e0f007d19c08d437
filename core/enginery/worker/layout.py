"""From a step as a value to the tensors of one forward: built on the host, padded there, uploaded in one piece."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, STATE, WINDOW, ForwardBatch, MemoryKind, Phase, StateView, View
from enginery.contracts.drafting import ON_DEVICE
from enginery.contracts.step import INT, Items, StepInput
from enginery.errors import Unsupported
from enginery.worker.drafts.trees import depths_of
from enginery.worker.page_tables import KindTable, PageTables

KNOWN = -1  # in `token_sources`: the input token is on the host
_NO_ADAPTER: Final = INT.type(-1).tobytes()


def lay_out(step: StepInput, tables: PageTables) -> ForwardBatch:
    """Lay the step's items out one after the other, decoding ones first, as scheduled; all in host memory, with T rows.

    tables: have taken the step. A token that the host does not know yet is 0. Raises `Unsupported` for what no worker runs yet.
    """
    items, page_size = step.columns(), tables.page_size
    _refuse_unknown(step, items, has_windows=tables.window is not None)
    q_lens = step.rows
    kv_lens = items.start + q_lens
    num_columns = -(-max(kv_lens.tolist(), default=1) // page_size)  # Python's, as in `StepInput.num_tokens`; of no items one
    page_table = tables.full.of(items.seat, num_columns)
    row_of, positions = _rows_and_positions(step, items, q_lens)
    column, offset = np.divmod(positions, page_size)
    slots = page_table[row_of, column].astype(np.int64) * page_size + offset
    if items.first_write.tobytes() != items.start.tobytes():  # bytes, as a reduction takes ten times as long
        shared = positions < items.first_write[row_of]
        slots[shared] = tables.full.scratch_page * page_size + offset[shared]
    positions = _of_drafts(step, items, positions, row_of=row_of)
    seats = torch.from_numpy(items.seat)
    views: dict[MemoryKind, View | StateView] = {
        FULL: View(slots=torch.from_numpy(slots), page_table_cpu=torch.from_numpy(page_table))
    }
    if tables.window is not None:
        views[WINDOW] = _window_view(tables.window, step, column=column, row_of=row_of, offset=offset, page_size=page_size)
    views[STATE] = _state_view(step, seats)
    return ForwardBatch(
        phase=step.phase,
        input_ids=torch.from_numpy(_input_ids(step, items)),
        positions=torch.from_numpy(positions),
        q_lens_cpu=torch.from_numpy(q_lens),
        kv_lens_cpu=torch.from_numpy(kv_lens),
        num_logits_cpu=torch.from_numpy(logits_of_items(step)),
        seats_cpu=seats,
        views=views,
        decode_len=step.decode_len,
        trees=bool(step.parents),
    )


def no_requests(geometry: KVGeometry, length: int = 1, *, trees: bool = False) -> ForwardBatch:
    """A decoding batch to be padded, on the host, with a view of each kind of memory. length: rows of a request."""
    tokens, requests = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    nothing = torch.empty(0, 1, dtype=torch.int32)
    views: dict[MemoryKind, View | StateView] = {FULL: View(slots=tokens, page_table_cpu=nothing)}
    if WINDOW in geometry.pages:
        views[WINDOW] = View(slots=tokens, page_table_cpu=nothing, starts_cpu=requests)
    views[STATE] = StateView(reads_cpu=requests, writes_cpu=requests)
    return ForwardBatch(
        phase=Phase.DECODE if length == 1 else Phase.VERIFY,
        input_ids=tokens,
        positions=tokens,
        q_lens_cpu=requests,
        kv_lens_cpu=requests,
        num_logits_cpu=requests,
        seats_cpu=requests,
        views=views,
        decode_len=length,
        trees=trees,
    )


def begins_of(counts: np.ndarray) -> np.ndarray:
    """Where each of so many rows begins, one item after the other: [B] int64."""
    begins: np.ndarray = np.cumsum(counts) - counts
    return begins


def places_within(counts: np.ndarray) -> np.ndarray:
    """Of each row its place in its item, of so many rows each: [T] int64."""
    places: np.ndarray = np.arange(int(counts.sum())) - begins_of(counts).repeat(counts)
    return places


def logits_of_items(step: StepInput) -> np.ndarray:
    """How many of each item's last rows need logits: [B] int32. Of those that verify drafts, all rows."""
    num_logits = step.columns().num_logits
    if not step.verifies:
        return num_logits
    return np.concatenate((step.rows[: step.num_decode], num_logits[step.num_decode :]))


def drafts_of_items(step: StepInput) -> dict[int, tuple[int, ...]]:
    """The guesses of each item that verifies, by its index: the last of its tokens. `ON_DEVICE` for each that the host lacks."""
    if not step.verifies:
        return {}
    items = step.columns()
    known = np.frombuffer(step.input_ids, INT)
    ends = np.cumsum(items.num_tokens - items.pending)
    return {
        index: (ON_DEVICE,) * count if items.pending[index] else tuple(known[ends[index] - count : ends[index]].tolist())
        for index, count in enumerate(items.num_drafts[: step.num_decode].tolist())
    }


def _rows_and_positions(step: StepInput, items: Items, q_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The item of each token, and its position: [T] int64 both."""
    row_of = np.arange(step.num_items)
    if _one_each(step):
        return row_of, items.start.astype(np.int64)
    return row_of.repeat(q_lens), step.row_places + items.start.repeat(q_lens)


def _of_drafts(step: StepInput, items: Items, positions: np.ndarray, *, row_of: np.ndarray) -> np.ndarray:
    """The positions, by row, as they are drawn and rotated: where drafts branch by depth, and none of padding too far."""
    if not step.verifies:
        return positions
    positions = np.minimum(positions, (items.start + items.num_tokens - 1)[row_of])
    if step.parents:
        depths = depths_of(step).ravel()
        positions[: len(depths)] = items.start[row_of[: len(depths)]] + depths
    return positions


def _window_view(
    table: KindTable, step: StepInput, *, column: np.ndarray, row_of: np.ndarray, offset: np.ndarray, page_size: int
) -> View:
    """Its table begins, for each request, with the first page that is held. column, offset, row_of: [T], of each token."""
    items = step.columns()
    seats, kv_lens = items.seat, items.start + step.rows
    firsts = table.firsts[seats]
    held = table.from_firsts(seats, int((-(-kv_lens // page_size) - firsts).max(initial=1)))
    slots = held[row_of, column - firsts[row_of]].astype(np.int64) * page_size + offset
    return View(
        slots=torch.from_numpy(slots),
        page_table_cpu=torch.from_numpy(held),
        starts_cpu=torch.from_numpy((firsts * page_size).astype(np.int32)),
    )


def _state_view(step: StepInput, seats: torch.Tensor) -> StateView:
    """Where each request's state is read and written: at its seat, unless the step says otherwise."""
    if not step.states:
        return StateView(reads_cpu=seats, writes_cpu=seats)
    reads, writes, checkpoints, rows = map(torch.from_numpy, np.frombuffer(step.states, INT).reshape(-1, 4).T.copy())
    if not rows.any():
        return StateView(reads_cpu=reads, writes_cpu=writes)
    return StateView(reads_cpu=reads, writes_cpu=writes, checkpoints_cpu=checkpoints, checkpoint_rows_cpu=rows)


def token_sources(step: StepInput, *, width: int, size: int | None = None) -> torch.Tensor:
    """For a row whose token is on the device alone, its place in `TokenFeed.tokens`, else `KNOWN`: [T] int64, or [size].

    width: of a seat there: the token that was sampled last, then guesses.
    """
    items = step.columns()
    begins = items.seat * width  # [B]
    if _one_each(step):
        return _as_long(np.where(items.pending, begins, KNOWN), size, fill=KNOWN)
    of_rows = (items.num_tokens - items.pending, items.num_tokens, begins)
    known, count, begin = (values.repeat(step.rows) for values in of_rows)
    is_there = (step.row_places >= known) & (step.row_places < count)
    return _as_long(np.where(is_there, begin + step.row_places, KNOWN), size, fill=KNOWN)


def has_pending(step: StepInput) -> bool:
    """Whether the token of a row is on the device alone."""
    return any(step.columns().pending.tolist())


def sampled_seats(step: StepInput, *, size: int | None = None, fill: int = 0) -> torch.Tensor:
    """The seat of each item that samples: [S] int64; or [size], `fill` past those."""
    return _as_long(step.columns().seat[step.sampling], size, fill=fill)


def num_drafts(step: StepInput, *, size: int) -> torch.Tensor:
    """How many drafts each item has: [size] int64, 0 past those."""
    return _as_long(step.columns().num_drafts, size, fill=0)


def _as_long(values: np.ndarray, size: int | None, *, fill: int) -> torch.Tensor:
    return torch.from_numpy(grown(values.astype(np.int64), len(values) if size is None else size, fill=fill))


def grown(values: np.ndarray, *shape: int, fill: int) -> np.ndarray:
    """The values in front, `fill` behind them. Not `np.pad`, which takes ten times as long; itself where it has the shape."""
    if values.shape == shape:
        return values
    larger = np.full(shape, fill, values.dtype)
    larger[tuple(map(slice, values.shape))] = values
    return larger


def _one_each(step: StepInput) -> bool:
    """Whether each item has one token, as in plain decoding."""
    return step.num_tokens == step.num_items and not step.verifies


def _refuse_unknown(step: StepInput, items: Items, *, has_windows: bool) -> None:
    asked = {
        "adapters": items.adapter.tobytes() != _NO_ADAPTER * step.num_items,
        "tree parents": step.parents and (has_windows or not step.verifies),
    }
    for name, there in asked.items():
        if there:
            raise Unsupported(f"step {step.number} has {name}, which this worker does not run")


def _input_ids(step: StepInput, items: Items) -> np.ndarray:
    """[T] int64; those that are not known yet are 0."""
    known, num_tokens = np.frombuffer(step.input_ids, INT), step.num_tokens
    if len(known) == num_tokens and not step.verifies:
        return known.astype(np.int64)
    rows = step.rows
    ids = np.zeros(int(rows.sum()), np.int64)
    if len(known):
        ids[step.row_places < (items.num_tokens - items.pending).repeat(rows)] = known
    return ids
