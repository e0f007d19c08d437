"""Resume points: what a sequence must have besides the pages of its prefix to go on behind them.

    prefix tree   ── pages 4 9 2 ──*── pages 7 1 ──*        *: a node with a resume point
    window                  [5 8]            [3 6]          the pages in reach, ending there
    states                   [0]              [2]           the state after the last token

A point owns its pages as one of their owners (`PageAllocator`, cached=True). It can be given up at any time: a sequence that goes
on from it has its own share. Before the step that computed it has completed it is at no node, so that nobody finds it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Final

from enginery.contracts.batch import MemoryKind
from enginery.kv.pages import PageAllocator


@dataclass(slots=True, eq=False)
class ResumePoint:
    """Where a sequence can go on: `position` tokens are behind it. pages: by kind, in the order of their tokens.

    passing: of a chunk's end, nothing more, or superseded; the first to be given up. trails: moves along with a sequence that
    decodes, and is where it ended once that has left.
    is_dropped: its pages were given up.
    """

    position: int
    pages: Mapping[MemoryKind, tuple[int, ...]]
    passing: bool
    trails: bool
    is_dropped: bool = False


class ResumePoints:
    """All of them, in the order in which they are given up. A hit refreshes the one point that was used, none on the way to it."""

    def __init__(
        self, allocators: Mapping[MemoryKind, PageAllocator], given_up: Callable[[ResumePoint], None] | None = None
    ) -> None:
        """given_up: is told of each point that is."""
        self.allocators: Final = allocators
        self.num_evicted = dict.fromkeys(allocators, 0)  # pages that were given up for want of free ones of their kind
        self._given_up = given_up
        self._passing: OrderedDict[ResumePoint, None] = OrderedDict()
        self._lasting: OrderedDict[ResumePoint, None] = OrderedDict()

    def __iter__(self) -> Iterator[ResumePoint]:
        """Those that are to go first come first."""
        return chain(self._passing, self._lasting)

    def make(
        self, position: int, pages: Mapping[MemoryKind, tuple[int, ...]], *, passing: bool = False, trails: bool = False
    ) -> ResumePoint:
        """A new one, that owns `pages` besides whoever does."""
        for kind, own in pages.items():
            self.allocators[kind].hold(own, cached=True)
        point = ResumePoint(position, pages, passing=passing, trails=trails)
        self._order(point)[point] = None
        return point

    def use(self, point: ResumePoint) -> None:
        """Note a hit: it is given up after all that were not hit since."""
        self._order(point).move_to_end(point)

    def keep(self, point: ResumePoint) -> None:
        """It is no longer one that goes first, and is nobody's that moves along: several have gone on from it."""
        del self._order(point)[point]
        point.passing = point.trails = False
        self._lasting[point] = None

    def supersede(self, point: ResumePoint) -> None:
        """There is one further along its prefix, that whoever repeats all goes on from: this one is among the first to go."""
        if not (point.is_dropped or point.passing):
            del self._lasting[point]
            point.passing = True
            self._passing[point] = None

    def drop(self, point: ResumePoint) -> None:
        """Give it up. Nothing happens if it was before."""
        if point.is_dropped:
            return
        point.is_dropped = True
        del self._order(point)[point]
        if self._given_up is not None:
            self._given_up(point)
        for kind, pages in point.pages.items():
            self.allocators[kind].give_back(pages, cached=True)

    def drop_with(self, kind: MemoryKind, page: int) -> None:
        """Give up every point that has this page."""
        with self._counting(kind):
            for point in [point for point in self if page in point.pages[kind]]:
                self.drop(point)

    def evict(self, kind: MemoryKind, num_free: int) -> None:
        """Give up points until so many pages of the kind are free. They must be available. None goes whose pages are all in use."""
        allocator = self.allocators[kind]
        with self._counting(kind):
            while allocator.num_free < num_free:
                idle = (point for point in self if any(not allocator.users(page) for page in point.pages[kind]))
                if (point := next(idle, None)) is None:
                    return
                self.drop(point)

    @contextmanager
    def _counting(self, kind: MemoryKind) -> Iterator[None]:
        cached = self.allocators[kind].num_cached
        yield
        self.num_evicted[kind] += cached - self.allocators[kind].num_cached

    def _order(self, point: ResumePoint) -> OrderedDict[ResumePoint, None]:
        return self._passing if point.passing else self._lasting
