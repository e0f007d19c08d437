"""Beginning with attention backends that need nothing compiled, and changing over to the chosen ones when their kernels are there.

engine     steps with the first backends .................. | the change | steps with the chosen ones
process    compiles what is missing ...............|        ^
thread                                     builds the chosen backends: all but the change is off the engine's thread
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from enginery.attention.relay import BackendRelay
from enginery.contracts.engine import KernelState
from enginery.engine.compile_process import CompileProcess
from enginery.plugin.registry import Registry
from enginery.worker.choice import Choice
from enginery.worker.runner import Runner
from enginery.worker.warm_up import warm_up

_LONGEST_TRIED: Final = 64  # tokens of the steps that are run before a request is
_log: Final = logging.getLogger(__name__)


class Changeover:
    """Compiles from the moment it is made. running: the attention backends that run now. stop: ends the process that compiles.

    build: makes the chosen ones; called once, in a thread, when all is compiled. Should compiling fail, or what was compiled, the
    engine stays with what it has, and the log says why.
    """

    def __init__(self, registry: Registry, choice: Choice, *, build: Callable[[], BackendRelay]) -> None:
        self._build = build
        wishes, first = choice.to_compile, choice.first_attention
        assert first is not None, "there is something to change from"
        self.running = first.name
        self._chosen = choice.attention.name
        self._began_s = self._ended_s = time.monotonic()
        self._names = tuple(name for wish in wishes for name in wish.missing)
        self._backends = " and ".join(wish.backend for wish in wishes)
        self._built: BackendRelay | None = None
        self._failure = ""
        self._process = CompileProcess(registry, [(wish.backend, wish.needs) for wish in wishes])
        self.stop = self._process.stop
        _log.info("%d kernels of %s are compiled beside the engine: %s", len(self._names), self._backends, ", ".join(self._names))
        threading.Thread(target=self._run, name="kernels", daemon=True).start()

    @property
    def is_ready(self) -> bool:
        return self._built is not None

    def change(self, runner: Runner) -> None:
        """Have the runner go on with the chosen backends, or, should these fail in steps of nobody's requests, with what it has.

        No step may be in flight. Takes as long as some small steps.
        """
        relay, self._built = self._built, None
        assert relay is not None, "is_ready says when"
        began, socket = time.monotonic(), runner.parts.socket
        socket.relay, first = relay, socket.relay
        try:
            warm_up(runner.parts, longest=_LONGEST_TRIED)
            runner.backend_changed()
        except Exception as error:  # of plugins; if the device is lost, the first backends fail here too
            socket.relay = first
            runner.backend_changed()
            self._stay(error)
            return
        self.running = self._chosen
        self._names, self._ended_s = (), time.monotonic()
        _log.info("attention is %s from now on; changing over took %.2f s", self.running, self._ended_s - began)

    @property
    def state(self) -> KernelState:
        until = time.monotonic() if self._names else self._ended_s
        return KernelState(compiling=self._names, failure=self._failure, seconds=until - self._began_s)

    def _run(self) -> None:
        try:
            self._process.wait()
            _log.info("the kernels of %s were compiled after %.0f s", self._backends, time.monotonic() - self._began_s)
            self._built = self._build()
        except Exception as error:  # of compilers and plugins; whoever waits for an answer has one without them
            self._stay(error)

    def _stay(self, error: Exception) -> None:
        self._names, self._ended_s = (), time.monotonic()
        self._failure = f"{type(error).__name__}: {error}"
        _log.warning("the engine stays with the attention backends that it began with: %s", self._failure)
