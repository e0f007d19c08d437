"""Pipeline stages that are processes: what crosses from one to the next, and a step on those before the last.

    stage 0   | step 3 | step 4 |  ..           each tensor rank sends to the same one of the next stage:
    stage 1   | step 2 | step 3 | step 4 |      partial sums cross as they are, so no addition moves

T tokens of a step.
"""

from __future__ import annotations

from collections import deque

import torch

from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.model import Model
from enginery.contracts.parallel import Channel, ParallelFacts, StageTensors
from enginery.contracts.step import StepInput
from enginery.errors import PluginError
from enginery.kv.pool import TORCH_DTYPES
from enginery.worker.layout import lay_out
from enginery.worker.page_tables import PageTables
from enginery.worker.ranks.gloo import Group, Sending
from enginery.worker.token_feed import TokenFeed


class StageLinks:
    """One rank's ways to the stages before and behind. boundary: what crosses, the same between all stages."""

    def __init__(self, group: Group, parallel: ParallelFacts, boundary: tuple[Channel, ...], dtype: torch.dtype) -> None:
        """group: all ranks, for nothing else. dtype: of channels that state none."""
        self._group, self._dtype = group, dtype
        self._boundary = boundary
        self._before, self._behind = parallel.rank + parallel.tensor_size, parallel.rank - parallel.tensor_size
        self._sent: deque[list[Sending]] = deque()

    def arrive(self, num_tokens: int) -> StageTensors:
        """What the stage before has computed of the next step, of so many tokens."""
        return {
            channel.name: self._group.receive((num_tokens, channel.width), self._dtype_of(channel), self._before)
            for channel in self._boundary
        }

    def pass_on(self, tensors: StageTensors, num_tokens: int) -> None:
        """Send it to the stage behind, without waiting. Raises `PluginError` for what the family has not said."""
        sending = []
        for channel in self._boundary:
            found = tensors.get(channel.name)
            if found is None or found.shape != (num_tokens, channel.width) or found.dtype is not self._dtype_of(channel):
                told = "nothing" if found is None else f"{list(found.shape)} {found.dtype}"
                raise PluginError(
                    f"a stage returned {told} for {channel.name!r} where ModelFacts.boundary says [{num_tokens}, {channel.width}] "
                    f"{self._dtype_of(channel)}"
                )
            sending.append(self._group.send(found, self._behind))
        while self._sent and all(each.is_done for each in self._sent[0]):
            self._sent.popleft()
        self._sent.append(sending)

    def _dtype_of(self, channel: Channel) -> torch.dtype:
        return self._dtype if channel.dtype is None else TORCH_DTYPES[channel.dtype]


class LastStage:
    """Implements `Model` over the last stage's: it goes on from what arrives."""

    def __init__(self, model: Model, links: StageLinks) -> None:
        self._links = links
        self._forward = model.forward
        self.logits = model.logits

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor | StageTensors:
        """Waits for the stage before."""
        return self._forward(batch, self._links.arrive(batch.num_tokens))


class EarlyStage:
    """Runs the steps of another rank on a stage before the last, where nothing is sampled. first: nothing arrives here."""

    def __init__(
        self, model: Model, relay: BackendRelay, *, tables: PageTables, feed: TokenFeed, links: StageLinks, first: bool
    ) -> None:
        self._model, self._relay, self._tables, self._feed, self._links, self._first = model, relay, tables, feed, links, first

    @torch.inference_mode()
    def run(self, step: StepInput) -> None:
        """The next one; it returns when this stage's part is on its way to the next."""
        self._tables.take(step)
        batch = self._relay.plan(self._feed.upload(step, lay_out(step, self._tables), logits_rows=None))
        passed = self._model.forward(batch, None if self._first else self._links.arrive(batch.num_tokens))
        if isinstance(passed, torch.Tensor):
            raise PluginError("a stage before the last returned hidden states, not what crosses to the next")
        self._links.pass_on(passed, batch.num_tokens)
