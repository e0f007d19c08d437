"""What `kinds_hour.py` counts.

A second (`Second`) is what the engine tells of its pages and how many it evicted, and what only this script knows:

- stranded: cached pages of FULL that no resume point is at or behind, so that no prompt can use them.
- live: resume points that were given up for want of pages of a kind, and that a later prompt would have gone on from: it has the
  prefix of such a point, and was resumed before it. Of several the last one counts, at the second in which it was given up.

A kind idles in a second if more than `IDLE` of its pages are free; FULL also if they are free or stranded (`idle_or_stranded`).
Counted is the part of all seconds in which a kind idles while another one gives up live prefixes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from kinds_hour_engines import AnyEngine

from enginery.contracts.batch import FULL
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import PrefixNode, RadixPrefixCache
from enginery.kv.resume import ResumePoint

PAGE, IDLE = 16, 0.3


@dataclass(slots=True)
class GivenUp:
    """A resume point that was given up in that second for want of pages of this kind."""

    second: int
    kind: str
    position: int


class Watch:
    """Told by a prefix cache what comes and goes (`PrefixWatcher`). Prefixes of whole pages are known by hashes.

    second: now. live: by kind, in which seconds it gave up prefixes that were asked for later.
    """

    def __init__(self, cache: RadixPrefixCache) -> None:
        self.second = 0
        self.live: dict[str, Counter[int]] = {}
        self.num_given_up: Counter[str] = Counter()
        self._kind: str | None = None
        self._hash_of_page: dict[int, int] = {}
        self._hash_of_point: dict[ResumePoint, int] = {}
        self._gone: dict[int, GivenUp] = {}
        assert cache.points is not None
        cache._watcher, cache.points._given_up = self, self.given_up
        self._evict_full, self._evict_points = cache.evict, cache.points.evict
        cache.evict, cache.points.evict = self._evict, self._evict_other  # type: ignore[method-assign]

    def _evict(self, num_pages: int) -> int:
        self._kind = FULL
        freed = self._evict_full(num_pages)
        self._kind = None
        return freed

    def _evict_other(self, kind: str, num_free: int) -> None:
        self._kind = kind
        self._evict_points(kind, num_free)  # type: ignore[arg-type]
        self._kind = None

    def stored(self, parent: int | None, tokens: bytes, pages: Sequence[int], salt: str) -> None:
        before = 0 if parent is None else self._hash_of_page[parent]
        self._hash_of_page.update(zip(pages, hashes(before, tokens), strict=True))

    def removed(self, pages: Sequence[int]) -> None:
        for page in pages:
            del self._hash_of_page[page]

    def resumable(self, point: ResumePoint, tokens: bytes, pages: Sequence[int], salt: str) -> None:
        self._hash_of_point[point] = self._hash_of_page[pages[-1]]

    def given_up(self, point: ResumePoint) -> None:
        known = self._hash_of_point.pop(point, None)
        if known is not None and self._kind is not None:
            self.num_given_up[self._kind] += 1
            self._gone[known] = GivenUp(self.second, self._kind, point.position)

    def entered(self, prompt: Sequence[int], num_cached: int) -> None:
        """A request that was resumed behind `num_cached` tokens: the last point that it lacked was live."""
        whole = (len(prompt) - 1) // PAGE * PAGE
        known = list(hashes(0, torch.tensor(prompt[:whole], dtype=torch.int32).numpy().tobytes()))
        for prefix in reversed(known[num_cached // PAGE :]):
            if (gone := self._gone.pop(prefix, None)) is not None:
                self.live.setdefault(gone.kind, Counter())[gone.second] += 1
                return


def hashes(before: int, tokens: bytes) -> Iterator[int]:
    """Of the prefixes that end with each page of these tokens."""
    for start in range(0, len(tokens), 4 * PAGE):
        before = hash((before, tokens[start : start + 4 * PAGE]))
        yield before


class Pages(NamedTuple):
    """Of one kind. held: in use by requests. cached: kept for the prefix cache alone. evicted: since the start."""

    total: int
    free: int
    held: int
    cached: int
    stranded: int
    evicted: int


@dataclass(slots=True)
class Second:
    """What was so at the end of a second since the start."""

    second: int
    running: int
    waiting: int
    preempted: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests: int
    pages: dict[str, Pages] = field(default_factory=dict)


def num_stranded(node: PrefixNode) -> int:
    """Pages below that can be given up and that no resume point is at or behind."""
    stranded, order = 0, list[PrefixNode]()
    stack = [node]
    while stack:
        order.append(at := stack.pop())
        stack.extend(at.children.values())
    useful = set[PrefixNode]()
    for at in reversed(order):
        if at in useful or (at.point is not None and not at.point.is_dropped):
            if at.parent is not None:
                useful.add(at.parent)
        elif at.num_locks == 0:
            stranded += len(at.pages)
    return stranded


def pages_of(engine: AnyEngine) -> dict[str, Pages]:
    kv = engine._scheduler._kv
    cache, full = kv.cache, kv.allocator
    counts = engine._scheduler.pages
    idle, stranded = cache.num_evictable, num_stranded(cache.root)
    found = {
        FULL: Pages(full.num_pages, full.num_free, full.num_pages - full.num_free - idle, idle, stranded, counts[FULL].evicted)
    }
    kinds: dict[str, PageAllocator] = dict(kv.finite.allocators)
    for kind, other in kinds.items():
        held = other.num_pages - other.num_free - other.num_idle
        found[kind] = Pages(other.num_pages, other.num_free, held, other.num_idle, 0, counts[kind].evicted)
    return found


def second_of(engine: AnyEngine, second: int, tokens: Counter[str]) -> Second:
    stats = engine.meter.stats()
    return Second(
        second=second,
        running=stats.num_running,
        waiting=stats.num_waiting,
        preempted=stats.num_preempted,
        prompt_tokens=tokens["prompt"],
        cached_tokens=tokens["cached"],
        output_tokens=tokens["output"],
        requests=tokens["requests"],
        pages=pages_of(engine),
    )


def summary(found: Sequence[Second], watch: Watch) -> dict[str, Any]:
    """What comes of it: for each kind, and of requests."""
    kinds = list(found[-1].pages)
    live = {kind: watch.live.get(kind, Counter[int]()) for kind in kinds}
    by_kind: dict[str, Any] = {}
    for kind in kinds:
        pages = [second.pages[kind] for second in found]
        others = {at for other in kinds if other != kind for at in live[other]}
        idle = {second.second for second in found if second.pages[kind].free > IDLE * second.pages[kind].total}
        useless = {at.second for at in found if at.pages[kind].free + at.pages[kind].stranded > IDLE * at.pages[kind].total}
        means = {name: sum(getattr(each, name) for each in pages) / len(pages) for name in ("free", "held", "cached", "stranded")}
        by_kind[kind] = {
            "total": pages[-1].total,
            "mean": {name: round(mean / max(pages[-1].total, 1), 4) for name, mean in means.items()},
            "evicted": pages[-1].evicted,
            "points_given_up": watch.num_given_up[kind],
            "live_points_given_up": live[kind].total(),
            "seconds_with_live_given_up": len(live[kind]),
            "idle": len(idle) / len(found),
            "idle_while_another_gives_up_live": len(idle & others) / len(found),
            "idle_or_stranded_while_another_gives_up_live": len(useless & others) / len(found),
        }
    last = found[-1]
    return {
        "kinds": by_kind,
        "hit_rate": last.cached_tokens / max(last.prompt_tokens, 1),
        "prompt_tokens": last.prompt_tokens,
        "output_tokens": last.output_tokens,
        "requests": last.requests,
        "mean_request": round((last.prompt_tokens + last.output_tokens) / max(last.requests, 1)),
        "preempted": last.preempted,
        "mean_running": sum(second.running for second in found) / len(found),
        "mean_waiting": sum(second.waiting for second in found) / len(found),
    }


def minutes(found: Sequence[Second], watch: Watch) -> list[dict[str, Any]]:
    """The last second of each minute, and how many live points each kind gave up in it."""
    told = []
    for last in found[59::60] or found[-1:]:
        span = range(last.second - 59, last.second + 1)
        live = {kind: sum(at[second] for second in span) for kind, at in watch.live.items()}
        told.append({**as_json(last), "live_points_given_up": live})
    return told


def as_json(second: Second) -> dict[str, Any]:
    return {**dataclasses.asdict(second), "pages": {kind: pages._asdict() for kind, pages in second.pages.items()}}
