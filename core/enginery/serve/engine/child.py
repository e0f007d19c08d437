"""The engine's process as its parent holds it: started with a boot frame, its stderr passed on, its end explained."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from enginery.child_process import how_it_ended, write_frame
from enginery.serve.engine import messages

_LOOK_AGAIN_S: Final = 0.05
_GIVEN_UP_S: Final = 5.0
_LINE_BYTES: Final = 1 << 16  # a longer one is cut


def pass_on(text: str) -> None:
    """Print what the child wrote to stderr, as it is."""
    print(text, file=sys.stderr, end="", flush=True)


async def until(condition: Callable[[], bool], *, within_s: float = math.inf) -> None:
    """Wait until the condition holds, or `within_s` seconds have passed. It is looked at every 50 ms."""
    deadline_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline_s:
        await asyncio.sleep(_LOOK_AGAIN_S)


class EngineChild:
    """One process of the engine, which waits for its boot frame. relay: called with what it writes to stdout and stderr."""

    def __init__(self, process: subprocess.Popen[bytes], boot: messages.Boot, relay: Callable[[str], None]) -> None:
        self._process = process
        self.relay = relay
        self._given_up_for: str | None = None
        write_frame(self._process.stdin, messages.encode(boot))

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error, by itself."""
        return (self._process.poll() or 0) > 0

    async def relay_stderr(self) -> None:
        """Pass the child's stderr on, to its end, in whole lines: what is cut has characters cut too."""
        assert self._process.stderr is not None
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stderr
        )
        left = b""
        try:
            while chunk := await reader.read(_LINE_BYTES):
                left += chunk
                end = max(left.rfind(b"\n"), left.rfind(b"\r")) + 1  # a bar that shows progress has no other ends
                if end or len(left) > _LINE_BYTES:
                    end = end or len(left)
                    self.relay(left[:end].decode(errors="replace"))
                    left = left[end:]
        finally:
            self.relay(left.decode(errors="replace"))
            transport.close()

    def dump_stacks(self) -> None:
        """Have it write the stacks of its threads to stderr, even if it is stuck."""
        if self.is_running:
            self._process.send_signal(signal.SIGUSR1)

    async def give_up(self, why: str) -> None:
        """Kill it; `why` is then how it ended."""
        self._given_up_for = why
        await self.end(politely=False, grace_s=_GIVEN_UP_S)

    async def end(self, *, politely: bool, grace_s: float) -> None:
        """Wait for its end, and kill it after `grace_s`. politely: it was asked to stop; if not, kill it at once."""
        if politely:
            await until(lambda: not self.is_running, within_s=grace_s)
        if self.is_running:
            self._process.kill()
            await until(lambda: not self.is_running, within_s=grace_s)

    def close(self) -> None:
        """Close the pipes to the process; only after `relay_stderr` was cancelled."""
        for stream in (self._process.stdin, self._process.stderr):
            if stream is not None:
                stream.close()

    def epitaph(self, failed: messages.Failed | None) -> str:
        """Why the process ended, in one line unless it said more itself (`failed`). Its stderr has been passed on before."""
        if failed is not None:
            return failed.message if failed.is_ours else f"the engine broke: {failed.message}"
        if self._given_up_for is not None:
            return f"the engine's process was killed: {self._given_up_for}"
        return f"the engine's process {how_it_ended(self._process.returncode)}"
