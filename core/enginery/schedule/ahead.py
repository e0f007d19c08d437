"""A verification that is scheduled while the step before it runs, which tells nobody knows how many tokens.

    device    ┃ verify n ........................ │ follow │ guess ┃ verify n + 1
    host        schedule n + 1, as if all        ┃ settle │ launch ┃ take in n
                guesses of n were right           n is told

What requests, guesses and pages it has follows from the step before. Where each request goes on follows from what that told, and
is put in then (`settled`): what is launched is the step that would have been scheduled after it. Only a request that ended with the
step before is in it too; what comes of that is dropped. Where all ended, nothing is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from enginery.contracts.step import INT, Items, StepInput, StepOutput
from enginery.schedule.request import Request, RequestStatus


class Ahead(NamedTuple):
    """step: as far as it is known. settle: the step itself, by what the step before gave, which is not taken in yet; None: there is
    nothing left to run, and it is not in flight."""

    step: StepInput
    settle: Callable[[StepOutput], StepInput | None]


def all_end(requests: Sequence[Request], output: StepOutput) -> bool:
    """Whether each request of a decoding step ends with what it gave. None has a grammar, or a least number of tokens."""
    return all(
        request.status is RequestStatus.FINISHED
        or index in output.failed
        or len(request.token_ids) + len(told) >= request.limit
        or not request.stop_ids.isdisjoint(told)
        for index, (request, told) in enumerate(zip(requests, output.token_ids, strict=True))
    )


def settled(ahead: StepInput, requests: Sequence[Request], before: StepInput, output: StepOutput) -> StepInput:
    """With each item where its request goes on, behind its last told token, and as few guesses as the request's limit leaves.

    ahead: each item begins as far as it may. requests: of its items, which are told if they get fewer guesses. output: of `before`,
    in which all of them were.
    """
    was = before.columns()
    told = np.array([(len(tokens), max(0, tokens[-1])) for tokens in output.token_ids], INT)  # NaN gives no token
    by_seat = np.zeros((int(was.seat.max()) + 1, 2), INT)
    by_seat[was.seat, 0], by_seat[was.seat, 1] = was.num_drafts + 1 - told[:, 0], told[:, 1]
    items = np.frombuffer(ahead.items, INT).reshape(-1, len(Items._fields)).copy()
    each = Items(*items.T)
    wrong, last = by_seat[each.seat].T
    each.start[:] -= wrong
    each.first_write[:] = each.start
    room = np.array([request.limit for request in requests]) - each.start - 2  # beside the token that a step tells anyhow
    over = np.maximum(each.num_drafts - np.maximum(room, 0), 0).astype(INT)
    for column in (each.num_tokens, each.num_logits, each.num_drafts, each.pending):
        column -= over
    for index in over.nonzero()[0].tolist():
        requests[index].num_computed -= int(over[index])
        requests[index].num_expected -= int(over[index])
    return msgspec.structs.replace(ahead, items=items.tobytes(), input_ids=last.astype(INT).tobytes())
