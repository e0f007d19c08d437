"""The memory of the host. Imports nothing slow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = ("memory.max", "memory.current", "inactive_file")


def available_host_bytes(root: Path = Path("/")) -> int:
    """What may be taken now without swapping, within what this process's control groups (cgroups) may have. root: for tests."""
    return max(1, min((_free_bytes(root), *_left_in_groups(root))))


def _free_bytes(root: Path) -> int:
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_groups(root: Path) -> Iterator[int]:
    """What is left of each limit: of the process's groups and those that they are in. What cannot be read is no limit.

    A container may see the names of its groups outside, and only its own folder: then the parents lead to that.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            mount, files = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, files = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        path = PurePosixPath(name)
        for group in (path, *path.parents):
            with contextlib.suppress(OSError, ValueError, KeyError):  # ValueError: "max", which is none
                yield _left(mount / group.relative_to("/"), *files)


def _left(group: Path, limit: str, usage: str, cache: str) -> int:
    """Of a group's limit. cache: in memory.stat, the part of the usage that is files which were not read lately: it can be had."""
    stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / limit).read_text()) - int((group / usage).read_text()) + int(stats[cache])
