"""The ranks of one host: a process each, with its boot frame on stdin, its stderr passed on, its end explained."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import IO, Final

from enginery.child_process import begin, how_it_ended, write_frame
from enginery.contracts.parallel import Death

COMMAND: Final = (sys.executable, "-P", "-m", "enginery.engine.ranks.process")
_LAST_LINES: Final = 12
_LAST_WORDS_S: Final = 1.0


class LocalRanks:
    """Implements `RunningRanks` by processes of this host."""

    def __init__(self, commands: Sequence[Sequence[str]], *, first: int = 1, is_elsewhere: bool = False) -> None:
        """commands: of ranks first .. N. is_elsewhere: the engine does not see this stderr, so it is told the last lines."""
        self._first, self._is_elsewhere = first, is_elsewhere
        self._processes = [begin(command) for command in commands]
        self._said: list[deque[str]] = [deque(maxlen=_LAST_LINES) for _ in commands]
        self._told: set[int] = set()
        self._relays = [
            threading.Thread(target=_relay, args=(process.stderr, rank, said), name=f"rank {rank} stderr", daemon=True)
            for rank, (process, said) in enumerate(zip(self._processes, self._said, strict=True), start=first)
        ]
        for relay in self._relays:
            relay.start()

    def boot(self, rank: int, frame: bytes) -> None:
        write_frame(self._processes[rank - self._first].stdin, frame)

    def name(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes[rank - self._first].pid})"

    def poll(self) -> list[Death]:
        deaths = []
        for rank, process in enumerate(self._processes, start=self._first):
            if rank not in self._told and (code := process.poll()) is not None:
                self._told.add(rank)
                self._relays[rank - self._first].join(_LAST_WORDS_S)  # a process of its own may keep its stderr open
                said = tuple(self._said[rank - self._first]) if self._is_elsewhere else ()
                deaths.append(Death(rank, code if code >= 0 else 128 - code, how_it_ended(code), said))
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
        end_s = time.monotonic() + grace_s  # of all together
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end_s - time.monotonic()))
            process.kill()
            process.wait()
        for relay in self._relays:
            relay.join(_LAST_WORDS_S)


def _relay(stderr: IO[bytes], rank: int, said: deque[str]) -> None:
    with stderr:
        for line in stderr:
            text = line.decode(errors="replace").rstrip("\n")
            said.append(text)
            print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
