"""What a scheduling policy sees, and what one step did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from enginery.contracts.versions import ApiVersion


@dataclass(frozen=True, kw_only=True)
class QueuedFacts:
    """A waiting request as a policy sees it. arrival_s: monotonic clock. num_tokens: prompt and what was generated before.

    salt: its `cache_salt`, which those who share a server may have one each of. options: an instance of the policy's dataclass of
    options, None if it has none.
    """

    request_id: str
    priority: int
    arrival_s: float
    num_tokens: int
    salt: str = ""
    options: object = None


@dataclass(frozen=True, kw_only=True)
class PageCounts:
    """The pages of one kind of memory. cached: of the prefix cache, in use by requests or not. held: in use by requests.

    evicted: that the prefix cache gave up so far because this kind had too few free ones, or when it was flushed.
    """

    free: int
    cached: int
    total: int
    held: int = 0
    evicted: int = 0


def all_pages(every: Sequence[Mapping[str, PageCounts]]) -> dict[str, PageCounts]:
    """Of several owners of pages together, by kind of memory."""
    kinds = dict.fromkeys(kind for pages in every for kind in pages)
    names = [field.name for field in fields(PageCounts)]
    of_kind = {kind: [vars(pages[kind]) for pages in every if kind in pages] for kind in kinds}
    return {kind: PageCounts(**{name: sum(each[name] for each in found) for name in names}) for kind, found in of_kind.items()}


@dataclass(frozen=True, kw_only=True)
class LaneCounts:
    """One of several lanes: its requests, and its pages by kind of memory."""

    num_running: int
    num_waiting: int
    pages: Mapping[str, PageCounts]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step did; given to `observe_step`.

    step: counts from 0. free_pages, cached_pages, total_pages: of all kinds of memory together; pages: of each. captured: a CUDA
    graph ran it. The times are of the host: schedule, build and plan, and until the results were there.
    """

    step: int
    num_running: int
    num_waiting: int
    num_tokens: int
    num_prefill_tokens: int
    num_preempted: int
    free_pages: int
    cached_pages: int
    total_pages: int
    attn_backend: str
    captured: bool
    schedule_s: float
    plan_s: float
    run_s: float
    pages: Mapping[str, PageCounts] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SchedulePolicySpec:
    """An order among waiting requests: the smallest key is admitted first. Ties go to the earlier arrival.

    options: a frozen dataclass of what `-o NAME.key=value` sets, for `QueuedFacts.options`; None: it has none.
    """

    name: str
    api: ApiVersion
    key: Callable[[QueuedFacts], tuple[float, ...]]
    summary: str
    options: type | None = None
