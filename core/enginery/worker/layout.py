"""From a step as a value to the tensors of one forward: built on the host, padded there, uploaded in one piece."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from enginery.contracts.batch import FULL, STATE, ForwardBatch, StateView, View
from enginery.contracts.step import INT, Items, StepInput
from enginery.errors import Unsupported
from enginery.worker.page_tables import PageTables

KNOWN = -1  # in `token_sources`: the input token is on the host
_NO_DRAFT: Final = INT.type(0).tobytes()
_NO_ADAPTER: Final = INT.type(-1).tobytes()


def lay_out(step: StepInput, tables: PageTables) -> ForwardBatch:
    """Lay the step's items out one after the other, decoding ones first, as scheduled; all in host memory, with T rows.

    tables: have taken the step. A token that the host does not know yet is 0. Raises `Unsupported` for what no worker runs yet.
    """
    items, page_size = step.columns(), tables.page_size
    _refuse_unknown(step, items)
    q_lens = items.num_tokens
    kv_lens = items.start + q_lens
    page_table = tables.of(items.seat, -(-int(kv_lens.max()) // page_size))
    row_of = np.arange(len(q_lens))  # [T]
    if _one_each(step):
        positions = items.start.astype(np.int64)
    else:
        row_of = row_of.repeat(q_lens)
        first_of = np.cumsum(q_lens) - q_lens
        positions = np.arange(len(row_of)) + (items.start - first_of)[row_of]
    column, offset = np.divmod(positions, page_size)
    slots = page_table[row_of, column].astype(np.int64) * page_size + offset
    if items.first_write.tobytes() != items.start.tobytes():  # bytes, as a reduction takes ten times as long
        shared = positions < items.first_write[row_of]
        slots[shared] = tables.scratch_page * page_size + offset[shared]
    seats = torch.from_numpy(items.seat)
    return ForwardBatch(
        phase=step.phase,
        input_ids=torch.from_numpy(_input_ids(step, items)),
        positions=torch.from_numpy(positions),
        q_lens_cpu=torch.from_numpy(q_lens),
        kv_lens_cpu=torch.from_numpy(kv_lens),
        num_logits_cpu=torch.from_numpy(items.num_logits),
        seats_cpu=seats,
        views={
            FULL: View(slots=torch.from_numpy(slots), page_table_cpu=torch.from_numpy(page_table)),
            STATE: StateView(reads_cpu=seats, writes_cpu=seats),
        },
    )


def token_sources(step: StepInput, *, size: int | None = None) -> torch.Tensor:
    """For a row whose token the step before samples, the seat of its request, else `KNOWN`: [T] int64, or [size]."""
    items = step.columns()
    sources = np.where(items.pending, items.seat, KNOWN)  # [B]
    return _as_long(sources if _one_each(step) else sources.repeat(items.num_tokens), size, fill=KNOWN)


def has_pending(step: StepInput) -> bool:
    """Whether a row waits for the step before."""
    return bool(step.columns().pending.any())


def sampled_seats(step: StepInput, *, size: int | None = None, fill: int = 0) -> torch.Tensor:
    """The seat of each item that samples: [S] int64; or [size], `fill` past those."""
    return _as_long(step.columns().seat[step.sampling], size, fill=fill)


def _as_long(values: np.ndarray, size: int | None, *, fill: int) -> torch.Tensor:
    if size is None or size == len(values):
        return torch.from_numpy(values.astype(np.int64))
    padded = np.full(size, fill, np.int64)
    padded[: len(values)] = values
    return torch.from_numpy(padded)


def _one_each(step: StepInput) -> bool:
    """Whether each item has one token, as in plain decoding."""
    return step.num_tokens == step.num_items


def _refuse_unknown(step: StepInput, items: Items) -> None:
    asked = {
        "drafts": items.num_drafts.tobytes() != _NO_DRAFT * step.num_items,
        "adapters": items.adapter.tobytes() != _NO_ADAPTER * step.num_items,
        "tree parents": step.parents,
        "pages of states": step.states,
    }
    for name, there in asked.items():
        if there:
            raise Unsupported(f"step {step.number} has {name}, which this worker does not run")


def _input_ids(step: StepInput, items: Items) -> np.ndarray:
    """[T] int64; those that are not known yet are 0."""
    known, num_tokens = np.frombuffer(step.input_ids, INT), step.num_tokens
    if len(known) == num_tokens:
        return known.astype(np.int64)
    ids = np.zeros(num_tokens, np.int64)
    if len(known):
        ids[(items.pending == 0).repeat(items.num_tokens)] = known
    return ids
