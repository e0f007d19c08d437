"""Ways to run a step on several ranks.

Of a step that asks for nothing but the likeliest tokens they find these without bringing their logits together. Decoding steps are
recorded on ranks that are processes, and captured of lanes and early stages on GPUs: the forward alone, exchanges among the calls.

    recorded   embed(..) | norm(..) | linear(..) | attend(..) | exchange | ..  ──> hidden states [size, C]      then as in any step

To record exchanges nothing, so a rank records when it likes; all capture together. One that cannot record runs the step eagerly,
padded to the same size, and the others notice nothing. A lane without work runs a recording of padding. S items that sample, R
sampled rows.
"""

from __future__ import annotations

import numpy as np
import torch

from enginery.contracts.batch import ForwardBatch
from enginery.contracts.step import StepInput
from enginery.kv.upload import to_device
from enginery.worker.layout import no_requests, sampled_seats
from enginery.worker.paths.captured_step import HeadResults
from enginery.worker.paths.path import Forwarded, ForwardPath, PaddedForward, Paths, first_rows
from enginery.worker.paths.results import StepParts
from enginery.worker.ranks.collectives import JoinedHead
from enginery.worker.ranks.lanes import LanePath
from enginery.worker.token_feed import TokenFeed


class BestTokens:
    """Implements `ForwardPath` over another. All ranks have the tokens, and keep them for the next step.

    Not where drafts are verified: what becomes of these is told before the next step.
    """

    def __init__(self, path: ForwardPath, head: JoinedHead, feed: TokenFeed) -> None:
        self._path, self._head, self._feed = path, head, feed

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """As the other path does; of such a step there are no logits, [R, 0]."""
        forwarded = self._path.forward(step, batch)
        if not step.run.tokens_only or forwarded.last is None or not len(step.sampling):
            return forwarded
        best = self._head.best(forwarded.last)
        if not step.verifies:
            self._feed.keep(best.clamp(min=0), to_device(sampled_seats(step), best.device))
        return forwarded._replace(logits=best.new_empty(len(best), 0), greedy=best)


class GatheredLogits:
    """Implements `ForwardPath` over graphs of decoding steps, which leave a rank's columns of logits, and the best of all ranks'.

    Where more is asked for, the columns are brought together behind the graph. is_forced: drafts are accepted there too, not in it.
    """

    def __init__(self, graphs: ForwardPath, head: JoinedHead, *, is_forced: bool) -> None:
        self._graphs, self._head, self._is_forced = graphs, head, is_forced

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """As the graphs do; of a step that asks for the best tokens alone there are no logits, [R, 0]."""
        forwarded, count = self._graphs.forward(step, batch), int(step.sampled_rows.sum())
        assert forwarded.logits is not None, "graphs leave logits"
        columns, accepted = forwarded.logits[:count], None if self._is_forced else forwarded.accepted
        logits = columns[:, :0] if step.run.tokens_only else self._head.shared.gather(columns)
        return forwarded._replace(logits=logits, accepted=accepted)


class ColumnsHead:
    """Implements `Head` on GPUs: a rank's columns of logits, [most rows, V / N], and the best tokens of all ranks'."""

    def __init__(self, parts: StepParts, head: JoinedHead, most_rows: int) -> None:
        self._head, device = head, parts.feed.device
        self._columns = torch.empty(most_rows, head.width, dtype=parts.results.dtype, device=device)
        self._best = torch.zeros(most_rows, dtype=torch.int64, device=device)

    def __call__(self, hidden: torch.Tensor) -> HeadResults:
        columns = self._columns[: len(hidden)].copy_(self._head.columns(hidden))
        marked = self._best[: len(columns)].copy_(self._head.shared.best(columns))
        return HeadResults(marked.clamp(min=0), marked, columns)


class SampledRows:
    """Implements `ForwardPath` over one that leaves the hidden states of a rank's rows: those that are sampled, of all lanes."""

    def __init__(self, path: ForwardPath, parts: StepParts, head: JoinedHead) -> None:
        self._path, self._lanes, self._nobody = path, head.lanes, no_requests(parts.pool.geometry)

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """As `EagerPath`, and as `LanePath` where there are lanes."""
        lanes = self._lanes
        own = step if lanes is None else step.of_lane(lanes.lane)
        done = self._path.forward(own, batch if own.num_items else self._nobody)
        planned_s, in_graphs, hidden = done.planned_s, done.in_graphs, done.hidden
        assert hidden is not None, "a forward alone leaves them"
        if lanes is not None:
            own_rows = hidden.index_select(0, to_device(lanes.own(step), hidden.device))
            return lanes.sampled(step, own_rows, planned_s)._replace(in_graphs=in_graphs)
        rows = first_rows(hidden, step.num_items)
        last = rows if len(step.sampling) == len(rows) else rows.index_select(0, torch.from_numpy(step.sampling.astype(np.int64)))
        return Forwarded(planned_s=planned_s, in_graphs=in_graphs, rows=rows, last=last)


def with_ranks(paths: Paths, parts: StepParts, *, has_head: bool) -> Paths:
    """These ways with what several ranks do behind them. has_head: decoding steps are captured with it, not the forward alone."""
    if (head := parts.joined) is None:
        return paths

    def best(path: ForwardPath) -> ForwardPath:
        return BestTokens(path, head, parts.feed)

    eager = without = best(paths.eager if head.lanes is None else LanePath(parts, head.lanes))
    pieces, graph = None if paths.pieces is None else best(paths.pieces), paths.graph
    if graph is not None and has_head:
        graph = GatheredLogits(graph, head, is_forced=parts.forced is not None)
    elif graph is not None:
        graph, without = (best(SampledRows(path, parts, head)) for path in (graph, PaddedForward(parts)))
    return Paths(eager, graph, pieces, without)
