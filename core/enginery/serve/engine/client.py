"""The client of the engine's process: sends requests, hands their outputs out, notices when the process is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import zmq
import zmq.asyncio

from enginery.child_process import begin, remove_left_folders
from enginery.config.schema import EngineOptions, HostShare
from enginery.contracts.engine import BuildProgress, EngineFacts, EngineStats
from enginery.contracts.request import RequestOutput
from enginery.errors import ConfigError, EngineDied, EnginError
from enginery.plugin.manifest import Manifest
from enginery.serve.engine import messages
from enginery.serve.engine.child import EngineChild, pass_on, until
from enginery.serve.engine.outputs import Outputs
from enginery.serve.engine.progress import Progress
from enginery.serve.engine.totals import of_ended
from enginery.serve.http.faults import Aborted, EngineBusy, EngineRestarts, NotReady
from enginery.serve.http.metrics import RequestMeter, RequestTimes

_SILENCE_S: Final = 60.0
_ANSWER_S: Final = 30.0
_LAST_WORDS_S: Final = 2.0
ResultT = TypeVar("ResultT")
_log = logging.getLogger(__name__)


class EngineState(StrEnum):
    """States of the engine's process. Of replicas the first that one is in is told: STOPPING, as all stop together, then the best.

    SILENT: it lives, but has said nothing for a minute. RESTARTING: it has died, and another takes its place.
    """

    STOPPING = "stopping"
    READY = "ready"
    SILENT = "silent"
    LOADING = "loading"
    RESTARTING = "restarting"
    DEAD = "dead"

    @property
    def is_down(self) -> bool:
        """Whether there is no process."""
        return self in (EngineState.RESTARTING, EngineState.DEAD)


class EngineClient:
    """One engine in a process of its own. Made and used inside one event loop, on a thread that outlives it.

    is_stopping: set it, and no more requests are taken; those that run go on. groups: of open requests, by their ids. stats: as
    last reported, several times a second. facts: told when its start has succeeded. restarted_for: why the one before ended, in
    whose place this one is. heard_s: when it last said something, monotonic. prepares: it said so last.
    """

    def __init__(
        self,
        directory: Path,
        child: EngineChild,
        link: zmq.asyncio.Socket,
        boot: messages.Boot,
        *,
        meter: RequestMeter,
        comes_back: bool,
    ) -> None:
        """meter: what requests are counted by. comes_back: whether another is started when it dies."""
        self._directory, self._comes_back = directory, comes_back
        self.facts: EngineFacts | None = None
        self.restarted_for = ""
        self.child = child
        self._link = link
        self.options, self.manifest = boot.options, boot.manifest
        self.groups: dict[str, Outputs] = {}
        self.is_stopping = False
        self._failed: messages.Failed | None = None
        self.meter = meter
        self.stats, self.prepares = EngineStats(), False
        self.progress = Progress()
        self.loading = BuildProgress(phase="process")
        self.heard_s = time.monotonic()
        self._asked: deque[asyncio.Future[str]] = deque()
        self._ready: asyncio.Future[messages.Ready] = asyncio.get_running_loop().create_future()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._relaying = asyncio.create_task(child.relay_stderr())
        self._watching = asyncio.create_task(self._watch())
        self._tasks = [self._relaying, self._watching, asyncio.create_task(self._listen())]
        for task in self._tasks[1:]:
            task.add_done_callback(self._ended_early)

    @classmethod
    async def start(
        cls,
        options: EngineOptions,
        manifest: Manifest,
        *,
        begin: Callable[[], subprocess.Popen[bytes]] = begin,
        log_level: str = "INFO",
        relay: Callable[[str], None] = pass_on,
        meter: RequestMeter | None = None,
        comes_back: bool = False,
        share: HostShare | None = None,
    ) -> EngineClient:
        """Start the process; it is loading when this returns. begin: as that of `child_process`. log_level: of the process.

        relay: gets its stderr. share: of the host, where it is not the only engine there.
        """
        directory = Path(tempfile.mkdtemp(prefix="enginery-"))  # mode 0700
        endpoint = f"ipc://{directory / 'engine'}"
        boot = messages.Boot(endpoint=endpoint, options=options, manifest=manifest, log_level=log_level, share=share)
        context = zmq.asyncio.Context()
        try:
            link = context.socket(zmq.PAIR)
            link.set_hwm(0)
            link.bind(endpoint)
            child = EngineChild(begin(), boot, relay)
        except (zmq.ZMQError, OSError) as error:
            context.destroy(linger=0)
            shutil.rmtree(directory)
            advice = "ulimit -a shows limits" if isinstance(error, OSError) else "set TMPDIR to another, shorter path"
            raise ConfigError(f"an engine at {endpoint} cannot be started: {error}; {advice}") from error
        return cls(directory, child, link, boot, meter=meter or RequestMeter(), comes_back=comes_back)

    @property
    def state(self) -> EngineState:
        """The state of the process, which `/health` tells."""
        if self.died.done():
            return EngineState.DEAD
        if self.is_stopping:
            return EngineState.STOPPING
        if not self._ready.done():
            return EngineState.LOADING
        return EngineState.READY if time.monotonic() - self.heard_s < _SILENCE_S else EngineState.SILENT

    @property
    def open_requests(self) -> list[RequestTimes]:
        """The counts and times of the requests that have not ended."""
        return [times for name, group in self.groups.items() if (times := group.times[name]).reason is None]

    async def ready(self, manifest_digest: str | None = None) -> EngineFacts:
        """Wait until the engine is ready. Raises `EngineDied`, with the exit code of the child's error, if it does not start."""
        await asyncio.wait((self._ready, self.died), return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise self.death()
        said = self._ready.result()
        if manifest_digest not in (None, said.manifest_digest):
            raise EngineDied("the engine's process loaded other plugins than this one; report it")
        return said.facts

    async def abort(self, request_id: str) -> bool:
        """End a request in its client's place; the client is told. Returns False if there is no request of that id."""
        if (group := self.groups.get(request_id)) is not None:
            group.fail(Aborted())
        return group is not None

    async def order(self, message: messages.Flush | messages.Profile) -> str:
        """Have the engine do something between two steps. Returns what came of it.

        Raises `EngineDied`, `NotReady` and `EngineBusy`.
        """
        if self.died.done():
            raise self.death()
        if not self._ready.done():  # it could not be told yet, and the next order would get this one's answer
            raise NotReady("the engine is loading the model; try again in a moment")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        await self.send(message)
        await asyncio.wait((answer, self.died), timeout=_ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() and self.died.done():
            raise self.death()
        if not answer.done():
            raise EngineBusy(f"the engine is busy, and has not answered in {_ANSWER_S:g} s; it will do it between two steps")
        return answer.result()

    async def send(self, message: messages.ToEngine) -> None:
        """Send a message without waiting: the queue has no bound, and the engine bounds the requests."""
        if not self._link.closed:  # as it is for a request that outlives `stop`
            with contextlib.suppress(zmq.Again):
                await self._link.send(messages.encode(message), zmq.NOBLOCK)

    def fail_requests(self, error: Callable[[], EnginError]) -> None:
        """End all requests, each with an error of its own."""
        for group in set(self.groups.values()):
            group.fail(error())

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the process, by force after `grace_s`, and clean up. May be called twice."""
        if is_ready := self._ready.done():
            await self.send(messages.Stop())
        await self.child.end(politely=is_ready, grace_s=grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.child.close()
        self._link.context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)
        remove_left_folders()

    async def _listen(self) -> None:
        await self._link.poll()  # it has connected, and nobody else has to
        shutil.rmtree(self._directory, ignore_errors=True)  # where it would stay if this process was killed
        while True:
            frame = await self._link.recv()
            self.heard_s = time.monotonic()
            try:
                message = messages.decode_from_engine(frame)
            except (msgspec.DecodeError, EnginError) as error:
                _log.warning("a malformed frame of the engine's process was dropped: %s", error)
                continue
            self._handle(message)

    def _handle(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Outputs(outputs):
                self.progress.moved()
                _hand_out(outputs, self.groups, self.heard_s, self.meter)
            case messages.Heartbeat():
                self.stats, self.prepares = message.stats, message.prepares
                self.progress.completed(self.stats.num_steps)
            case messages.Queued(request_id=request_id) | messages.Rejected(request_id=request_id):
                if group := self.groups.get(request_id):
                    group.answer(message)
            case messages.Done(told):
                _settle(self._asked.popleft(), told)
            case messages.Loading(progress):
                self.loading = progress
            case messages.Ready():
                self.facts = message.facts
                _settle(self._ready, message)
            case messages.Failed():
                self._failed = message

    async def _watch(self) -> None:
        """Notice the end of the process, whatever it died of, and tell everybody who waits."""
        await until(lambda: not self.child.is_running)
        await asyncio.wait([self._relaying], timeout=_LAST_WORDS_S)  # a process of its own may keep its stderr open
        await asyncio.sleep(0.1)  # its last message is on the way
        await until(lambda: self._failed is not None, within_s=_LAST_WORDS_S if self.child.has_failed else 0)
        self.stats = of_ended(self.stats)
        self.died.set_result(self.child.epitaph(self._failed))
        self.fail_requests(self.death)

    def _ended_early(self, task: asyncio.Task[None]) -> None:
        """A bug that ends what listens or watches ends the process too: nobody would hear of it any more."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        why = f"its client failed with {type(error).__name__}: {error}"
        _log.error("the engine's process is killed: %s", why, exc_info=error)
        self._tasks.append(asyncio.create_task(self.child.give_up(why)))
        if task is self._watching:
            _settle(self.died, f"the engine's process was killed: {why}")
            self.fail_requests(self.death)

    def death(self) -> EngineDied:
        """The error to raise now that the process is dead; a fresh one for each who raises it."""
        kind = EngineRestarts if self._comes_back and self.facts is not None else EngineDied
        error = kind(self.died.result())
        error.exit_code = self._failed.exit_code if self._failed else 1
        return error


def _hand_out(outputs: Sequence[RequestOutput], groups: Mapping[str, Outputs], now_s: float, meter: RequestMeter) -> None:
    """Give each output to the group of its request; one that nobody waits for any more is dropped."""
    for output in outputs:
        if group := groups.get(output.request_id):
            group.put(output, now_s, meter)


def _settle(waiting: asyncio.Future[ResultT], result: ResultT) -> None:
    """Give a future its result, unless it has one or nobody waits for it any more."""
    if not waiting.done():
        waiting.set_result(result)
