"""A process and the one that started it: frames between them, how it ends with the other, what it leaves, how its end is told."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

_PR_SET_PDEATHSIG: Final = 1
ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", "enginery.serve.engine.process")
Begun = list[subprocess.Popen[bytes]]


def begin(command: Sequence[str] = ENGINE_COMMAND) -> subprocess.Popen[bytes]:
    """Start a process that a frame will tell what to do. It may import until then. Ctrl-C in a terminal is for its parent alone."""
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def take(begun: Begun, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """One that was begun, by this command, or another."""
    return begun.pop() if begun else begin(command)


@contextlib.contextmanager
def begun_ahead(command: Sequence[str] = ENGINE_COMMAND) -> Iterator[Begun]:
    """One that was begun. It is killed at the end, unless somebody took it."""
    waiting = [begin(command)]
    try:
        yield waiting
    finally:
        for process in waiting:
            with process:
                process.kill()


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends, even in a device call. Elsewhere a watch on stdin must."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def write_frame(pipe: IO[bytes] | None, frame: bytes) -> None:
    """To a child's stdin, or a child's answer. Who has ended takes nothing; who watches it tells why."""
    assert pipe is not None, "the child was started with a pipe"
    with contextlib.suppress(BrokenPipeError):
        pipe.write(len(frame).to_bytes(8, "big") + frame)
        pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """What the other wrote by `write_frame`; None when it has closed the pipe, or ended."""
    size = pipe.read(8)
    return pipe.read(int.from_bytes(size, "big")) if len(size) == 8 else None


def remove_left_folders() -> None:
    """Those of ranks' sockets whose engine was killed: nobody holds them (`HostWires`)."""
    for socket in Path(tempfile.gettempdir()).glob("enginery-*/reports"):
        with contextlib.suppress(OSError), (socket.parent / "held").open() as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(socket.parent)


def how_it_ended(code: int) -> str:
    """What comes after the name of a process that ended with this code of `subprocess`."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, as the kernel does when memory runs out; dmesg tells if it was that"
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")  # real-time ones have no names
    return f"was killed by {name}" if code < 0 else f"ended with exit code {code}"
