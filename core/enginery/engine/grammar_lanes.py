"""Threads that compile grammars, and whose turn is next. The step loop drives them; nothing here waits."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from enginery.contracts.grammars import CompiledGrammar, Grammar, UnfinishedGrammar
from enginery.errors import Overloaded, RequestError

_STACK_BYTES: Final = 512 << 20  # compilers recurse into what is nested; only what is used of it takes memory
_MAX_UNLOOKED: Final = 64
_Work = Callable[[], CompiledGrammar | UnfinishedGrammar]


@dataclass(eq=False, kw_only=True)
class CompileJob:
    """A grammar on its way, or what came of it (outcome).

    client: whose request was the first. work: what is to be done next, in this lane. since_s: when that was queued or, once there
    is a `future`, begun. num_waiting: requests that want it; a job that nobody wants is not begun.
    """

    grammar: Grammar
    client: str
    work: _Work
    lane: Lane
    since_s: float = field(default_factory=time.monotonic)
    future: Future[CompiledGrammar | UnfinishedGrammar] | None = None
    outcome: CompiledGrammar | RequestError | None = None
    num_waiting: int = 0

    def go_on(self, work: _Work, lane: Lane) -> None:
        self.work, self.lane, self.future, self.since_s = work, lane, None, time.monotonic()
        lane.put(self, self.client)


class Lane:
    """Some threads. Clients take turns, and one alone never has all of several.

    A thread cannot be stopped: one whose work takes too long is missing until it is done.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self._queues: OrderedDict[str, deque[CompileJob]] = OrderedDict()  # the client whose turn is next comes first
        self._running: list[tuple[Future[CompiledGrammar | UnfinishedGrammar], str]] = []

    def put(self, job: CompileJob, client: str) -> None:
        """Queue a job for a client. One that several wait for may be put once for each of them."""
        queue = self._queues.setdefault(client, deque())
        if len(queue) >= _MAX_UNLOOKED:  # some may be nobody's by now
            self._queues[client] = queue = deque(other for other in queue if other.num_waiting)
        queue.append(job)

    def start(self) -> None:
        """Begin what there are threads for."""
        self._running = [(future, client) for future, client in self._running if not future.done()]
        while len(self._running) < self._num_threads and (client := self._next_client()) is not None:
            job = self._queues[client].popleft()
            self._queues.move_to_end(client)
            if not self._queues[client]:
                del self._queues[client]
            if job.num_waiting and job.future is None and job.outcome is None:
                job.future, job.since_s = self._begun(job.work), time.monotonic()
                self._running.append((job.future, client))

    def _begun(self, work: _Work) -> Future[CompiledGrammar | UnfinishedGrammar]:
        """On a thread of its own. Where the system refuses one, that is what has come of it."""
        future: Future[CompiledGrammar | UnfinishedGrammar] = Future()
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=_run, args=(work, future), name=self._name).start()
        except RuntimeError as error:
            why = f"the system refuses a thread that compiles the grammar ({error}); send the request again later"
            future.set_exception(Overloaded(why, param="grammar"))
        finally:
            threading.stack_size(usual)
        return future

    def _next_client(self) -> str | None:
        busy = [client for _, client in self._running]
        most = max(1, self._num_threads - 1)
        return next((client for client in self._queues if busy.count(client) < most), None)


def _run(work: _Work, future: Future[CompiledGrammar | UnfinishedGrammar]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # the boundary of the thread
        future.set_exception(error)
