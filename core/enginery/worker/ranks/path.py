"""A step that asks for nothing but the likeliest tokens: several ranks find them without bringing their logits together.

S items that sample, R sampled rows.
"""

from __future__ import annotations

import torch

from enginery.contracts.batch import ForwardBatch
from enginery.contracts.step import StepInput
from enginery.worker.layout import sampled_seats
from enginery.worker.paths.path import Forwarded, ForwardPath
from enginery.worker.ranks.collectives import JoinedHead
from enginery.worker.token_feed import TokenFeed


class BestTokens:
    """Implements `ForwardPath` over another. All ranks have the tokens, and keep them for the next step.

    Not where drafts are verified: what becomes of these is told before the next step.
    """

    def __init__(self, path: ForwardPath, head: JoinedHead, feed: TokenFeed) -> None:
        self._path, self._head, self._feed = path, head, feed
        self.captured = path.captured

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """As the other path does; of such a step there are no logits, [R, 0]."""
        forwarded = self._path.forward(step, batch)
        self.captured = self._path.captured
        if not step.run.tokens_only or forwarded.last is None or not len(step.sampling):
            return forwarded
        best = self._head.best(forwarded.last)
        if not step.verifies:
            self._feed.keep(best.clamp(min=0), sampled_seats(step))
        return forwarded._replace(logits=torch.empty(len(best), 0), greedy=best)
