"""A verification that is scheduled while the step before it runs, which tells nobody knows how many tokens.

    device    ┃ verify n ........................ │ follow │ guess ┃ verify n + 1
    host        schedule n + 1, as if all        ┃ settle │ launch ┃ take in n
                guesses of n were right           n is told

    host        schedule and launch n + 1        ┃ settle │ take in n      where the device finds where its rows begin

What requests, guesses and pages it has follows from the step before. Where each request goes on follows from what that told, and
is put in then (`settled`): what is launched, or what is taken in later, is the step that would have been scheduled after it. Only
a request that ended with the step before is in it too; what comes of that is dropped. Where all ended, nothing is launched.

A step that is launched before also has rows behind a request's limit, where the device finds that it comes near: in memory that
nobody owns, and what they tell is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from enginery.contracts.batch import DECODING
from enginery.contracts.step import INT, Items, RunSizes, StepInput, StepOutput
from enginery.schedule.planner import BatchPlanner
from enginery.schedule.request import Request, RequestStatus
from enginery.schedule.scheduler import Drafts, Scheduler
from enginery.schedule.step import agreed


class Ahead:
    """Schedules the step behind the one that is in flight. Between `begin` and `settle` nothing else is asked of the scheduler.

    unsettled: the step that was begun. follows: whether it may be launched as it is: not all of its requests end before it for
    sure, and each begins no further before its rows than it has rows.
    """

    def __init__(self, scheduler: Scheduler, drafting: Drafts) -> None:
        self._scheduler, self._drafting = scheduler, drafting
        self.unsettled: StepInput | None = None
        self.follows = False

    def waits(self) -> bool:
        """Whether what runs next follows what a step in flight tells: it verifies or makes guesses, or the host has some."""
        steps = [step for step, _ in self._scheduler.in_flight]
        guess = any(step.verifies or step.draft_len for step in steps)
        return guess or (len(steps) > 0 and self._drafting.waits(self._scheduler.table))

    def begin(self, sizes: RunSizes) -> StepInput | None:
        """What runs behind the one step in flight, as far as is known before that is told. None: it has to be taken in first.

        That is so unless each request that is there decodes in it, and guesses are made behind it.
        """
        if not self._goes_on():
            return None
        scheduler, table, (before, _) = self._scheduler, self._scheduler.table, self._scheduler.in_flight[0]
        counts = self._drafting.coming(table.running, before.draft_len)
        built = None if counts is None else BatchPlanner(table, scheduler.settings).fill_ahead(counts)
        if built is None:
            return None
        built.draft_len = self._drafting.length(built.requests, len(built.requests), built.num_rows)
        scheduler.preempted, built.behind = (), before.decode_len - 1
        goes_on = any(len(request.token_ids) + before.decode_len < request.limit for request in built.requests)
        self.follows = goes_on and before.decode_len <= built.decode_len
        self.unsettled = scheduler.begin(built, agreed([built], sizes))
        return self.unsettled

    def settle(self, output: StepOutput, *, is_launched: bool) -> StepInput:
        """The step itself, by what the step before gave, which is not taken in yet. Empty, and not in flight: all requests end."""
        (before, requests), (ahead, own) = self._scheduler.in_flight
        self.unsettled = None
        if not is_launched and all_end(requests, output):
            # No worker has heard of the step. Its requests end, and their pages and seats go back as always.
            self._scheduler.in_flight.pop()
            self._scheduler.next_number -= 1
            self._scheduler.table.kv.released[:0] = np.frombuffer(ahead.released, INT).tolist()
            for request in own:
                request.in_flight -= 1
            return msgspec.structs.replace(ahead, items=b"")
        step = settled(ahead, own, before, output, is_launched=is_launched)
        self._scheduler.in_flight[-1] = step, own
        return step

    def _goes_on(self) -> bool:
        """Whether the requests of the next step are those that run in the one in flight, and their guesses its own."""
        table, in_flight = self._scheduler.table, self._scheduler.in_flight
        if len(in_flight) != 1 or table.waiting or table.kv.finite.allocators:
            return False
        before, requests = in_flight[0]
        decodes = before.phase in DECODING and before.draft_len > 0
        return decodes and len(table.running) > 0 and {*table.running} <= {*requests}


def all_end(requests: Sequence[Request], output: StepOutput) -> bool:
    """Whether each request of a decoding step ends with what it gave. None has a grammar, or a least number of tokens."""
    return all(
        request.status is RequestStatus.FINISHED
        or index in output.failed
        or len(request.token_ids) + len(told) >= request.limit
        or not request.stop_ids.isdisjoint(told)
        for index, (request, told) in enumerate(zip(requests, output.token_ids, strict=True))
    )


def settled(
    ahead: StepInput, requests: Sequence[Request], before: StepInput, output: StepOutput, *, is_launched: bool = False
) -> StepInput:
    """With each item where its request goes on, behind its last told token, and as few guesses as the request's limit leaves.

    ahead: each item begins as far as it may. requests: of its items, which are told if they get fewer guesses. output: of `before`,
    in which all of them were. is_launched: with all of its guesses, then.
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
    if not is_launched:
        room = np.array([request.limit for request in requests]) - each.start - 2  # beside the token that a step tells anyhow
        over = np.maximum(each.num_drafts - np.maximum(room, 0), 0).astype(INT)
        for column in (each.num_tokens, each.num_logits, each.num_drafts):
            column -= over
        for index in over.nonzero()[0].tolist():
            requests[index].num_computed -= int(over[index])
            requests[index].num_expected -= int(over[index])
    each.pending[:] = each.num_drafts
    return msgspec.structs.replace(ahead, items=items.tobytes(), input_ids=last.astype(INT).tobytes(), behind=0)
