"""Steps on ranks that do not sample. Pipeline stages that are processes: what crosses from one to the next.

    stage 0   | step 3 | step 4 |  ..           each tensor rank sends to the same one of the next stage:
    stage 1   | step 2 | step 3 | step 4 |      partial sums cross as they are, so no addition moves

Each stage captures decoding steps for itself; one that cannot runs them eagerly, as many rows. What crosses is in no graph:

    receive ──> copy ──> [ arrived | graph | passed ] ──> copy ──> send      the next replay is behind these copies, on one stream

With lanes those of a feed-forward have the rows of all, and a rank sends its own to the same lane: one host tells the other how
many before.
T tokens of a step, of this lane and with those that pad it.

On other ranks of the last stage a step is the same forward, and the same exchanges in the same order, as on the one that samples:
what they take part in follows from the step alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from enginery.contracts.batch import ForwardBatch
from enginery.contracts.model import Model
from enginery.contracts.parallel import Channel, ParallelFacts, StageTensors
from enginery.contracts.step import StepInput, Way
from enginery.errors import PluginError
from enginery.kv.pool import TORCH_DTYPES
from enginery.kv.upload import to_device
from enginery.worker.layout import begins_of, lay_out, logits_of_items, no_requests, sampled_seats
from enginery.worker.page_tables import PageTables
from enginery.worker.paths.captured_step import Capture, Replayable
from enginery.worker.paths.path import ForwardPath, Launched, PaddedForward
from enginery.worker.paths.piecewise_capture import lent
from enginery.worker.paths.results import StepParts
from enginery.worker.ranks.gloo import Group, Sending
from enginery.worker.ranks.nccl import TensorGroup
from enginery.worker.runner import Runner
from enginery.worker.sampling import row_blocks


def neighbours(parallel: ParallelFacts) -> tuple[int, int]:
    """The ranks in this one's place in the stages before and behind."""
    of_stage = parallel.num_lanes * parallel.tensor_size
    return parallel.rank + of_stage, parallel.rank - of_stage


class StageGraph(NamedTuple):
    """A captured forward of one stage. Implements `Replayable`. passed: valid from a replay of `graph` to the next of any."""

    graph: Replayable
    stage: LinkedStage
    num_tokens: int
    arrived: StageTensors
    passed: StageTensors

    def replay(self) -> None:
        """With what arrives. What it gives is on its way to the next stage when other graphs overwrite it: that has a copy."""
        for name, values in self.stage.arrive(self.num_tokens).items():
            self.arrived[name].copy_(values)
        self.graph.replay()
        self.stage.pass_on({name: values.clone() for name, values in self.passed.items()}, self.num_tokens)


class LinkedStage:
    """Implements `Model` over that of one of several stages: it goes on from what arrives, and what it gives goes to the next."""

    def __init__(
        self, model: Model, group: TensorGroup, mesh: ParallelFacts, boundary: Sequence[Channel], dtype: torch.dtype, *, host: Group
    ) -> None:
        """boundary: what crosses. group, host: all ranks, for that alone, and its numbers of rows. dtype: of what states none."""
        self._forward, self.logits = model.forward, model.logits
        self._group, self._dtype, self._host = group, dtype, host
        self._boundary, self._num_lanes = boundary, mesh.num_lanes
        self._is_first, self._is_last = mesh.stage == 0, mesh.is_last_stage
        self._before, self._behind = neighbours(mesh)
        self._sent: deque[list[Sending]] = deque()
        self._lanes_of = [] if self._is_first else [1] * len(boundary)  # whose rows arrive
        self._room: StageTensors = {}
        self._captured: tuple[int, torch.Tensor | StageTensors] | None = None  # tokens, and what is passed on; nothing crosses then

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor:
        """Waits for the stage before, and not for the next. Returns [T, 0] before the last stage. Raises as `pass_on`."""
        num_tokens, crosses = batch.num_tokens, self._captured is None
        passed = self._forward(batch, (self.arrive(num_tokens) if crosses else self._places(num_tokens)) or None)
        if crosses:
            self.pass_on(passed, num_tokens)
        else:
            self._captured = num_tokens, passed
        return (
            passed if isinstance(passed, torch.Tensor) else torch.empty(num_tokens, 0, dtype=self._dtype, device=self._group.device)
        )

    def outside(self, capture: Capture) -> Capture:
        """One that captures what is computed here; what crosses is received before each replay, and sent behind it."""

        def captured(run: Callable[[], None]) -> StageGraph:
            self._captured = 0, {}
            try:
                graph = capture(run)
                num_tokens, passed = self._captured
            finally:
                self._captured = None
            places = self._places(num_tokens)
            for each in places.values():
                each.zero_()  # models add to what arrives
            passed = {} if isinstance(passed, torch.Tensor) else {name: lent(each) for name, each in passed.items()}
            return StageGraph(graph, self, num_tokens, places, passed)

        return captured

    def _places(self, num_tokens: int) -> StageTensors:
        """Where graphs find what arrives, of as many tokens as at the first call or fewer; zeros at first."""
        if not self._room:
            each = zip(self._boundary, self._lanes_of, strict=False)
            zeros = partial(torch.zeros, device=self._group.device)
            self._room = {at.name: zeros(n * num_tokens, at.width, dtype=self._dtype_of(at)) for at, n in each}
        return {name: each[: lanes * num_tokens] for (name, each), lanes in zip(self._room.items(), self._lanes_of, strict=True)}

    def arrive(self, num_tokens: int) -> StageTensors:
        """What the stage before has computed of the next step, of so many tokens; nothing where there is none."""
        if self._is_first:
            return {}
        rows = [num_tokens] * len(self._boundary)
        if self._num_lanes > 1:
            rows = self._host.receive((len(rows),), torch.int64, self._before).tolist()
            self._lanes_of = [count // num_tokens for count in rows]
        return {
            channel.name: self._group.receive((count, channel.width), self._dtype_of(channel), self._before)
            for channel, count in zip(self._boundary, rows, strict=True)
        }

    def pass_on(self, passed: torch.Tensor | StageTensors, num_tokens: int) -> None:
        """Send it to the stage behind, if there is one, without waiting. Raises `PluginError` for what the family has not said."""
        if self._is_last:
            return
        if isinstance(passed, torch.Tensor):
            raise PluginError("a stage before the last returned hidden states, not what crosses to the next")
        found = [self._checked(passed.get(channel.name), channel, num_tokens) for channel in self._boundary]
        sending: list[Sending] = []
        if self._num_lanes > 1:
            sending.append(self._host.send(torch.tensor([len(each) for each in found]), self._behind))
        sending += [self._group.send(each, self._behind) for each in found]
        while self._sent and all(work.is_completed() for _, work in self._sent[0]):
            self._sent.popleft()
        self._sent.append(sending)

    def _checked(self, found: torch.Tensor | None, channel: Channel, num_tokens: int) -> torch.Tensor:
        shapes = [(rows, channel.width) for rows in {num_tokens, self._num_lanes * num_tokens}]
        if found is not None and found.shape in shapes and found.dtype is self._dtype_of(channel):
            return found
        told = "nothing" if found is None else f"{list(found.shape)} {found.dtype}"
        raise PluginError(
            f"a stage returned {told} for {channel.name!r} where ModelFacts.boundary says [{num_tokens}, {channel.width}] "
            f"{self._dtype_of(channel)}"
        )

    def _dtype_of(self, channel: Channel) -> torch.dtype:
        return self._dtype if channel.dtype is None else TORCH_DTYPES[channel.dtype]


class EarlyStage:
    """Runs the steps of another rank on a stage before the last, where nothing is sampled."""

    def __init__(self, parts: StepParts, graphs: ForwardPath | None, *, lane: int) -> None:
        """parts: with a `LinkedStage`. graphs: of all sizes; None: it runs eagerly what others may have captured."""
        self._eager, self._graphs, self._geometry = PaddedForward(parts), graphs, parts.pool.geometry
        self._tables, self._lane = PageTables(self._geometry), lane

    @torch.inference_mode()
    def run(self, step: StepInput) -> None:
        """The next one; it returns when this stage's part is on its way to the next."""
        own = step.of_lane(self._lane)
        self._tables.take(own)
        batch = lay_out(own, self._tables)
        if step.run.way is Way.GRAPH and self._graphs is not None:
            self._graphs.forward(own, batch if own.num_items else no_requests(self._geometry))
        else:
            self._eager.forward(own, batch)


class Follower:
    """Runs the steps of another rank. group: the ranks of the stage. tells_tokens: tokens are needed before the host knows them."""

    def __init__(self, runner: Runner, group: TensorGroup, *, tells_tokens: bool) -> None:
        self._runner, self._group, self._tells_tokens = runner, group, tells_tokens

    @torch.inference_mode()
    def run(self, step: StepInput) -> None:
        """The next one; it returns when this rank's part of it is done, on a device when it is launched."""
        launched = self._runner.launch(step)
        self._join_prompts(launched)
        agreement = self._runner.agreement
        assert agreement is not None, "where ranks follow, the head is joined"
        tokens, accepted = agreement.outcome(step) or (None, None)
        if step.verifies and accepted is not None:
            self._runner.keep_accepted(launched, accepted[: step.num_decode])  # moves states no further than the right drafts
        self._runner.draft(launched, None, tokens, accepted)
        if self._tells_tokens and (tokens := share_tokens(self._group, step, None)) is not None:
            self._runner.feed.keep(tokens, to_device(sampled_seats(step), self._runner.device))

    def _join_prompts(self, launched: Launched) -> None:
        """The logits of prompts whose log-probabilities are asked for: items with more rows of logits than are sampled from."""
        step, rows = launched.step, launched.forwarded.rows
        items, counts = step.columns(), logits_of_items(step)
        firsts = begins_of(counts)
        for index in np.flatnonzero(items.num_logits > items.samples + items.num_drafts).tolist():
            assert rows is not None, "a step with rows that nobody samples from is no decoding step"
            for begin, count in row_blocks(int(items.num_logits[index] - items.samples[index])):
                first = int(firsts[index]) + begin
                self._runner.parts.logits(rows[first : first + count])


def share_tokens(group: TensorGroup, step: StepInput, tokens: torch.Tensor | None) -> torch.Tensor | None:
    """What the first rank has sampled, [S] int64, on all ranks; None: they know it, or nobody waits for it.

    tokens: of the first rank, on its device, with `NAN_TOKEN`; None on the others.
    """
    if step.run.tokens_only or step.verifies or not len(step.sampling):
        return None
    told = torch.empty(len(step.sampling), dtype=torch.int64, device=group.device) if tokens is None else tokens.clamp(min=0)
    return group.from_first(told)
