"""Where each request stands, and how it gets from one place to the next.

    submit        admit              end
    ──────► waiting ──────► running ──────► (leaving) ──► gone
               ▲                │
               └── (leaving) ◄──┘ preempt

A request leaves while steps in flight still write to its pages; they go back when the last of those completes.
"""

from __future__ import annotations

from array import array
from bisect import insort
from operator import attrgetter

from enginery.kv.finite import check_idle as check_finite_idle
from enginery.kv.kinds import Demand
from enginery.kv.manager import KVCacheManager
from enginery.schedule.queue import WaitingQueue
from enginery.schedule.request import Request, RequestStatus


class RequestTable:
    """Every request that has not ended or has pages. `running` is in order; others read it.

    side_by_side: the same, but those that begin with the same pages next to each other, so that a step can read these once.
    """

    def __init__(self, kv: KVCacheManager, waiting: WaitingQueue) -> None:
        self.kv = kv
        self.waiting = waiting
        self.held: set[Request] = set()  # until they are released, they do not even wait
        self.running: list[Request] = []
        self.side_by_side: list[Request] = []
        self.leaving: set[Request] = set()
        self.by_id: dict[str, Request] = {}  # those that have not ended

    def enlist(self, request: Request) -> None:
        """Hold a new request until it is released."""
        self.by_id[request.request_id] = request
        request.status = RequestStatus.HELD
        self.held.add(request)

    def release(self, request: Request) -> None:
        self.held.remove(request)
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def admit_head(self, *, reserved: Demand) -> Request | None:
        """Let the first waiting request run, if its pages are there besides `reserved`."""
        request = self.waiting.head
        if not self.kv.enter(request.kv, reuse=not request.wants_prompt_logits, reserved=reserved):
            return None
        self.waiting.remove(request)
        request.num_computed, request.num_unfollowed = request.kv.num_written, 0
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=attrgetter("order"))
        insort(self.side_by_side, request, key=_beginning)
        return request

    def preempt_last(self) -> Request:
        """Make the running request that is last in order wait again, once no step is in flight that it is in."""
        request = self.running.pop()
        self.side_by_side.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.leaving.add(request)
        self.settle(request)
        return request

    def end(self, request: Request) -> None:
        """It gets no more results."""
        del self.by_id[request.request_id]
        if request.status is RequestStatus.HELD:
            self.held.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.side_by_side.remove(request)
            self.leaving.add(request)
        request.status = RequestStatus.FINISHED
        self.settle(request)

    def settle(self, request: Request) -> None:
        """Take the pages of a leaving request back, once no step is in flight that writes to them."""
        if request.in_flight or request not in self.leaving:
            return
        self.leaving.remove(request)
        self.kv.leave(request.kv)
        request.num_computed, request.num_expected = 0, len(request.token_ids)
        if request.status is RequestStatus.PREEMPTED:
            request.status = RequestStatus.WAITING
            self.waiting.add(request)

    def offer(self, request: Request, *, is_prompt: bool) -> None:
        """Put what it has computed into the prefix cache."""
        if not request.in_flight:
            self.kv.finite.points.take_back(request.kv)
        if is_prompt and request.status is RequestStatus.RUNNING:
            self.kv.share(request.kv)
            self.side_by_side.remove(request)  # its prompt has pages now
            insort(self.side_by_side, request, key=_beginning)
        elif request.kv.points:
            self.kv.finite.points.settle(request.kv)

    def num_cached(self, token_ids: array[int], salt: str) -> int:
        """Tokens of a prompt that need not be computed, if it began now."""
        found = self.kv.cache.match(token_ids, salt)
        if self.kv.finite.allocators:
            return 0 if found.point is None else found.point.position
        return len(found.pages) * self.kv.page_size

    @property
    def num_ahead(self) -> int:
        """Tokens that its requests have yet to compute; one of each that decodes."""
        return self.waiting.num_tokens + sum(request.num_left for request in (*self.running, *self.held))

    def check_idle(self) -> None:
        """When no request holds pages, raise AssertionError unless every page is either free or in the cache, unlocked."""
        if self.running or self.leaving:
            return
        cache, allocator = self.kv.cache, self.kv.allocator
        free, cached, total = allocator.num_free, cache.num_cached, allocator.num_pages
        assert free + cached == total, f"nothing runs, but {free:,} free + {cached:,} cached pages are not all {total:,}"
        assert cached == cache.num_evictable, f"nothing runs, but {cached - cache.num_evictable:,} cached pages are locked"
        check_finite_idle(self.kv.finite)


def _beginning(request: Request) -> array[int]:
    """Every 16th of its first pages: that compares fast, and orders by shared prefixes well enough."""
    return request.kv.pages[:1024:16]
