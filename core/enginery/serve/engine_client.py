"""The HTTP front's end of the engine's process: start it, send requests, hand out what comes back, notice when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from enginery.config.schema import EngineOptions
from enginery.contracts.engine import EngineFacts
from enginery.contracts.request import GenerationRequest, RequestOutput
from enginery.errors import ConfigError, EngineDied, EnginError, QueueFull, RequestError
from enginery.plugin.manifest import Manifest
from enginery.serve import messages
from enginery.serve.faults import ShuttingDown

ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", "enginery.serve.engine_process")
_SILENCE_S: Final = 60.0
_STDERR_CHARS: Final = 4096
_log = logging.getLogger(__name__)


class EngineState(StrEnum):
    """Of the engine's process. SILENT: it lives, but its loop has not gone round for a minute. STOPPING: no request is taken."""

    LOADING = "loading"
    READY = "ready"
    SILENT = "silent"
    STOPPING = "stopping"
    DEAD = "dead"


class Outputs:
    """What comes of a group of requests that were sent together; iterate until all have finished."""

    def __init__(self, client: EngineClient, requests: Sequence[GenerationRequest]) -> None:
        self._client = client
        self.open = {request.request_id for request in requests}
        self.answers: asyncio.Queue[messages.Accepted | EnginError] = asyncio.Queue()
        self.outputs: asyncio.Queue[RequestOutput | EnginError] = asyncio.Queue()

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises `EngineDied`."""
        while self.open:
            output = await self.outputs.get()
            if isinstance(output, EnginError):
                raise output
            if output.request_id in self.open:
                if output.finish_reason is not None or output.error is not None:
                    self.open.discard(output.request_id)
                return output
        raise StopAsyncIteration

    async def abort(self, request_id: str) -> None:
        """Nothing more comes of this request."""
        if request_id in self.open:
            self.open.discard(request_id)
            await self._client.send(messages.Abort(request_id))

    async def accepted(self) -> None:
        """Wait for the answer to one submit. Raises what it was rejected with."""
        answer = await self.answers.get()
        if isinstance(answer, EnginError):
            raise answer


class EngineClient:
    """One engine in a process of its own. Made and used inside one event loop, on a thread that outlives it.

    is_stopping: set it, and no more requests are taken; those that run go on.
    """

    def __init__(self, directory: Path, process: subprocess.Popen[bytes], link: zmq.asyncio.Socket) -> None:
        self._directory = directory
        self._process = process
        self._link = link
        self._groups: dict[str, Outputs] = {}
        self._stderr_tail = ""
        self.is_stopping = False
        self._failed: messages.Failed | None = None
        self._heard_s = time.monotonic()
        self._ready: asyncio.Future[messages.Ready] = asyncio.get_running_loop().create_future()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(work) for work in (self._listen(), self._relay_stderr(), self._watch())]

    @classmethod
    async def start(cls, options: EngineOptions, manifest: Manifest, *, command: Sequence[str] = ENGINE_COMMAND) -> EngineClient:
        """Start the process; it is loading when this returns."""
        directory = Path(tempfile.mkdtemp(prefix="enginery-"))  # mode 0700
        endpoint = f"ipc://{directory / 'engine'}"
        link = zmq.asyncio.Context().socket(zmq.PAIR)
        link.set_hwm(0)
        try:
            link.bind(endpoint)
        except zmq.ZMQError as error:
            link.context.destroy(linger=0)
            directory.rmdir()
            raise ConfigError(f"{endpoint} cannot be a socket: {error}; set TMPDIR to another, shorter path") from error
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        boot = messages.encode(messages.Boot(endpoint=endpoint, options=options, manifest=manifest))
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; the watch tells why
            process.stdin.write(len(boot).to_bytes(8, "big") + boot)
            process.stdin.flush()
        return cls(directory, process, link)

    @property
    def state(self) -> EngineState:
        """What `/health` answers by."""
        if self.died.done():
            return EngineState.DEAD
        if self.is_stopping:
            return EngineState.STOPPING
        if not self._ready.done():
            return EngineState.LOADING
        return EngineState.READY if time.monotonic() - self._heard_s < _SILENCE_S else EngineState.SILENT

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def ready(self, manifest_digest: str | None = None) -> EngineFacts:
        """Wait until the engine stands. Raises `EngineDied`, with the exit code of the child's error, when it does not."""
        await asyncio.wait((self._ready, self.died), return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise self.death()
        said = self._ready.result()
        if manifest_digest not in (None, said.manifest_digest):
            raise EngineDied("the engine's process loaded other plugins than this one; report it")
        return said.facts

    @contextlib.asynccontextmanager
    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Outputs]:
        """Send requests; inside, all are queued. On leaving, whatever has not finished is aborted.

        Raises `RequestError`, `QueueFull` if one is rejected (then none runs), `EngineDied` and `ShuttingDown`.
        """
        if self.died.done():
            raise self.death()
        if self.is_stopping:
            raise ShuttingDown
        group = Outputs(self, requests)
        self._groups |= dict.fromkeys(group.open, group)
        try:
            for request in requests:
                await self.send(messages.Submit(request))
            for _ in requests:
                await group.accepted()
            yield group
        finally:
            for request in requests:
                self._groups.pop(request.request_id, None)
            for request_id in tuple(group.open):
                await group.abort(request_id)

    async def send(self, message: messages.ToEngine) -> None:
        """Never waits: the queue is unbounded, and the engine bounds the requests. Without a peer there is nobody to tell."""
        if not self._link.closed:  # as it is for a request that outlives `stop`
            with contextlib.suppress(zmq.Again):
                await self._link.send(messages.encode(message), zmq.NOBLOCK)

    def fail_requests(self, error: Callable[[], EnginError]) -> None:
        """End everything that runs, each with an error of its own."""
        for group in set(self._groups.values()):
            group.answers.put_nowait(error())
            group.outputs.put_nowait(error())

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the process, by force after `grace_s`, and clean up. May be called twice."""
        if self._process.poll() is None:
            if self._ready.done():
                await self.send(messages.Stop())
            else:
                self._process.terminate()
            await _ended(self._process, grace_s)
        if self._process.poll() is None:
            self._process.kill()
            await _ended(self._process, grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in (self._process.stdin, self._process.stderr):
            if stream is not None:
                stream.close()
        self._link.context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _listen(self) -> None:
        while True:
            frame = await self._link.recv()
            self._heard_s = time.monotonic()
            try:
                message = messages.decode_from_engine(frame)
            except (msgspec.DecodeError, EnginError) as error:
                _log.warning("a malformed frame of the engine's process was dropped: %s", error)
                continue
            self._handle(message)

    def _handle(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Outputs(outputs):
                for output in outputs:
                    if group := self._groups.get(output.request_id):
                        group.outputs.put_nowait(output)
            case messages.Accepted(request_id):
                if group := self._groups.get(request_id):
                    group.answers.put_nowait(message)
            case messages.Rejected(request_id=request_id):
                if group := self._groups.get(request_id):
                    group.open.discard(request_id)
                    kind = QueueFull if message.is_queue_full else RequestError
                    group.answers.put_nowait(kind(message.message, param=message.param))
            case messages.Ready() if not self._ready.done():
                self._ready.set_result(message)
            case messages.Failed():
                self._failed = message

    async def _relay_stderr(self) -> None:
        """Pass the child's stderr on, and keep its end."""
        assert self._process.stderr is not None
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stderr
        )
        with contextlib.closing(transport):
            while chunk := await reader.read(1 << 16):
                text = chunk.decode(errors="replace")
                self._stderr_tail = (self._stderr_tail + text)[-_STDERR_CHARS:]
                print(text, file=sys.stderr, end="", flush=True)

    async def _watch(self) -> None:
        """Notice the end of the process, whatever it died of, and tell everybody who waits."""
        while self._process.poll() is None:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)  # its last words are on the way
        self.died.set_result(self._epitaph())
        self.fail_requests(self.death)

    def death(self) -> EngineDied:
        """The error to raise now that the process is dead; a fresh one for each who raises it."""
        error = EngineDied(self.died.result())
        error.exit_code = self._failed.exit_code if self._failed else 1
        return error

    def _epitaph(self) -> str:
        if self._failed is not None:
            return self._failed.message if self._failed.is_ours else f"the engine broke: {self._failed.message}"
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        tail = self._stderr_tail.strip()
        return f"the engine's process {how}" + (f"\nThe last it said:\n{tail}" if tail else " without a word")


async def _ended(process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
