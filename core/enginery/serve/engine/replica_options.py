"""What each of several engines behind one front is asked for: the same, but for what only one of them can have."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

from enginery.config.host_memory import available_host_bytes
from enginery.config.schema import EngineOptions, HostShare


def replica_options(asked: EngineOptions, count: int) -> list[tuple[EngineOptions, HostShare | None]]:
    """Of each, with its share of the host. One alone has what was asked for, and no share."""
    if count == 1:
        return [(asked, None)]
    if asked.num_ranks * count > (cores := os.cpu_count() or 1):
        logging.warning("%d engines of %d processes each share %d cores; fewer may be faster", count, asked.num_ranks, cores)
    host_bytes = available_host_bytes()
    return [(_of(asked, index), HostShare(index=index, count=count, host_bytes=host_bytes)) for index in range(count)]


def _of(asked: EngineOptions, index: int) -> EngineOptions:
    steps = asked.record_steps
    return dataclasses.replace(
        asked,
        dp_rank=asked.dp_rank + index,
        profile_file=_numbered(asked.profile_file, index),
        record_steps=None if steps is None else (steps[0], _numbered(steps[1], index)),
    )


def _numbered(file: str, index: int) -> str:
    """`steps.json` of replica 1 is `steps-1.json`."""
    path = Path(file)
    return str(path.with_name(f"{path.stem}-{index}{path.suffix}"))
