"""A step on a rank of one of several lanes: its own lane's items, with rows as all lanes have, and what is sampled of all of them.

    lane 0   items | padding  ── forward ──> rows that need logits | padding ─┐
    lane 1   padding          ── forward ──> padding                          ├──> rows of all, on every rank: head, sampling
    lane 2   items            ── forward ──> rows that need logits            ┘

A batch is padded, then planned, so that the exchanges within the forward have the same shape on every rank.
N rows that need logits, of the lane that has most; C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from enginery.contracts.batch import ForwardBatch
from enginery.contracts.step import StepInput
from enginery.kv.upload import to_device
from enginery.worker.layout import begins_of, grown, places_within
from enginery.worker.paths.path import Forwarded, PaddedForward
from enginery.worker.paths.results import StepParts

if TYPE_CHECKING:  # an engine of one rank has no groups, and may have a torch without them
    from enginery.worker.ranks.nccl import TensorGroup


@dataclass(frozen=True, eq=False)
class LaneRows:
    """Rows of this lane and of the others. across: of each lane the rank in this one's place."""

    across: TensorGroup

    @property
    def lane(self) -> int:
        return self.across.rank

    def own(self, step: StepInput) -> torch.Tensor:
        """The rows of this lane that need logits, and any beside them: [N] int64."""
        items = step.lanes[self.lane].columns()
        ends, counts = np.cumsum(items.num_tokens), items.num_logits
        rows = (ends - counts).repeat(counts) + places_within(counts)
        return torch.from_numpy(grown(rows.astype(np.int64), _most_logits(step), fill=0))

    def sampled(self, step: StepInput, own: torch.Tensor, planned_s: float) -> Forwarded:
        """[N, C] of each lane, brought together: what is sampled from of all."""
        rows = to_device(torch.from_numpy(rows_of_all(step)), own.device)
        of_all = last = torch.cat(self.across.of_all(own)).index_select(0, rows)
        if len(step.sampling) < len(of_all):
            ends = np.cumsum(step.columns().num_logits)[step.sampling]
            last = of_all.index_select(0, to_device(torch.from_numpy(ends - 1), of_all.device))
        return Forwarded(planned_s=planned_s, rows=of_all, last=last)


def rows_of_all(step: StepInput) -> np.ndarray:
    """Where the rows that need logits are, of the step's items in order, among N of each lane: int64."""
    begins = np.empty(step.num_items, np.int64)
    for lane, (own, places) in enumerate(zip(step.lanes, step.lane_places, strict=True)):
        begins[places] = lane * _most_logits(step) + begins_of(own.columns().num_logits)
    counts = step.columns().num_logits
    found: np.ndarray = begins.repeat(counts) + places_within(counts)
    return found


def _most_logits(step: StepInput) -> int:
    """N: 1 at least, as nothing is exchanged in no rows."""
    return max(1, *(int(own.columns().num_logits.sum()) for own in step.lanes))


class LanePath:
    """Implements `ForwardPath` for steps of several lanes. It is given the batch of its own, and gives rows of all."""

    def __init__(self, parts: StepParts, lanes: LaneRows) -> None:
        self._padded, self._feed, self._lanes = PaddedForward(parts), parts.feed, lanes

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        rows = to_device(self._lanes.own(step), self._feed.device)
        # Outputs may be of rows that need no logits; where no lane has such rows, the model is told of none.
        all_of_them = bool(self._feed.named.outputs) or len(rows) == step.padded[1]
        done = self._padded.forward(step.lanes[self._lanes.lane], batch, None if all_of_them else rows)
        assert done.hidden is not None, "a forward alone leaves them"
        has_them = not all_of_them and len(done.hidden) == len(rows)
        wanted = done.hidden if has_them else done.hidden.index_select(0, rows)  # [N, C]
        return self._lanes.sampled(step, wanted, done.planned_s)
