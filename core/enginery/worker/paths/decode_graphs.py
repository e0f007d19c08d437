"""Which decoding steps are CUDA graphs: one per batch size, captured when first needed or in idle moments.

Of steps that verify drafts, one per batch size and number of rows of a request. Steps that a draft model follows have graphs of
their own: while nothing is guessed, the graphs are those of plain decoding. Prefills, mixed steps and larger batches run eagerly,
or as piecewise graphs.
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from enginery.contracts.batch import ForwardBatch
from enginery.contracts.drafting import FEATURES
from enginery.contracts.step import StepInput
from enginery.errors import Unsupported
from enginery.speculate.combs import num_verified
from enginery.worker.drafts.trees import deepest
from enginery.worker.paths.captured_step import CapturedStep, HeadResults, NumGuesses, takes_graphs
from enginery.worker.paths.decode_capture import DecodeCapture, DecodeKey
from enginery.worker.paths.path import Forwarded
from enginery.worker.paths.results import StepParts
from enginery.worker.sampling import mark_nan

_log: Final = logging.getLogger(__name__)


def graph_sizes(max_requests: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 up to 64, 16 up to 256, 32 beyond: padding costs an eighth at most where batches are large."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_requests, 32)]
    return (*(size for size in sizes if size < max_requests), max_requests)


class LogitsHead:
    """Implements `Head`: all logits, [most rows, V], in one buffer of all sizes, and the best tokens."""

    def __init__(self, parts: StepParts, most_rows: int) -> None:
        self._parts, results, device = parts, parts.results, parts.feed.device
        self.logits = torch.empty(most_rows, results.vocab_size, dtype=results.dtype, device=device)
        self._best = torch.zeros(most_rows, dtype=torch.int64, device=device)

    def __call__(self, hidden: torch.Tensor) -> HeadResults:
        logits = self.logits[: len(hidden)].copy_(self._parts.logits(hidden))
        best = self._parts.ops.greedy(logits)
        return HeadResults(best, self._best[: len(best)].copy_(mark_nan(logits, best)), logits)


class DecodeGraphs:
    """Implements `ForwardPath` for decoding steps whose hidden states nobody asks for, and for those that verify drafts.

    A step of these is captured for a number of requests and of rows of each. verified_rows: the most of one; 0: none is captured.
    follows: whether a draft model finds what it takes behind these steps.
    """

    follows = True

    def __init__(self, steps: DecodeCapture) -> None:
        """Captures the largest, as the others fit into its memory, and one that verifies, if anything guesses."""
        self.steps, self.sizes = steps, graph_sizes(steps.most_rows)
        self.captured: dict[DecodeKey, CapturedStep] = {}
        self._refused: set[DecodeKey] = set()
        self._serves_drafts = steps.parts.feed.named.buffers.get(FEATURES, steps.speculation.hidden) is not None
        self._noted = False
        self.provide(DecodeKey(self.sizes[-1], 1, followed=False))
        self.verified_rows = self.sizes[-1]
        most_guesses = (min(steps.parts.feed.width, self.verified_rows) - 1) // (1 + steps.speculation.siblings)  # of one request
        verifying = [key for key in self.waiting(lambda _: most_guesses) if key.length > 1]
        if not verifying or not self.provide(verifying[-1]):
            self.verified_rows = 0

    @classmethod
    def build(cls, steps: DecodeCapture) -> DecodeGraphs | None:
        """None, with the reason in the log, where a backend has no `init_graph_state`."""
        return cls(steps) if takes_graphs(steps.parts.relay, steps.most_rows, what="decoding") else None

    def waiting(self, num_guesses: NumGuesses | None = None) -> list[DecodeKey]:
        """Steps without a graph that loads begin with: plain, before guesses, and with so many of each request; smallest first."""
        siblings, follows, keys = self.steps.speculation.siblings, self._serves_drafts, list[DecodeKey]()
        for size in self.sizes:
            for count in () if num_guesses is None else (num_guesses(size), num_guesses(size + 2)):  # two more may have made them
                length = 1 + num_verified(count, siblings)
                if count and size * length <= self.verified_rows:
                    keys += [DecodeKey(size, length, follows, count if siblings else 0), DecodeKey(size, 1, follows)]
            keys.append(DecodeKey(size, 1, followed=False))
        return [key for key in keys if key not in self.captured and key not in self._refused]

    def provide(self, key: DecodeKey) -> bool:
        """Whether there is a graph, which is captured now if it was not yet. If drafts cannot be verified in one, never."""
        if key not in self.captured and key not in self._refused:
            try:
                self.captured[key] = self.steps.capture(key)
            except Unsupported as error:
                if key.length == 1:
                    raise
                _log.info("drafts of %d requests are verified eagerly: %s", key.size, error)
                self._refused.add(key)
        return key in self.captured

    def ready(self, step: StepInput) -> bool:
        """Whether there is a graph of the step's size, see `provide`. If not, as without memory for it, it has to run eagerly."""
        key = self._key_of(step)
        try:
            return self.provide(key)
        except torch.OutOfMemoryError as error:
            if self.steps.num_ranks > 1:  # others have captured it
                raise
            _log.warning("steps of %d requests of %d rows run eagerly from now on: %s", key.size, key.length, error)
            self._refused.add(key)
            return False

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """Replay the graph of the step's size, which is `ready`."""
        return self.steps.replay(self.captured[self._key_of(step)], step, batch)

    def _key_of(self, step: StepInput) -> DecodeKey:
        """Verifications are followed as a rule; what they keep where they are not is less than another graph would take."""
        followed = self._serves_drafts and (step.verifies or step.draft_len > 0)
        return DecodeKey(step.run.size, step.decode_len, followed, deepest(step))

    def note_too_large(self, step: StepInput) -> None:
        """Say once that a step of so many requests, in a lane, is decoded eagerly."""
        if self.sizes and not self._noted:
            num_requests = max(own.num_items for own in step.lanes or (step,))
            _log.warning("%d requests are decoded eagerly: graphs are for up to %d", num_requests, self.sizes[-1])
            self._noted = True
