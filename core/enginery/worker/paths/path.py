"""What every way to run a batch has in common, what it gives back, and the way that takes every step: kernel by kernel.

T tokens, N rows that need logits, S items that sample, C channels, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch

from enginery.attention.axes import pad
from enginery.contracts.batch import FULL, ForwardBatch, View
from enginery.contracts.drafting import FEATURES
from enginery.contracts.step import StepInput
from enginery.kv.upload import to_device
from enginery.worker.drafts.trees import standing_first, write_masks
from enginery.worker.layout import sampled_seats
from enginery.worker.paths.captured_step import CapturedStep
from enginery.worker.paths.results import StepParts


class Forwarded(NamedTuple):
    """What a forward left on the device, valid until the next one.

    planned_s: when the host had planned, by `time.perf_counter`. in_graphs: what was captured was replayed. Of a graph that
    computes logits: logits, [>= S, V], the items that sample first; greedy, [>= S] int64, the tokens of the largest, `NAN_TOKEN`
    where these are NaN, already kept for the next step. Of the others: rows, [N, C], hidden states of the rows that need logits;
    last, [S, C], those of them that are sampled from. Of a step that verifies drafts, and for a draft model: batch, as it was run.
    For a draft model: hidden, [>= T, C], of all of its rows. Of a graph that verifies: accepted, [>= S] int64, drafts that are the
    best tokens; what follows these is kept for the next step. captured: the graph that computes logits, which batch and hidden
    belong to, and padded: the step's batch as that was replayed for, with its fields on the host.
    """

    planned_s: float
    in_graphs: bool = False
    logits: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    last: torch.Tensor | None = None
    batch: ForwardBatch | None = None
    hidden: torch.Tensor | None = None
    accepted: torch.Tensor | None = None
    captured: CapturedStep | None = None
    padded: ForwardBatch | None = None

    def unpadded(self, num_requests: int) -> ForwardBatch:
        """The batch as it was run, with the pages that a draft model shares: of a graph that decodes, without what was added."""
        assert self.batch is not None, "a step that a draft model follows keeps its batch"
        if self.padded is None:
            return self.batch
        there, padded, rows = self.batch, self.padded, num_requests * self.batch.decode_len
        view, table = there.views[FULL], padded.views[FULL]
        assert isinstance(view, View), "full pages have slots"
        assert isinstance(table, View), "and a page table"
        return ForwardBatch(
            phase=padded.phase,
            input_ids=there.input_ids[:rows],
            positions=there.positions[:rows],
            q_lens_cpu=padded.q_lens_cpu[:num_requests],
            kv_lens_cpu=padded.kv_lens_cpu[:num_requests],
            num_logits_cpu=padded.num_logits_cpu[:num_requests],
            seats_cpu=padded.seats_cpu[:num_requests],
            views={FULL: View(slots=view.slots[:rows], page_table_cpu=table.page_table_cpu[:num_requests])},
            decode_len=there.decode_len,
        )


class Verified(NamedTuple):
    """What became of drafts. tokens, and marked with `NAN_TOKEN`: of all sampled rows, [R] int64, those that are told first.

    accepted: [S] int64, how many drafts of each item are right. path: [n, N] int64, where drafts branch, the rows that stand, see
    `accept`; None: none does. All are on the device.
    """

    tokens: torch.Tensor
    marked: torch.Tensor
    accepted: torch.Tensor
    path: torch.Tensor | None = None


class Launched(NamedTuple):
    """A forward that the device may still be running, valid until the next one. logits: [S, V], of the items that sample."""

    step: StepInput
    forwarded: Forwarded
    logits: torch.Tensor
    laid_out_s: float

    def seats(self) -> torch.Tensor:
        """Of the items that sample: [S] int64, on the device."""
        if self.forwarded.captured is None:
            return to_device(sampled_seats(self.step), self.logits.device)
        return first_rows(self.forwarded.captured.seats, len(self.step.sampling))

    def found_positions(self) -> torch.Tensor | None:
        """Of the tokens that are sampled of each row, where the device alone knows them: [S] int64."""
        batch = self.forwarded.batch
        return batch.positions[: len(self.logits)] + 1 if self.step.behind and batch is not None else None

    def verified(self, cuts: Mapping[int, int]) -> Verified | None:
        """As `Runner._verify`, where a graph has done it: best tokens are asked for, as many as there are."""
        accepted, best = self.forwarded.accepted, self.forwarded.greedy
        if accepted is None or best is None or cuts or not self.step.run.greedy:
            return None
        best, accepted = first_rows(best, len(self.logits)), first_rows(accepted, len(self.step.sampling))
        standing = None if self.forwarded.captured is None else self.forwarded.captured.standing
        if standing is None:
            return Verified(best, best, accepted)
        path = standing.path[: self.step.num_decode]
        best = best.index_select(0, standing_first(path, len(best)))
        return Verified(best, best, accepted, path)


class ForwardPath(Protocol):
    """A way to run a batch."""

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """Plan the batch that the step was laid out as, and launch it, without waiting for the device."""


class Paths(NamedTuple):
    """How a rank runs a step that is to run in each way, and one whose graph is not there; None: nothing is captured."""

    eager: ForwardPath
    graph: ForwardPath | None
    pieces: ForwardPath | None
    without_graph: ForwardPath


def first_rows(values: torch.Tensor, count: int) -> torch.Tensor:
    """Its first rows; itself where it has no others, as to cut takes torch 0.1 ms on a CPU, where its code is in no cache then."""
    return values if values.shape[0] == count else values[:count]


def hidden_states(
    step: StepInput, batch: ForwardBatch, hidden: torch.Tensor, *, rows: torch.Tensor | None, planned_s: float
) -> Forwarded:
    """The rows of `hidden` that need logits, and those that are sampled from.

    hidden: [T, C], or [N, C] from a model that computes its last layer for these rows only. rows: [N] int64, device; None for all.
    """
    wanted = hidden if rows is None or len(hidden) == len(rows) else hidden.index_select(0, rows)  # [N, C]
    places = batch.num_logits_cpu.long().cumsum(0)[torch.from_numpy(step.sampling)] - 1  # [S]
    if step.verifies:
        places = last_rows(places.numpy() + 1, step.sampled_rows)  # [R]
    last = wanted if len(places) == len(wanted) else wanted.index_select(0, to_device(places, wanted.device))  # [S, C]
    return Forwarded(planned_s=planned_s, rows=wanted, last=last, batch=batch if step.verifies else None)


def rows_with_logits(batch: ForwardBatch, device: torch.device) -> torch.Tensor | None:
    """The rows of a batch that need logits: the last `num_logits` of each request. [N] int64, device; None for all [T]."""
    counts = batch.num_logits_cpu.numpy()  # [B]
    if int(counts.sum()) == batch.num_tokens:
        return None
    return to_device(last_rows(batch.q_lens_cpu.numpy().cumsum(), counts), device)


def last_rows(ends: np.ndarray, counts: np.ndarray) -> torch.Tensor:
    """The last rows before each end, so many of each, [B]: [N] int64. `repeat_interleave` takes 0.7 ms for 25 on 16 cores."""
    return torch.from_numpy(np.arange(int(counts.sum())) + np.repeat(ends - counts.cumsum(), counts))


class EagerPath:
    """Implements `ForwardPath` for any step."""

    def __init__(self, parts: StepParts, *, keeps_all: bool, writes_late: bool) -> None:
        """keeps_all: a draft model takes the batch and the hidden states of all rows, of steps that it follows. writes_late: what
        the model writes for it may come from behind the last attention, so no row may be left out there."""
        self._parts, self._feed = parts, parts.feed
        self._keeps_all = keeps_all
        self._writes_all = any(each.name != FEATURES or writes_late for each in parts.feed.named.outputs)

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """Upload, plan, run. The model is told which rows need logits, unless it has outputs of all rows."""
        rows = rows_with_logits(batch, self._feed.device)
        # Outputs may be of rows that need no logits, behind the last attention too.
        keeps = self._keeps_all and step.draft_len > 0
        all_rows = keeps or self._writes_all
        model, relay, results = self._parts.model, self._parts.relay, self._parts.results
        there = relay.plan(self._feed.upload(step, batch, logits_rows=None if all_rows else rows))
        write_masks(step, there, relay)
        planned_s = time.perf_counter()
        hidden = results.hidden(model.forward(there), there)
        forwarded = hidden_states(step, there, hidden, rows=rows, planned_s=planned_s)
        return forwarded._replace(batch=there, hidden=hidden) if keeps else forwarded


class PaddedForward:
    """Eagerly, with as many rows as other ranks have of the step. It leaves hidden states: of all rows, or those that are named."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts

    def forward(self, step: StepInput, batch: ForwardBatch, logits_rows: torch.Tensor | None = None) -> Forwarded:
        """Pad, upload, plan, run. logits_rows: [N] int64, device; the model may leave the others out of its last layer."""
        parts, (num_requests, num_tokens) = self._parts, step.padded
        batch = pad(batch, num_requests=num_requests, num_tokens=num_tokens, geometry=parts.pool.geometry)
        there = parts.relay.plan(parts.feed.upload(step, batch, logits_rows=logits_rows))
        planned_s = time.perf_counter()
        return Forwarded(planned_s=planned_s, hidden=parts.results.hidden(parts.model.forward(there), there))
