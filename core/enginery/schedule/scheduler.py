"""The scheduler: takes requests in, says what runs next, takes results in. How a step is chosen: `planner`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from enginery.config.schema import ScheduleSettings
from enginery.contracts.batch import FULL
from enginery.contracts.grammars import GrammarState
from enginery.contracts.request import GenerationRequest, RequestOutput
from enginery.contracts.schedule import LaneCounts, PageCounts, SchedulePolicySpec
from enginery.contracts.step import NO_SIZES, RunSizes, StepInput, StepOutput
from enginery.errors import QueueFull, RequestError
from enginery.kv.finite import FiniteMemory
from enginery.kv.manager import KVCacheManager
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import RadixPrefixCache
from enginery.schedule.planner import NO_DRAFTS, BatchPlanner
from enginery.schedule.queue import WaitingQueue
from enginery.schedule.request import Request, RequestStatus
from enginery.schedule.results import note_prompt, take_in
from enginery.schedule.step import Agreed, StepBuilder, agreed
from enginery.schedule.table import RequestTable


class Drafts(Protocol):
    """Where guesses at next tokens come from."""

    def propose(self, table: RequestTable) -> Mapping[str, Sequence[int]]:
        """Those of running requests, by id. No step is in flight."""

    def waits(self, table: RequestTable) -> bool:
        """Whether the next step waits until what is in flight is told: the host has guesses at what follows the known tokens."""

    def length(self, requests: Sequence[Request], num_coming: int, num_tokens: int) -> int:
        """How many tokens a draft model guesses at the end of a step of these. 0: it does not follow the step either.

        num_coming: requests that will decode together then, if none ends. num_tokens: of the step.
        """

    def coming(self, requests: Sequence[Request], num_made: int) -> Sequence[int] | None:
        """How many guesses each of these has once the step in flight is told, at whose end `num_made` are made on the device.

        None: some are chosen, or their next tokens, by tokens that are not known before.
        """


class Scheduler:
    """Owns the requests from `submit` until they have ended and their pages are back. Not thread-safe.

    Each non-empty step of `next_step` comes back through `complete` or `fail`, in order. `next_step` may be called again before:
    then inputs may be pending (`Item.pending`), and what later steps sample for a request that has ended is dropped.

    settings: as it was given. table: where its requests stand. next_number: of the next step that is not empty. requests: of the
    last step that was begun, in the order of its items. in_flight: steps that are not complete, and their requests. preempted: ids
    of those that the last one made wait again. lanes: empty, as there is one.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        policy: SchedulePolicySpec,
        *,
        cache: RadixPrefixCache,
        allocator: PageAllocator,
        finite: FiniteMemory | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        drafting: Drafts | None = None,
    ) -> None:
        """drafting: asked before a step for drafts, if no step is in flight: only then all tokens of a request are known."""
        self.settings = settings
        self._drafting = drafting
        self._clock = clock
        seats = range(settings.first_seat, settings.first_seat + settings.max_batch_requests)
        self._kv = KVCacheManager(settings.page_size, cache, allocator, seats=seats, finite=finite)
        self.table = RequestTable(self._kv, WaitingQueue(settings, policy, eos_token_ids))
        self.in_flight: deque[tuple[StepInput, list[Request]]] = deque()
        self.next_number = 0
        self.requests: Sequence[Request] = ()
        self.lanes: tuple[LaneCounts, ...] = ()
        self.preempted: Sequence[str] = ()

    @property
    def num_running(self) -> int:
        """Requests admitted and neither ended nor preempted."""
        return len(self.table.running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or preempted."""
        return len(self.table.waiting) + len(self.table.held)

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended or a step has not completed."""
        return bool(self.table.by_id or self.in_flight)

    @property
    def pages(self) -> Mapping[str, PageCounts]:
        """How many there are, by kind of memory; those that neither a request nor the prefix cache owns are free."""
        full, cache, held = self._kv.allocator, self._kv.cache, self._kv.allocator.num_pages - self._kv.num_available
        evicted = {} if cache.points is None else cache.points.num_evicted
        counts = {
            FULL: PageCounts(
                free=full.num_free, cached=cache.num_cached, total=full.num_pages, held=held, evicted=cache.num_evicted
            )
        }
        for kind, other in self._kv.finite.allocators.items():
            counts[kind] = PageCounts(
                free=other.num_free,
                cached=other.num_cached,
                total=other.num_pages,
                held=other.num_pages - other.available,
                evicted=evicted.get(kind, 0),
            )
        return counts

    def submit(self, asked: GenerationRequest, *, held: bool = False, num_elsewhere: int = 0) -> None:
        """Queue it; held: only after `release`. num_elsewhere: requests that wait in other lanes.

        Raises `RequestError` if it can never run, `QueueFull` if too many wait.
        """
        if asked.request_id in self.table.by_id:
            raise RequestError(f"the request id {asked.request_id!r} is in use; choose another one", param="request_id")
        request = self.table.waiting.accept(asked, self._clock())
        most = self.settings.max_queued_requests  # preempted ones always may join
        if (waiting := self.num_waiting + num_elsewhere) >= most:
            advice = "retry in a few seconds, a body of more than that in parts"
            raise QueueFull(f"{waiting:,} requests are waiting, the most that --max-queued-requests allows ({most:,}); {advice}")
        self.table.enlist(request)
        if not held:
            self.table.release(request)

    def release(self, request_id: str, grammar: GrammarState) -> None:
        """Let a held request run, with what its output must be."""
        request = self.table.by_id[request_id]
        request.grammar = grammar
        self.table.release(request)

    def abort(self, request_id: str) -> bool:
        """End it, whatever it is doing; it gets no result. False if it is unknown or has ended."""
        request = self.table.by_id.get(request_id)
        if request is None:
            return False
        self.table.end(request)
        return True

    def next_step(self, sizes: RunSizes = NO_SIZES) -> StepInput:
        """Decide what runs next. Empty when nothing can run; if a step is in flight, that may change when it completes.

        sizes: what the workers have graphs of.
        """
        drafts = NO_DRAFTS if self._drafting is None or self.in_flight else self._drafting.propose(self.table)
        planner = BatchPlanner(self.table, self.settings, drafts)
        built = planner.fill()
        if self._drafting is not None:
            coming = len(built.requests)  # that will decode together then: where prompts come in, those that wait follow them
            if built.num_decode < coming:
                coming = min(self.num_running + len(self.table.waiting), self.settings.max_batch_requests)
            built.draft_len = self._drafting.length(built.requests, coming, built.num_rows)
        self.preempted = planner.preempted
        return self.begin(built, agreed([built], sizes))

    def begin(self, built: StepBuilder, way: Agreed, *, even_idle: bool = False) -> StepInput:
        """The planned step, which is in flight from now on, unless it is empty. even_idle: then too, as other lanes have work."""
        self.requests = built.requests
        step = built.build(self.next_number, way, self._kv.released)
        if built.requests or even_idle:
            self.in_flight.append((step, built.requests))
            self._kv.released.clear()
            self.next_number += 1
        return step

    def complete(
        self, step: StepInput, output: StepOutput, refused: Mapping[int, str] = MappingProxyType({})
    ) -> list[RequestOutput]:
        """Take in what a step gave, and say what it added to each request: nothing where it sampled no token, or had ended before.

        refused: items whose grammars could not say what comes next, and why; these requests end.
        """
        requests, items = self._land(step), step.columns()
        for index in range(step.num_decode, len(requests)):
            note_prompt(requests[index], int(items.start[index]), output.prompt_logprobs.get(index, ()))
        columns = zip(requests, (items.start + items.num_tokens).tolist(), items.num_drafts.tolist(), strict=True)
        outputs: list[RequestOutput] = []
        for index, (request, end, num_drafts) in enumerate(columns):
            if request.status is not RequestStatus.FINISHED:
                if (added := take_in(request, index, output, refused, end=end, num_drafts=num_drafts)) is not None:
                    outputs.append(added)
                    if added.is_last:
                        self.table.end(request)
                points, is_prompt = request.kv.points, index >= step.num_decode
                if is_prompt or (points and points[-1].position >= end - num_drafts):  # by their positions: else none was passed
                    self.table.offer(request, is_prompt=is_prompt)
            if request.status is not RequestStatus.RUNNING:
                self.table.settle(request)
        return outputs

    def fail(self, step: StepInput) -> list[Request]:
        """End the requests of a step that did not complete. Returns the ones that had not ended before."""
        requests = self._land(step)
        ended = [request for request in requests if request.status is not RequestStatus.FINISHED]
        for request in ended:
            self.table.end(request)
        for request in requests:
            self.table.settle(request)
        return ended

    def check_idle(self) -> None:
        """When no request holds pages, raise AssertionError unless free + cached pages = all pages, and no page is locked."""
        self.table.check_idle()

    def _land(self, step: StepInput) -> list[Request]:
        """The step is no longer in flight. Returns the requests of its items."""
        scheduled, requests = self.in_flight.popleft()
        assert scheduled is step, "steps come back in the order they were scheduled in"
        for request in requests:
            request.in_flight -= 1
        if self._drafting is not None and not step.draft_len:
            for request, count in zip(requests, step.columns().num_tokens.tolist(), strict=True):
                request.num_unfollowed += count
        return requests
