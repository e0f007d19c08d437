"""Which decoding steps are recorded on a CPU, when they are first needed or in idle moments, and done again (`host_capture`).

There a row that pads takes as long as any other, an operator of torch's runs cold behind the weights, and a model may do what
cannot be recorded. Steps that verify are not recorded, nor those that a draft model follows.
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from enginery.contracts.batch import ForwardBatch
from enginery.contracts.step import StepInput
from enginery.plugin.loading import explain
from enginery.worker.paths.captured_step import CapturedStep, HeadResults, NumGuesses, takes_graphs
from enginery.worker.paths.decode_capture import DecodeCapture, DecodeKey
from enginery.worker.paths.path import Forwarded
from enginery.worker.paths.results import StepParts
from enginery.worker.sampling import NAN_TOKEN

_log: Final = logging.getLogger(__name__)


def recorded_sizes(max_requests: int) -> tuple[int, ...]:
    """Numbers of requests that a step is recorded for."""
    return tuple(size for size in (1, 2, 3, 4, 6, 8, 12, 16) if size <= max_requests)


class RecordedHead:
    """Implements `Head`: a recording's own results stay where they are. NaN is looked for behind a replay."""

    def __init__(self, parts: StepParts, most_rows: int) -> None:
        self._parts, self._ops = parts, parts.ops
        self._firsts = torch.arange(most_rows) * parts.results.vocab_size  # of each row, among all logits

    def __call__(self, hidden: torch.Tensor) -> HeadResults:
        logits = self._parts.logits(hidden)
        best = self._ops.greedy(logits)
        places = best if len(best) == 1 else best + self._firsts[: len(best)]
        # By the embedding's kernel: a gather's code is in no cache.
        return HeadResults(best, best, logits, self._ops.embed(logits.reshape(-1, 1), places)[:, 0])


class RecordedSteps:
    """Implements `ForwardPath` for decoding steps; to be asked as `DecodeGraphs` is.

    A size that could not be recorded is left out of `sizes`; all are when one more is refused for the same reason, which is the
    model's then, and steps run eagerly.
    """

    follows, verified_rows = False, 0

    def __init__(self, steps: DecodeCapture) -> None:
        self.steps, self.sizes = steps, recorded_sizes(steps.most_rows)
        self.captured: dict[DecodeKey, CapturedStep] = {}
        self._reasons: set[str] = set()  # why sizes were refused

    @classmethod
    def build(cls, steps: DecodeCapture) -> RecordedSteps | None:
        """Nothing is recorded yet: a start is no slower for it. None as for `DecodeGraphs`."""
        return cls(steps) if takes_graphs(steps.parts.relay, steps.most_rows, what="decoding") else None

    def waiting(self, num_guesses: NumGuesses | None = None) -> list[DecodeKey]:
        """Steps that are not recorded, the smallest first."""
        return [key for size in self.sizes if (key := DecodeKey(size, 1, followed=False)) not in self.captured]

    def provide(self, key: DecodeKey) -> bool:
        """Whether it is recorded, which is tried now if it was not yet."""
        if key not in self.captured and key.size in self.sizes:  # else refused, and asked for before that was known
            try:
                self.captured[key] = self.steps.capture(key)
            except Exception as error:  # of a model, a backend or an operation: what is wrong with it shows in eager steps
                why = explain(error)
                self.sizes = () if why in self._reasons else tuple(size for size in self.sizes if size != key.size)
                self._reasons.add(why)
                left = list(self.sizes) or "no sizes"
                _log.debug("a step of %d requests was not recorded, %s are left: %s", key.size, left, why)
        return key in self.captured

    def ready(self, step: StepInput) -> bool:
        """Whether a step of this size is recorded, or can be now. If not, it has to run as it is."""
        return self.provide(DecodeKey(step.run.size, 1, followed=False))

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """Replay that of the step's size. NaN is looked for in Python, as torch's comparison takes 0.2 ms when in no cache."""
        captured = self.captured[DecodeKey(step.run.size, 1, followed=False)]
        forwarded, largest, marked = self.steps.replay(captured, step, batch), captured.made.largest, captured.made.marked
        if largest is not None and marked is not None and any(value != value for value in largest.tolist()):
            marked.masked_fill_(largest.isnan(), NAN_TOKEN)
        return forwarded

    def note_too_large(self, step: StepInput) -> None:
        """Nothing: steps are recorded for all numbers of requests that gain by it."""
