"""Ways to run a step on several ranks.

Of a step that asks for nothing but the likeliest tokens they find these without bringing their logits together. Decoding steps are
recorded on ranks that are processes, and captured of lanes and early stages on GPUs: the forward alone, exchanges among the calls.

    recorded   embed(..) | norm(..) | linear(..) | attend(..) | exchange | ..  ──> hidden states [size, C]      then as in any step

To record exchanges nothing, so a rank records when it likes; all capture together. One that cannot record runs the step eagerly,
padded to the same size, and the others notice nothing. A lane without work runs a recording of padding. S items that sample, R
sampled rows.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from enginery.attention.axes import pad
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.step import StepInput
from enginery.kv.upload import to_device
from enginery.worker.layout import no_requests, sampled_seats
from enginery.worker.paths.decode_graphs import DecodeGraphs, HeadResults
from enginery.worker.paths.path import Forwarded, ForwardPath, first_rows
from enginery.worker.paths.recorded_steps import RecordedSteps
from enginery.worker.ranks.collectives import JoinedHead
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

    def __init__(self, graphs: DecodeGraphs, head: JoinedHead, *, is_forced: bool) -> None:
        self._graphs, self._head, self._is_forced = graphs, head, is_forced

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """As the graphs do; of a step that asks for the best tokens alone there are no logits, [R, 0]."""
        forwarded, count = self._graphs.forward(step, batch), int(step.sampled_rows.sum())
        assert forwarded.logits is not None, "graphs leave logits"
        columns, accepted = forwarded.logits[:count], None if self._is_forced else forwarded.accepted
        logits = columns[:, :0] if step.run.tokens_only else self._head.shared.gather(columns)
        return forwarded._replace(logits=logits, accepted=accepted)


class CapturedForwards(DecodeGraphs):
    """Of lanes, and of stages before the last: of a `CapturedStep` there are hidden states, [size, C], and no logits."""

    def _run_head(self, hidden: torch.Tensor) -> HeadResults:
        """It runs behind the graph: what is chosen from hidden states is of all ranks."""
        return HeadResults(None, hidden, self.best[: len(hidden)])


class RecordedForwards(CapturedForwards, RecordedSteps):
    """The same, recorded."""

    forward = DecodeGraphs.forward  # there are no logits to look for a NaN in


class RankSteps:
    """Implements `ForwardPath` for steps that are to be recorded, whether this rank can or not."""

    def __init__(self, recorded: CapturedForwards, head: JoinedHead) -> None:
        self._recorded, self._head = recorded, head

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """As `EagerPath`, and as `LanePath` where there are lanes."""
        lanes = self._head.lanes
        own = step if lanes is None else step.of_lane(lanes.lane)
        if not own.num_items:
            batch = no_requests(self._recorded.geometry)
        in_graphs = self._recorded.ready(step)
        if in_graphs:
            done = self._recorded.forward(own, batch)
            planned_s, hidden = done.planned_s, done.logits
            assert hidden is not None, "which are there in place of logits"
        else:
            recorded, size = self._recorded, step.run.size
            padded = pad(batch, num_requests=size, num_tokens=size, geometry=recorded.geometry)
            there = recorded.relay.plan(recorded.feed.upload(own, padded, logits_rows=None))
            planned_s = time.perf_counter()
            hidden = recorded.results.hidden(recorded.model.forward(there), there)
        if lanes is not None:
            own_rows = hidden.index_select(0, to_device(lanes.own(step), hidden.device))
            return lanes.sampled(step, own_rows, planned_s)._replace(in_graphs=in_graphs)
        rows = first_rows(hidden, step.num_items)
        last = rows if len(step.sampling) == len(rows) else rows.index_select(0, torch.from_numpy(step.sampling.astype(np.int64)))
        return Forwarded(planned_s=planned_s, in_graphs=in_graphs, rows=rows, last=last)
