"""The engine's process as its parent holds it: started with a boot frame, its stderr passed on, its end explained."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from enginery.serve import messages

_STDERR_CHARS: Final = 4096


def pass_on(text: str) -> None:
    """Print what the child wrote to stderr, as it is."""
    print(text, file=sys.stderr, end="", flush=True)


class EngineChild:
    """One process. relay: gets what it writes to stderr."""

    def __init__(self, command: Sequence[str], boot: messages.Boot, relay: Callable[[str], None]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        self._relay = relay
        self._stderr_tail = ""
        frame = messages.encode(boot)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; the watch tells why
            self._process.stdin.write(len(frame).to_bytes(8, "big") + frame)
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error, by itself."""
        return (self._process.poll() or 0) > 0

    async def relay_stderr(self) -> None:
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
                self._relay(text)

    def dump_stacks(self) -> None:
        """Have it write the stacks of its threads to stderr, even if it is stuck."""
        if self.is_running:
            self._process.send_signal(signal.SIGUSR1)

    async def end(self, *, politely: bool, grace_s: float) -> None:
        """Wait for its end, by force after `grace_s`. politely: it has been asked already."""
        if not politely and self.is_running:
            self._process.terminate()
        await self._ended(grace_s)
        if self.is_running:
            self._process.kill()
            await self._ended(grace_s)

    def close(self) -> None:
        """After `relay_stderr` was cancelled."""
        for stream in (self._process.stdin, self._process.stderr):
            if stream is not None:
                stream.close()

    def epitaph(self, failed: messages.Failed | None) -> str:
        """What it ended of. failed: what it said itself, if it did."""
        if failed is not None:
            return failed.message if failed.is_ours else f"the engine broke: {failed.message}"
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        tail = self._stderr_tail.strip()
        return f"the engine's process {how}" + (f"\nThe last it said:\n{tail}" if tail else " without a word")

    async def _ended(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.is_running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
