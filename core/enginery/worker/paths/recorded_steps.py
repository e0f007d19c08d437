"""Decoding steps on a CPU, recorded when they are first needed or in idle moments and done again (`host_capture`).

As `DecodeGraphs`, but for what costs time on the host: there a row that pads takes as long as any other, an operator of torch's
runs cold behind the weights, and a model may do what cannot be recorded.
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from enginery.contracts.batch import ForwardBatch
from enginery.contracts.step import StepInput
from enginery.plugin.loading import explain
from enginery.worker.layout import has_pending
from enginery.worker.paths.captured_step import CapturedStep
from enginery.worker.paths.decode_graphs import DecodeGraphs, GraphKey, HeadResults
from enginery.worker.paths.path import Forwarded
from enginery.worker.sampling import NAN_TOKEN

_log: Final = logging.getLogger(__name__)


def recorded_sizes(max_requests: int) -> tuple[int, ...]:
    """Numbers of requests that a step is recorded for."""
    return tuple(size for size in (1, 2, 3, 4, 6, 8, 12, 16) if size <= max_requests)


class RecordedSteps(DecodeGraphs):
    """Steps that verify are not recorded, nor those that a draft model follows.

    A size that could not be is left out of `sizes`; all are when one more is refused for the same reason, which is the model's
    then, and steps run eagerly.
    """

    follows = False
    _reasons: set[str]  # why sizes were refused
    _firsts: torch.Tensor  # of each row, among all logits
    _largest: dict[int, torch.Tensor]  # by number of rows, the logits of their best tokens

    def capture_first(self) -> None:
        """Make what every recording reads, and record nothing: a start is no slower for it."""
        self.sizes, self._reasons = recorded_sizes(len(self.best)), set()
        self._firsts = torch.arange(len(self.best)) * self.results.vocab_size
        self._largest = {}

    def capture(self, key: GraphKey) -> None:
        """Record a step, or note that it cannot be."""
        if key.size not in self.sizes:  # refused, and asked for before that was known
            return
        try:
            super().capture(key)
        except Exception as error:  # of a model, a backend or an operation: what is wrong with it shows in eager steps
            why = explain(error)
            self.sizes = () if why in self._reasons else tuple(other for other in self.sizes if other != key.size)
            self._reasons.add(why)
            _log.debug("a step of %d requests was not recorded, %s are left: %s", key.size, list(self.sizes) or "no sizes", why)

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """As `DecodeGraphs`; a NaN is looked for in Python, as torch's comparison takes 0.2 ms when its code is in no cache."""
        forwarded = super().forward(step, batch)
        largest, best = self._largest[step.run.size], forwarded.greedy
        assert best is not None, "a recording has the best tokens"
        if any(value != value for value in largest.tolist()):
            best.masked_fill_(largest.isnan(), NAN_TOKEN)
        return forwarded

    def note_too_large(self, step: StepInput) -> None:
        """Nothing: steps are recorded for all numbers of requests that gain by it."""

    def _update(self, captured: CapturedStep, step: StepInput, batch: ForwardBatch) -> ForwardBatch:
        padded = super()._update(captured, step, batch)
        if has_pending(step):  # seldom: steps do not overlap here unless that is asked for
            self.feed.fill(captured.batch.input_ids, captured.packed[-2], out=captured.batch.input_ids)
        return padded

    def _fill(self, batch: ForwardBatch, sources: torch.Tensor) -> None:
        """Before a replay, where there is something to fill in."""

    def _run_head(self, hidden: torch.Tensor) -> HeadResults:
        """A recording's own stay where they are. What is NaN is looked for when it is done, among the largest logits."""
        logits = self.results.logits(self.model.logits(hidden), hidden)
        best = self.ops.greedy(logits)
        places = best if len(best) == 1 else best + self._firsts[: len(best)]
        # By the embedding's kernel: a gather's code is in no cache.
        self._largest[len(best)] = self.ops.embed(logits.reshape(-1, 1), places)[:, 0]
        return HeadResults(best, logits, best)
