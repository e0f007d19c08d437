"""The parent's end of the process that renders templates: a frame to it, a frame back, and never longer than allowed."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import weakref
from typing import Final

_COMMAND: Final = (sys.executable, "-P", "-m", "enginery.text.template_process")
_NOT_BY_ITSELF: Final = {0, *(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))}
_ENDS_WITHIN_S: Final = 5.0


class RendererDied(Exception):
    """It ended, or did not answer in time. by_itself: of what it was doing, as when it took more than its limits."""

    def __init__(self, message: str, *, by_itself: bool) -> None:
        super().__init__(message)
        self.by_itself = by_itself


class Renderer:
    """One process. After `RendererDied` it is of no use; `close` ends it, as does losing the last reference to it."""

    def __init__(self, first: bytes, *, within_s: float) -> None:
        """Started, and ready for frames. Raises `OSError` and `RendererDied`."""
        self._socket, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(self._socket.close)
            self._process = subprocess.Popen(_COMMAND, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL)
            on_failure.pop_all()
        self.close = weakref.finalize(self, _end, self._process, self._socket)
        try:
            self.exchange(first, within_s=within_s)
        except RendererDied:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether its process has, which is told at the next exchange otherwise."""
        return self._process.poll() is not None

    def exchange(self, frame: bytes, *, within_s: float) -> bytes:
        """Send a frame and wait for the answer. Raises `RendererDied`."""
        deadline_s = time.monotonic() + within_s
        try:
            self._socket.settimeout(within_s)
            self._socket.sendall(len(frame).to_bytes(8, "big") + frame)
            return self._read(int.from_bytes(self._read(8, deadline_s), "big"), deadline_s)
        except TimeoutError:
            raise RendererDied(f"no answer within {within_s:g} s", by_itself=False) from None
        except (OSError, EOFError):
            code = -signal.SIGKILL
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_ENDS_WITHIN_S)
            raise RendererDied(f"it ended with exit code {code}", by_itself=code not in _NOT_BY_ITSELF) from None
        except BaseException:  # Ctrl-C: what it has yet to say would be taken for the next answer
            self.close()
            raise

    def _read(self, size: int, deadline_s: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            part = self._socket.recv(min(size - len(found), 1 << 20))
            if not part:
                raise EOFError
            found += part
        return bytes(found)


def _end(process: subprocess.Popen[bytes], ours: socket.socket) -> None:
    process.kill()
    process.wait()
    ours.close()
