"""What each of several engines behind one front is asked for: the same, but for what only one of them can have."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

from enginery.config.host_memory import available_host_bytes
from enginery.config.schema import EngineOptions, HostShare
from enginery.contracts.parallel import ExecutorSpec
from enginery.plugin.registry import Registry


def replica_options(asked: EngineOptions, count: int, registry: Registry) -> list[tuple[EngineOptions, HostShare | None]]:
    """Of each, with its share of the host. One alone has what was asked for, and no share."""
    if count == 1:
        return [(asked, None)]
    here = asked.num_ranks if registry.named(ExecutorSpec, asked.executor, "executor").spec.listen is None else 1
    if here * count > (cores := os.cpu_count() or 1):
        logging.warning("%d engines of %d processes each share %d cores; fewer may be faster", count, here, cores)
    share = HostShare(index=0, count=count, num_ranks=here, host_bytes=available_host_bytes())
    return [(_of(asked, index), dataclasses.replace(share, index=index)) for index in range(count)]


def _of(asked: EngineOptions, index: int) -> EngineOptions:
    return dataclasses.replace(
        asked,
        dp_rank=asked.dp_rank + index,
        profile_file=_numbered(asked.profile_file, index),
        record_steps=None if asked.record_steps is None else (asked.record_steps[0], _numbered(asked.record_steps[1], index)),
    )


def _numbered(file: str, index: int) -> str:
    """`steps.json` of replica 1 is `steps-1.json`."""
    return str(Path(file).with_stem(f"{Path(file).stem}-{index}"))
