"""Launching a batch kernel by kernel: what takes every step."""

from __future__ import annotations

import time

from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.model import Model
from enginery.contracts.step import StepInput
from enginery.worker.drafts.trees import write_masks
from enginery.worker.paths.path import Forwarded, hidden_states, rows_with_logits
from enginery.worker.paths.results import ModelResults
from enginery.worker.token_feed import TokenFeed


class EagerPath:
    """Implements `ForwardPath` for any step."""

    captured = False

    def __init__(
        self, model: Model, relay: BackendRelay, feed: TokenFeed, *, results: ModelResults, keeps_all: bool = False
    ) -> None:
        """keeps_all: a draft model takes the batch and the hidden states of all rows."""
        self._model = model
        self._keeps_all = keeps_all
        self._results = results
        self._relay = relay
        self._feed = feed

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """Upload, plan, run. The model is told which rows need logits, unless it has outputs of all rows."""
        rows = rows_with_logits(batch, self._feed.device)
        # Outputs may be of rows that need no logits, behind the last attention too.
        tapped = self._keeps_all or bool(self._feed.named.outputs)
        there = self._relay.plan(self._feed.upload(step, batch, logits_rows=None if tapped else rows))
        write_masks(step, there, self._relay)
        planned_s = time.perf_counter()
        hidden = self._results.hidden(self._model.forward(there), there)
        forwarded = hidden_states(step, there, hidden, rows=rows, planned_s=planned_s)
        return forwarded._replace(batch=there, hidden=hidden) if self._keeps_all else forwarded
