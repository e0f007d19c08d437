"""Ports for tests that must name one before they listen at it."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int = 1) -> int:
    """The first of `count` free ports in a row. Below those that the kernel gives to whoever asks for any, so that no
    connection of another process takes one before the test does."""
    end = min(int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768, 32768)
    while True:
        first = random.randrange(10000, end - count)
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return first
