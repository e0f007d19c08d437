"""The memory of the host. Imports nothing slow."""

from __future__ import annotations

import os
from pathlib import Path


def available_host_bytes() -> int:
    """What may be taken now without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
