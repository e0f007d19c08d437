"""From a step as a value to the tensors of one forward: built on the host, padded there, uploaded in one piece."""

from __future__ import annotations

import numpy as np
import torch

from enginery.contracts.batch import FULL, STATE, ForwardBatch, StateView, View
from enginery.contracts.step import INT, Items, StepInput
from enginery.errors import Unsupported
from enginery.worker.page_tables import PageTables

KNOWN = -1  # in `token_sources`: the input token is on the host


def lay_out(step: StepInput, tables: PageTables) -> ForwardBatch:
    """Lay the step's items out one after the other, decoding ones first, as scheduled; all in host memory, with T rows.

    tables: have taken the step. A token that the host does not know yet is 0. Raises `Unsupported` for what no worker runs yet.
    """
    items, page_size = step.columns(), tables.page_size
    _refuse_unknown(step, items)
    q_lens = items.num_tokens
    kv_lens = items.start + q_lens
    page_table = tables.of(items.seat, -(-int(kv_lens.max()) // page_size))
    row_of = np.repeat(np.arange(len(q_lens)), q_lens)  # [T]
    if len(row_of) == len(q_lens):
        positions = items.start.astype(np.int64)
    else:
        first_of = np.cumsum(q_lens) - q_lens
        positions = np.arange(len(row_of)) + (items.start - first_of)[row_of]
    slots = page_table[row_of, positions // page_size].astype(np.int64) * page_size + positions % page_size
    if (items.first_write > items.start).any():
        shared = positions < items.first_write[row_of]
        slots[shared] = tables.scratch_page * page_size + positions[shared] % page_size
    seats = torch.from_numpy(items.seat.copy())
    return ForwardBatch(
        phase=step.phase,
        input_ids=torch.from_numpy(_input_ids(step, items, len(row_of))),
        positions=torch.from_numpy(positions),
        q_lens_cpu=torch.from_numpy(q_lens.copy()),
        kv_lens_cpu=torch.from_numpy(kv_lens),
        num_logits_cpu=torch.from_numpy(items.num_logits.copy()),
        seats_cpu=seats,
        views={
            FULL: View(slots=torch.from_numpy(slots), page_table_cpu=torch.from_numpy(page_table)),
            STATE: StateView(reads_cpu=seats, writes_cpu=seats),
        },
    )


def token_sources(step: StepInput) -> torch.Tensor:
    """For a row whose token the step before samples, the seat of its request, else `KNOWN`: [T] int64."""
    items = step.columns()
    return torch.from_numpy(np.where(items.pending > 0, items.seat, KNOWN).repeat(items.num_tokens).astype(np.int64))


def has_pending(step: StepInput) -> bool:
    """Whether a row waits for the step before."""
    return bool(step.columns().pending.any())


def sampling_items(step: StepInput) -> np.ndarray:
    """The items whose last row yields a token: [S] int64."""
    return np.flatnonzero(step.columns().samples)


def sampled_seats(step: StepInput) -> torch.Tensor:
    """The seat of each item that samples: [S] int64."""
    items = step.columns()
    return torch.from_numpy(items.seat[items.samples > 0].astype(np.int64))


def _refuse_unknown(step: StepInput, items: Items) -> None:
    asked = {
        "drafts": items.num_drafts.any(),
        "adapters": (items.adapter >= 0).any(),
        "tree parents": step.parents,
        "pages of states": step.states,
    }
    for name, there in asked.items():
        if there:
            raise Unsupported(f"step {step.number} has {name}, which this worker does not run")


def _input_ids(step: StepInput, items: Items, num_tokens: int) -> np.ndarray:
    """[T] int64; those that are not known yet are 0."""
    known = np.frombuffer(step.input_ids, INT)
    if len(known) == num_tokens:
        return known.astype(np.int64)
    ids = np.zeros(num_tokens, np.int64)
    ids[(items.pending == 0).repeat(items.num_tokens)] = known
    return ids
