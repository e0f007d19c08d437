"""What the scheduler decided for one step, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from enginery.contracts.request import FinishReason
from enginery.schedule.request import Request


class ScheduledItem(NamedTuple):
    """One request's part in a step: its tokens `start .. start + num_tokens - 1`. A tuple, because a step has hundreds.

    num_logits: how many of its last rows need logits. samples: whether the last of them yields its next token; otherwise the chunk
    ends inside of the known tokens. input_pending: its one input token is not known yet, it is what the request's previous item
    samples, in a step that is still in flight.
    """

    request: Request
    start: int
    num_tokens: int
    num_logits: int
    samples: bool
    input_pending: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduledStep:
    """The requests of one step, the decoding ones first. Given back to `Scheduler.complete` or `fail`, in order.

    preempted: ids of those that wait again now, or will when the steps they are in have completed, this one perhaps.
    """

    items: tuple[ScheduledItem, ...]
    num_decode: int
    num_prefill_tokens: int
    preempted: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return self.num_decode + self.num_prefill_tokens


class ItemResult(NamedTuple):
    """What a completed step did to one request. `item` is the index of its item in the step.

    token_id: None after a chunk that does not end the prompt. stop_token_id: the token that ended it, an end-of-sequence token or
    one of its `stop_token_ids`.
    """

    item: int
    request: Request
    token_id: int | None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
