"""The engine's process: take messages, step, publish. Started by `client`, with its boot frame on stdin.

It ends when told to, when the engine breaks, and when its parent is gone, however that died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import zmq

from enginery.child_process import die_with_parent, read_frame
from enginery.config.schema import EngineOptions, HostShare
from enginery.contracts.engine import BuildProgress, EngineLike, ReportProgress
from enginery.contracts.request import GenerationRequest, RequestOutput
from enginery.errors import EnginError, PluginError, QueueFull, RequestError
from enginery.plugin.registry import Registry
from enginery.serve.engine import messages

BuildEngine = Callable[[EngineOptions, Registry, ReportProgress], EngineLike]
Within = Callable[[EngineOptions, HostShare], EngineOptions]

_HEARTBEAT_S: Final = 0.2
_TAKING_S: Final = 0.005
_log: Final = logging.getLogger(__name__)


class EngineLoop:
    """Drives one engine from one socket."""

    def __init__(self, engine: EngineLike, link: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._link = link
        self._heartbeat_s = 0.0
        self._arrived: deque[GenerationRequest] = deque()  # of messages that were taken, before those that come

    def run(self) -> None:
        """Step and answer until told to stop. Blocks in the poll when there is nothing to do."""
        is_ready = False
        while self._take_messages(0 if self._engine.has_work or not is_ready else int(_HEARTBEAT_S * 1000)):
            if not self._engine.has_work:
                self._tell(messages.Heartbeat(self._engine.meter.stats(), prepares=True))
                was_ready, is_ready = is_ready, not self._engine.prepare()
                self._heartbeat_s = 0.0  # it is told at once that this is over
                if is_ready and not was_ready:
                    _keep_all_objects()
            else:
                outputs = self._answer(self._step())
                if outputs:
                    self._tell(messages.Outputs(outputs))
            if time.monotonic() - self._heartbeat_s >= _HEARTBEAT_S:
                self._heartbeat_s = time.monotonic()
                self._tell(messages.Heartbeat(self._engine.meter.stats()))

    def _step(self) -> list[RequestOutput]:
        """Run one step. If it fails, the requests in it end, and the engine goes on where it can."""
        try:
            return self._engine.step()
        except Exception as error:
            outputs = self._engine.recover(error)
            _log.exception("a step failed, and %d requests with it; the engine goes on", len(outputs))
            return outputs

    def _take_messages(self, timeout_ms: int) -> bool:
        """Handle the messages that are there, in order; wait `timeout_ms` for the first. Returns False when told to stop.

        While there is work to do, the next step is not held up for longer than one of them takes beyond `_TAKING_S`.
        """
        if not self._arrived and not self._link.poll(timeout_ms):
            return True
        until_s = time.monotonic() + _TAKING_S
        while self._arrived or self._link.poll(0):
            if self._arrived:
                self._submit(self._arrived.popleft())
            elif not self._take_one():
                return False
            if self._engine.has_work and time.monotonic() >= until_s:
                break
        return True

    def _take_one(self) -> bool:
        """Handle the next message, which is there. Returns False when told to stop."""
        try:
            message = messages.decode_to_engine(self._link.recv())
        except (msgspec.DecodeError, RequestError) as error:
            print(f"engine: a malformed frame was dropped: {error}", file=sys.stderr)
            return True
        match message:
            case messages.Submit():
                self._arrived.extend(message.whole())
            case messages.Abort(request_id):
                self._engine.abort(request_id)
            case messages.Flush():
                self._tell(messages.Done(f"{self._engine.flush_prefix_cache()} pages were freed"))
            case messages.Profile(num_steps):
                self._tell(messages.Done(f"the next {num_steps} steps go to {self._engine.meter.profile(num_steps)}"))
            case messages.Stop():
                return False
        return True

    def _submit(self, request: GenerationRequest) -> None:
        request_id = request.request_id
        try:
            self._engine.submit(request)
        except RequestError as error:
            full = isinstance(error, QueueFull)
            self._tell(messages.Rejected(request_id=request_id, message=str(error), param=error.param, is_queue_full=full))
        except PluginError as error:
            _log.exception("a request was refused")
            self._tell(messages.Rejected(request_id=request_id, message=str(error), param=None, is_fault=True))
        else:
            if request.params.grammar is None:
                self._tell(messages.Queued(request_id))

    def _answer(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Answer the requests that waited for their grammars. Returns the other outputs."""
        for output in outputs:
            if output.is_answer and output.error is None:
                self._tell(messages.Queued(output.request_id))
            elif output.is_answer:
                self._tell(
                    messages.Rejected(
                        request_id=output.request_id, message=str(output.error), param=output.param, is_overload=output.is_overload
                    )
                )
        return [output for output in outputs if not output.is_answer]

    def _tell(self, message: messages.FromEngine) -> None:
        self._link.send(messages.encode(message))


def run(build: BuildEngine, within: Within = lambda options, share: options, *, before: Callable[[], object] = lambda: None) -> int:
    """Run the process from its start to its end, and return its exit code. build: makes the engine; tests give a fake one.

    within: what the options are of an engine that has a share of the host. before: called before it is told what to do.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the parent drains, and decides when this process ends
    die_with_parent()
    os.dup2(2, 1)  # the parent passes stderr on and never waits to be read; who prints to its stdout might
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # what the watchdog sends to a loop that is stuck
    before()
    if (frame := read_frame(sys.stdin.buffer)) is None:
        return 1  # the parent found a mistake before
    boot = msgspec.msgpack.decode(frame, type=messages.Boot)
    logging.basicConfig(stream=sys.stderr, level=boot.log_level, format=f"{_name(boot.share)}: %(message)s")
    threading.Thread(target=_exit_when_stdin_ends, name="parent-watch", daemon=True).start()
    context = zmq.Context()
    link = context.socket(zmq.PAIR)
    link.set_hwm(0)
    link.connect(boot.endpoint)

    def report(progress: BuildProgress) -> None:
        link.send(messages.encode(messages.Loading(progress)))

    report(BuildProgress(phase="imports"))
    try:
        options = boot.options if boot.share is None else within(boot.options, boot.share)
        registry = Registry.replay(boot.manifest)
        engine = build(options, registry, report)
        link.send(messages.encode(messages.Ready(facts=engine.facts, manifest_digest=registry.manifest.digest())))
        EngineLoop(engine, link).run()
        return 0
    except Exception as error:  # the boundary of the process
        failed = _failure(error)
        if not failed.is_ours:
            traceback.print_exc()
        link.send(messages.encode(failed))
        return failed.exit_code
    finally:
        context.destroy(linger=2000)


def _keep_all_objects() -> None:
    """Leave the objects of a prepared engine out of later collections: a full one would stop all streams for some 0.1 s.

    Called in idle moments, again after a change of backends, whose first ones are garbage then.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _name(share: HostShare | None) -> str:
    return "engine" if share is None else f"replica {share.index}"


def _failure(error: Exception) -> messages.Failed:
    if isinstance(error, EnginError):
        return messages.Failed(message=str(error), exit_code=error.exit_code, is_ours=True)
    return messages.Failed(message="".join(traceback.format_exception_only(error)).strip(), exit_code=1, is_ours=False)


def _exit_when_stdin_ends() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def _build(options: EngineOptions, registry: Registry, report: ReportProgress) -> EngineLike:
    from enginery.engine.engine import Engine

    return Engine.build(options, registry, report, grammars=True)


def _within(options: EngineOptions, share: HostShare) -> EngineOptions:
    from enginery.worker.device import within_share

    return within_share(options, share)


def _import_engine() -> None:
    with contextlib.suppress(Exception):  # it is told when it is built
        import enginery.engine.engine  # noqa: F401 - takes longer than what the parent does until it says what to build


if __name__ == "__main__":
    sys.exit(run(_build, _within, before=_import_engine))
