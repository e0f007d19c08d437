"""The counters of several engines as those of one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

from enginery.contracts.engine import DraftCounts, EngineStats, ExpertCounts, KernelState
from enginery.contracts.schedule import PageCounts, all_pages

CountsT = TypeVar("CountsT", EngineStats, DraftCounts)


def total(every: Sequence[EngineStats]) -> EngineStats:
    """All together. Of one engine it is what that engine said."""
    if len(every) == 1:
        return every[0]
    return dataclasses.replace(
        _summed(every),
        steps_by_size=_by_place(stats.steps_by_size for stats in every),
        attn_backend="+".join(sorted({stats.attn_backend for stats in every} - {""})),
        steps_by_backend=dict(sum((Counter(stats.steps_by_backend) for stats in every), Counter[str]())),
        kernels=_kernels([stats.kernels for stats in every]),
        pages=all_pages([stats.pages for stats in every]),
        lanes=tuple(lane for stats in every for lane in stats.lanes),
        drafts=_drafts([stats.drafts for stats in every]),
        experts=_experts(every),
    )


def of_ended(stats: EngineStats) -> EngineStats:
    """What is left of an engine whose process has ended: its counters. It has no requests and no memory, and compiles nothing."""
    pages = {kind: PageCounts(free=0, cached=0, total=counts.total, evicted=counts.evicted) for kind, counts in stats.pages.items()}
    left = dataclasses.replace(stats, num_running=0, num_waiting=0, free_pages=0, cached_pages=0)
    return dataclasses.replace(left, pages=pages, lanes=(), kernels=KernelState())


def _summed(every: Sequence[CountsT]) -> CountsT:
    names = [field.name for field in dataclasses.fields(every[0]) if field.type in ("int", "float")]
    return dataclasses.replace(every[0], **{name: sum(vars(counts)[name] for counts in every) for name in names})


def _by_place(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))


def _kernels(every: Sequence[KernelState]) -> KernelState:
    names = dict.fromkeys(name for state in every for name in state.compiling)
    seconds, failures = max(state.seconds for state in every), (state.failure for state in every if state.failure)
    return KernelState(compiling=tuple(names), seconds=seconds, failure=next(failures, ""))


def _experts(every: Sequence[EngineStats]) -> ExpertCounts:
    by_rank = _by_place(stats.experts.by_rank for stats in every)
    return ExpertCounts(by_rank=by_rank, busiest=sum(stats.experts.busiest for stats in every))


def _drafts(every: Sequence[DraftCounts]) -> DraftCounts:
    failure = next((counts.failure for counts in every if counts.failure), "")
    return dataclasses.replace(_summed(every), by_position=_by_place(counts.by_position for counts in every), failure=failure)
