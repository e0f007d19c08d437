"""Launching a batch kernel by kernel: what takes every step."""

from __future__ import annotations

import time

from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.drafting import FEATURES
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
        self,
        model: Model,
        relay: BackendRelay,
        feed: TokenFeed,
        *,
        results: ModelResults,
        keeps_all: bool = False,
        writes_late: bool = True,
    ) -> None:
        """keeps_all: a draft model takes the batch and the hidden states of all rows, of steps that it follows. writes_late: what
        the model writes for it may come from behind the last attention, so no row may be left out there."""
        self._model = model
        self._keeps_all = keeps_all
        self._writes_all = any(each.name != FEATURES or writes_late for each in feed.named.outputs)
        self._results = results
        self._relay = relay
        self._feed = feed

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """Upload, plan, run. The model is told which rows need logits, unless it has outputs of all rows."""
        rows = rows_with_logits(batch, self._feed.device)
        # Outputs may be of rows that need no logits, behind the last attention too.
        keeps = self._keeps_all and step.draft_len > 0
        all_rows = keeps or self._writes_all
        there = self._relay.plan(self._feed.upload(step, batch, logits_rows=None if all_rows else rows))
        write_masks(step, there, self._relay)
        planned_s = time.perf_counter()
        hidden = self._results.hidden(self._model.forward(there), there)
        forwarded = hidden_states(step, there, hidden, rows=rows, planned_s=planned_s)
        return forwarded._replace(batch=there, hidden=hidden) if keeps else forwarded
