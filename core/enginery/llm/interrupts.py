"""Ctrl-C between steps: never amid one, where what the host knows of requests and pages is half written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_later() -> Iterator[None]:
    """A first Ctrl-C is heard when the block has ended, a second one at once: by then the block may hang.

    Only the main thread hears signals; on others, and where somebody has Python leave SIGINT alone, nothing changes.
    """
    usual = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(usual):
        yield
        return
    heard: list[tuple[int, FrameType | None]] = []

    def later(number: int, frame: FrameType | None) -> None:
        heard.append((number, frame))
        if len(heard) > 1:
            usual(number, frame)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if len(heard) == 1:
            usual(*heard[0])
