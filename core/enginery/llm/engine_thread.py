"""An engine on a thread of its own, which many callers share: requests join the batch that runs, and leave it."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

from enginery.contracts.engine import EngineFacts
from enginery.contracts.request import FinishReason, SamplingParams
from enginery.errors import EngineDied, EnginError
from enginery.llm.answers import GenerationDelta, GrowingCompletion
from enginery.llm.open_requests import OpenRequests
from enginery.llm.prompts import Encoded

Tell = Callable[[GenerationDelta | EnginError], None]
_log: Final = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class _Open:
    """One request: who is told about it, and those of its completions that have not ended."""

    tell: Tell
    parts: list[GrowingCompletion]


class EngineThread:
    """Builds an engine, steps it while there is work, and prepares it while there is none. What `tell` raises ends its request."""

    def __init__(self, build: Callable[[], OpenRequests]) -> None:
        """Wait until the engine is ready. build: called on the thread; what it raises is raised here."""
        self._calls: queue.SimpleQueue[Callable[[OpenRequests], None]] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._ending = threading.Lock()
        self._end: str | None = None  # why nothing is taken any more
        self._pid = os.getpid()
        started: Future[EngineFacts] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, started), name="engine", daemon=True)
        self._thread.start()
        self.facts = started.result()

    def submit(self, name: str, prompt: Encoded, params: SamplingParams, *, tell: Tell, embed: bool = False) -> None:
        """Queue a request. name: unlike any other's. embed: see `OpenRequests.submit`.

        tell: called on the thread, with deltas until all `params.n` completions have ended, or with an error and then nothing more.
        Raises `EnginError` when the engine is gone.
        """
        with self._ending:
            self.check()
            self._calls.put(partial(self._submit, name, prompt, params, tell, embed=embed))

    def check(self) -> None:
        """Raises `EngineDied` when the engine is gone, and `EnginError` in a process that was forked, where there is no thread."""
        if os.getpid() != self._pid:
            raise EnginError("this process is a fork, and the engine its parent's; build one here, or start processes by spawn")
        if self._end is not None:
            raise EngineDied(f"the engine is gone: {self._end}")

    def abort(self, name: str) -> None:
        """End a request; its last deltas have the reason abort. One that is not open is ignored."""
        self._calls.put(partial(self._abort, name))

    def close(self) -> None:
        """End everything, wait for it, and free the memory. May be called twice."""
        self._calls.put(partial(self._stop, "it was closed; build a new one"))
        if threading.current_thread() is not self._thread:  # as when it is collected as garbage there
            self._thread.join()

    def _run(self, build: Callable[[], OpenRequests], started: Future[EngineFacts]) -> None:
        try:
            requests = build()
        except BaseException as error:
            started.set_exception(error)
            return
        engine = requests.engine
        started.set_result(engine.facts)
        while self._end is None:
            try:
                if engine.has_work:
                    self._hand_out(requests, self._step(requests))
                self._answer_calls(requests, wait=not engine.has_work and self._calls.empty() and not engine.prepare())
            except BaseException as error:  # some plugins' libraries raise what is no Exception; nobody may wait for ever
                _log.exception("the engine failed")
                self._stop(f"it failed with {type(error).__name__}: {error}", requests)
        self._answer_calls(requests, wait=False)
        engine.close()

    def _answer_calls(self, requests: OpenRequests, *, wait: bool) -> None:
        while wait or not self._calls.empty():
            self._calls.get()(requests)
            wait = False

    def _step(self, requests: OpenRequests) -> list[GrowingCompletion]:
        """Run one step. If it fails, the requests in it end, and the engine goes on where it can."""
        try:
            return requests.step()
        except Exception as error:
            grown = requests.take_in(requests.engine.recover(error))
            _log.exception("a step failed, and its requests with it; the engine goes on")
            return grown

    def _submit(
        self, name: str, prompt: Encoded, params: SamplingParams, tell: Tell, requests: OpenRequests, *, embed: bool
    ) -> None:
        found = self._open[name] = _Open(tell=tell, parts=[])  # before it can fail, as whoever waits is told by `_stop` too
        try:
            self.check()
            found.parts = requests.submit(name, prompt, params, embed=embed)
        except EnginError as error:
            self._tell(name, found, error, requests)

    def _abort(self, name: str, requests: OpenRequests) -> None:
        if (found := self._open.get(name)) is None:
            return
        requests.abort(found.parts)
        for part in found.parts:
            part.finish_reason = FinishReason.ABORT
        self._hand_out(requests, list(found.parts))

    def _hand_out(self, requests: OpenRequests, grown: Iterable[GrowingCompletion]) -> None:
        for part in grown:
            found = self._open.get(part.name)
            if found is None:  # another of its completions failed in the same step
                continue
            if part.is_over:
                found.parts.remove(part)
            if part.error is not None or not found.parts:
                del self._open[part.name]
            told = part.error or part.take()
            if told is not None:
                self._tell(part.name, found, told, requests)

    def _tell(self, name: str, found: _Open, told: GenerationDelta | EnginError, requests: OpenRequests) -> None:
        try:
            found.tell(told)
        except RuntimeError:  # its event loop was closed
            told = EnginError("nobody waits for it")
        if isinstance(told, EnginError):
            requests.abort(found.parts)
            self._open.pop(name, None)

    def _stop(self, why: str, requests: OpenRequests) -> None:
        with self._ending:
            self._end = self._end or why
        for name, found in list(self._open.items()):
            self._tell(name, found, EngineDied(f"the engine is gone: {why}"), requests)
