"""Decoding steps recorded on ranks that are processes: the model's forward alone, with its exchanges among the calls that are told.

    recorded   embed(..) | norm(..) | linear(..) | attend(..) | exchange | ..  ──> hidden states [size, C]      then as in any step

To record exchanges nothing, so a rank records when it likes. One that cannot runs the step eagerly, padded to the same size, and
the others notice nothing. A lane without work runs a recording of padding.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from enginery.attention.axes import pad
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.step import StepInput
from enginery.worker.layout import no_requests
from enginery.worker.paths.captured_step import CapturedStep
from enginery.worker.paths.decode_graphs import GraphKey, padding_alone
from enginery.worker.paths.path import Forwarded, first_rows
from enginery.worker.paths.recorded_steps import RecordedSteps
from enginery.worker.ranks.collectives import JoinedHead


class RecordedForwards(RecordedSteps):
    """Of a `CapturedStep` here there are hidden states and no logits: what is chosen from these is of all ranks."""

    @torch.inference_mode()
    def record(self, key: GraphKey) -> None:
        batch, packed = padding_alone(self.feed, self.geometry, key)
        batch = self.relay.plan(self.feed.named.placed(batch), capture=True)
        found: list[torch.Tensor] = []

        def run() -> None:
            self.relay.ask("device_prologue", plan=batch.plan)
            found.append(self.results.hidden(self.model.forward(batch), batch))

        self._captured[key] = CapturedStep(
            packed=packed,
            seats=packed[-1],
            batch=batch,
            graph=self._capture(run),
            logits=found[-1],
            best=packed[-1],
            followed=False,
            hidden=found[-1],
            accepted=None,
            standing=None,
            moving=None,
        )

    def hidden(self, step: StepInput, batch: ForwardBatch) -> tuple[torch.Tensor, float]:
        """Of a step of one lane, [size, C], valid until the next, and when it was planned. There is a recording."""
        captured = self._captured[GraphKey.of(step, serves_drafts=False)]
        self._update(captured, step, batch)
        planned_s = time.perf_counter()
        captured.graph.replay()
        return captured.logits, planned_s


class RankSteps:
    """Implements `ForwardPath` for steps that are to be recorded. captured: whether the last one was."""

    def __init__(self, recorded: RecordedForwards, head: JoinedHead) -> None:
        self._recorded, self._head = recorded, head
        self.captured = False

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """As `EagerPath`, and as `LanePath` where there are lanes."""
        lanes, size = self._head.lanes, step.run.size
        own = step if lanes is None else step.of_lane(lanes.lane)
        if not own.num_items:
            batch = no_requests(self._recorded.geometry)
        self.captured = self._recorded.ready(step)
        if self.captured:
            hidden, planned_s = self._recorded.hidden(own, batch)
        else:
            hidden, planned_s = self._eagerly(own, batch, size)
        if lanes is not None:
            return lanes.sampled(step, hidden.index_select(0, lanes.own(step)), planned_s)
        rows = first_rows(hidden, step.num_items)
        last = rows if len(step.sampling) == len(rows) else rows.index_select(0, torch.from_numpy(step.sampling.astype(np.int64)))
        return Forwarded(planned_s=planned_s, rows=rows, last=last)

    def _eagerly(self, step: StepInput, batch: ForwardBatch, size: int) -> tuple[torch.Tensor, float]:
        recorded = self._recorded
        padded = pad(batch, num_requests=size, num_tokens=size, geometry=recorded.geometry)
        there = recorded.relay.plan(recorded.feed.upload(step, padded, logits_rows=None))
        planned_s = time.perf_counter()
        return recorded.results.hidden(recorded.model.forward(there), there), planned_s
