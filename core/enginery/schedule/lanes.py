"""Lanes of one scheduler: requests of their own, with pages and a prefix cache, whose steps are one step of all of them.

    requests ──> the lane that comes to the end of the prompt    lane 0   | decode | decode | chunk  |
                 with the least work (`routing`)                 lane 1   | chunk  |  idle  | decode |
                                                                 number       7        8        9

Where lanes are is not known here: each has ranks of its own, and all of them compute feed-forwards together. So a lane without work
runs too, and all agree on the way and on the padding before anything is planned. Drafts are of one lane only.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np

from enginery.contracts.grammars import GrammarState
from enginery.contracts.request import GenerationRequest, RequestOutput
from enginery.contracts.schedule import LaneCounts, PageCounts, all_pages
from enginery.contracts.step import NO_SIZES, RunSizes, StepInput, StepOutput, together
from enginery.errors import RequestError
from enginery.schedule.planner import BatchPlanner
from enginery.schedule.queue import prompt_tokens
from enginery.schedule.request import Request
from enginery.schedule.routing import Candidate, choose
from enginery.schedule.scheduler import Scheduler
from enginery.schedule.step import agreed

ValueT = TypeVar("ValueT")


class LaneScheduler:
    """As a `Scheduler`, over one for each lane. A request stays in the lane that it was given to.

    requests, preempted: of all lanes; requests are in the order of the step's items.
    """

    def __init__(self, lanes: Sequence[Scheduler]) -> None:
        """lanes: with settings alike, but for their seats."""
        self._lanes = lanes
        self._num_sent = [0] * len(lanes)
        self.requests: Sequence[Request] = ()
        self.preempted: Sequence[str] = ()

    @property
    def next_number(self) -> int:
        """Of the next step: the lanes count alike."""
        return self._lanes[0].next_number

    @property
    def num_running(self) -> int:
        return sum(lane.num_running for lane in self._lanes)

    @property
    def num_waiting(self) -> int:
        return sum(lane.num_waiting for lane in self._lanes)

    @property
    def has_work(self) -> bool:
        return any(lane.has_work for lane in self._lanes)

    @property
    def pages(self) -> Mapping[str, PageCounts]:
        return all_pages([lane.pages for lane in self._lanes])

    @property
    def lanes(self) -> tuple[LaneCounts, ...]:
        return tuple(
            LaneCounts(num_running=lane.num_running, num_waiting=lane.num_waiting, pages=lane.pages) for lane in self._lanes
        )

    def submit(self, asked: GenerationRequest, *, held: bool = False) -> None:
        """Queue it where the least work is left for it. Raises as `Scheduler.submit` does."""
        if self._lane_of(asked.request_id) is not None:
            raise RequestError(f"the request id {asked.request_id!r} is in use; choose another one", param="request_id")
        tokens = prompt_tokens(asked, self._lanes[0].settings.vocab_size)
        reuses = asked.params.prompt_logprobs is None
        candidates = [
            Candidate(
                waiting=lane.table.num_ahead, cached=lane.table.num_cached(tokens, asked.cache_salt) if reuses else 0, num_sent=sent
            )
            for lane, sent in zip(self._lanes, self._num_sent, strict=True)
        ]
        place = choose(len(tokens), candidates)
        assert place is not None, "every lane serves"
        elsewhere = sum(lane.num_waiting for number, lane in enumerate(self._lanes) if number != place)
        self._lanes[place].submit(asked, held=held, num_elsewhere=elsewhere)
        self._num_sent[place] += 1

    def release(self, request_id: str, grammar: GrammarState) -> None:
        lane = self._lane_of(request_id)
        assert lane is not None, f"request {request_id!r} is held"
        lane.release(request_id, grammar)

    def abort(self, request_id: str) -> bool:
        """End it, whatever it is doing. False if it is unknown or has ended."""
        lane = self._lane_of(request_id)
        return lane is not None and lane.abort(request_id)

    def next_step(self, sizes: RunSizes = NO_SIZES) -> StepInput:
        """Decide what every lane runs next. Empty when nothing can run in any."""
        planners = [BatchPlanner(lane.table, lane.settings) for lane in self._lanes]
        built = [planner.fill() for planner in planners]
        self.preempted = [request_id for planner in planners for request_id in planner.preempted]
        way = agreed(built, sizes)
        if not any(each.requests for each in built):
            self.requests = ()
            return self._lanes[0].begin(built[0], way)
        step = together([lane.begin(each, way, even_idle=True) for lane, each in zip(self._lanes, built, strict=True)])
        of_lanes = list(itertools.chain.from_iterable(each.requests for each in built))
        self.requests = [of_lanes[place] for place in np.argsort(np.concatenate(step.lane_places)).tolist()]
        return step

    def complete(
        self, step: StepInput, output: StepOutput, refused: Mapping[int, str] = MappingProxyType({})
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for lane, own, places in zip(self._lanes, step.lanes, step.lane_places, strict=True):
            at = places.tolist()
            part = msgspec.structs.replace(
                output,
                token_ids=[output.token_ids[place] for place in at],
                logprobs=_of(output.logprobs, at),
                prompt_logprobs=_of(output.prompt_logprobs, at),
                embeddings=_of(output.embeddings, at),
                failed=_of(output.failed, at),
            )
            outputs += lane.complete(own, part, _of(refused, at))
        return outputs

    def fail(self, step: StepInput) -> list[Request]:
        """End the requests of a step that did not complete. Returns the ones that had not ended before."""
        return [request for lane, own in zip(self._lanes, step.lanes, strict=True) for request in lane.fail(own)]

    def check_idle(self) -> None:
        for lane in self._lanes:
            lane.check_idle()

    def _lane_of(self, request_id: str) -> Scheduler | None:
        return next((lane for lane in self._lanes if request_id in lane.table.by_id), None)


AnyScheduler: TypeAlias = Scheduler | LaneScheduler


def _of(by_place: Mapping[int, ValueT], at: Sequence[int]) -> dict[int, ValueT]:
    """What is said of the items at these places, counted from 0."""
    return {own: by_place[place] for own, place in enumerate(at) if place in by_place}
