"""A step that asks for nothing but the likeliest tokens: several ranks find them without bringing their logits together.

S items that sample, R sampled rows.
"""

from __future__ import annotations

from enginery.contracts.batch import ForwardBatch
from enginery.contracts.step import StepInput
from enginery.kv.upload import to_device
from enginery.worker.layout import sampled_seats
from enginery.worker.paths.decode_graphs import DecodeGraphs
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
            self._feed.keep(best.clamp(min=0), to_device(sampled_seats(step), best.device))
        return forwarded._replace(logits=best.new_empty(len(best), 0), greedy=best)


class GatheredLogits:
    """Implements `ForwardPath` over graphs of decoding steps, which leave a rank's columns of logits, and the best of all ranks'.

    Where more is asked for, the columns are brought together behind the graph.
    """

    captured = True

    def __init__(self, graphs: DecodeGraphs, head: JoinedHead) -> None:
        self._graphs, self._head = graphs, head

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """As the graphs do; of a step that asks for the best tokens alone there are no logits, [R, 0]."""
        forwarded, count = self._graphs.forward(step, batch), int(step.sampled_rows.sum())
        assert forwarded.logits is not None, "graphs leave logits"
        columns = forwarded.logits[:count]
        return forwarded._replace(logits=columns[:, :0] if step.run.tokens_only else self._head.shared.gather(columns))
