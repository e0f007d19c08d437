"""The ranks of one host: a process each, with its boot frame on stdin, its stderr passed on, its end explained."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Final, NamedTuple, Protocol

COMMAND: Final = (sys.executable, "-P", "-m", "enginery.engine.ranks.process")
_LAST_LINES: Final = 12
_LAST_WORDS_S: Final = 1.0


class Death(NamedTuple):
    """A rank whose process has ended. how: for people. last_lines: of what it wrote to stderr."""

    rank: int
    exit_code: int
    how: str
    last_lines: tuple[str, ...]


class RunningRanks(Protocol):
    """The processes of ranks 1 .. N, wherever they are."""

    def boot(self, rank: int, frame: bytes) -> None:
        """Give a rank its boot frame."""
        ...

    def name(self, rank: int) -> str:
        """What people find it by."""
        ...

    def poll(self) -> list[Death]:
        """Those that have ended since the last call."""
        ...

    def dump_stacks(self) -> None:
        """Have all write the stacks of their threads to stderr, even if they are stuck."""
        ...

    def end(self, *, grace_s: float) -> None:
        """Wait so long for them to end by themselves, then kill them."""
        ...


Launch = Callable[[int], RunningRanks]  # ranks 1 .. so many; the thread that calls it lives as long as they do


class LocalRanks:
    """Implements `RunningRanks` by processes of this host."""

    def __init__(self, count: int) -> None:
        self._processes = [subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(count)]
        self._said: list[deque[str]] = [deque(maxlen=_LAST_LINES) for _ in range(count)]
        self._told: set[int] = set()
        self._relays = [
            threading.Thread(target=_relay, args=(process.stderr, rank, said), name=f"rank {rank} stderr", daemon=True)
            for rank, (process, said) in enumerate(zip(self._processes, self._said, strict=True), start=1)
        ]
        for relay in self._relays:
            relay.start()

    def boot(self, rank: int, frame: bytes) -> None:
        stdin = self._processes[rank - 1].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; `poll` tells why
            stdin.write(len(frame).to_bytes(8, "big") + frame)
            stdin.flush()

    def name(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes[rank - 1].pid})"

    def poll(self) -> list[Death]:
        deaths = []
        for rank, process in enumerate(self._processes, start=1):
            if rank not in self._told and (code := process.poll()) is not None:
                self._told.add(rank)
                self._relays[rank - 1].join(_LAST_WORDS_S)  # a process of its own may keep its stderr open
                deaths.append(Death(rank, abs(code), _how(code), tuple(self._said[rank - 1])))
        return deaths

    def dump_stacks(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)

    def end(self, *, grace_s: float) -> None:
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            process.kill()
            process.wait()
        for relay in self._relays:
            relay.join(_LAST_WORDS_S)


def _relay(stderr: IO[bytes], rank: int, said: deque[str]) -> None:
    """Pass on what a rank writes, to its end."""
    with stderr:
        for line in stderr:
            text = line.decode(errors="replace").rstrip("\n")
            said.append(text)
            print(f"rank {rank}: {text}", file=sys.stderr, flush=True)


def _how(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, as the kernel does when memory runs out; dmesg tells if it was that"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
