"""A step on its way: what it gave, as it comes to the host.

S items that sample, R rows that are sampled, C channels.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from enginery.contracts.request import TokenLogprob
from enginery.contracts.step import StepInput, StepOutput, StepTimes
from enginery.worker.layout import begins_of
from enginery.worker.sampling import NAN_TOKEN, LogprobTable

NAN_ERROR: Final = (
    "the model's logits for it are NaN: float16 overflows in many models, or a kernel or the weights are at fault; try bfloat16, "
    "and engine test-backend"
)


class Guesses(NamedTuple):
    """What a draft model guesses to follow each item that samples.

    tokens: [S, d] on the host, valid after `ready`; None: they are.
    """

    tokens: torch.Tensor
    ready: torch.cuda.Event | None

    def of(self, place: int) -> tuple[int, ...]:
        """Those of one item, when they have come."""
        if self.ready is not None:
            self.ready.synchronize()
        return tuple(self.tokens[place].tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningStep:
    """A step that the device may still be running. sampled: [R] on the host, valid after `copied`, of the items `sampling`. marked:
    the same on the device, valid until the next step.

    accepted: [S] on the host, as valid, the drafts of these items that are among what was sampled; None: there were none. guesses:
    what a draft model guesses to come next, which may come later; None: there is none.

    So are embedded, [E, C], of the items `embedding`, and the tables: logprobs of the items `sampling`, if any asks for them, with
    num_top of each, and prompt_logprobs by item.
    """

    step: StepInput
    sampling: Sequence[int]
    sampled: torch.Tensor
    marked: torch.Tensor
    accepted: torch.Tensor | None
    guesses: Guesses | None
    copied: torch.cuda.Event | None
    embedding: Sequence[int]
    embedded: torch.Tensor | None
    logprobs: LogprobTable | None
    num_top: Sequence[int]
    prompt_logprobs: Mapping[int, Sequence[LogprobTable]]
    captured: bool
    laid_out_s: float
    planned_s: float
    launched_s: float

    def wait(self) -> StepOutput:
        return self._output

    @functools.cached_property
    def _output(self) -> StepOutput:
        waited_from_s = time.perf_counter()
        first_rows = () if self.accepted is None else self._first_rows()  # before the wait, as the device may stand still behind it
        if self.copied is not None:
            self.copied.synchronize()
        told = self._told(first_rows)
        token_ids: list[tuple[int, ...]] = [()] * self.step.num_items
        for index, tokens in zip(self.sampling, told, strict=True):
            token_ids[index] = tokens
        embedded = [] if self.embedded is None else self.embedded.tolist()
        failed = {index: NAN_ERROR for index, tokens in zip(self.sampling, told, strict=True) if NAN_TOKEN in tokens}
        return StepOutput(
            number=self.step.number,
            token_ids=token_ids,
            logprobs=self._read_logprobs(told),
            prompt_logprobs={
                index: [found for table in tables for found in table.rows()] for index, tables in self.prompt_logprobs.items()
            },
            embeddings=dict(zip(self.embedding, map(tuple, embedded), strict=True)),
            failed=failed,
            captured=self.captured,
            times=StepTimes(self.laid_out_s, self.planned_s, self.launched_s, time.perf_counter(), waited_from_s),
        )

    def _told(self, first_rows: Sequence[int]) -> list[tuple[int, ...]]:
        """Of each item in `sampling`, its sampled token and those of the drafts that were right."""
        tokens = self.sampled.tolist()
        if self.accepted is None:
            return [(token,) for token in tokens]
        return [tuple(tokens[row : row + 1 + count]) for row, count in zip(first_rows, self.accepted.tolist(), strict=True)]

    def _first_rows(self) -> list[int]:
        """Of each item in `sampling`, the first of its rows that are sampled."""
        first_rows: list[int] = begins_of(self.step.sampled_rows).tolist()
        return first_rows

    def _read_logprobs(self, told: Sequence[tuple[int, ...]]) -> dict[int, tuple[TokenLogprob, ...]]:
        if self.logprobs is None:
            return {}
        found = list(self.logprobs.rows())
        items = zip(self.sampling, self._first_rows(), told, strict=True)
        return {index: tuple(found[row : row + len(tokens)]) for index, row, tokens in items if self.num_top[row] >= 0}
