"""Windows and states of the sequences that run, and the resume points made of them.

    item of a sequence      [ start ........ stop )         P: page size
    before it               window pages out of reach of `start` go back
    a state that is kept    is read from its page and written to another one, so that keeping it costs no copy
    behind it               a resume point, where `stop` is a page's end that is worth it

Without a free page a state goes on in its place, and no point is made (`making.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from enginery.contracts.batch import STATE, WINDOW, MemoryKind
from enginery.kv.kinds import NO_STATE, Demand, StatePages, WindowKind, WindowPages
from enginery.kv.making import PointMaker
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import RadixPrefixCache
from enginery.kv.resume import ResumePoint

if TYPE_CHECKING:
    from enginery.kv.manager import SequenceKV


class FiniteMemory:
    """Gives sequences their pages of kinds with a finite reach. window, states: None where the model has none of it.

    points: makes resume points. zero_page: the state that beginning sequences read. largest_chunk: tokens of a step.
    within_items: see `PointMaker`.
    """

    def __init__(
        self,
        page_size: int,
        cache: RadixPrefixCache,
        *,
        window: WindowKind | None = None,
        states: PageAllocator | None = None,
        largest_chunk: int = 0,
        within_items: bool = False,
    ) -> None:
        self.page_size, self.window, self.states = page_size, window, states
        self.zero_page: Final = NO_STATE if states is None else states.num_pages + 1
        own = {WINDOW: None if window is None else window.allocator, STATE: states}
        self.allocators: Final[Mapping[MemoryKind, PageAllocator]] = {kind: each for kind, each in own.items() if each is not None}
        self.points = PointMaker(page_size, cache, window=window, has_states=states is not None, within_items=within_items)
        self._cache, self._largest_chunk = cache, largest_chunk
        self.read: list[int] = []  # state pages that the step in the making reads, or keeps, and nobody else may write to in it

    @property
    def available(self) -> Demand:
        """Pages that are free, or that resume points can give up; of a kind that the model has not got any number."""
        window = sys.maxsize if self.window is None else self.window.allocator.available
        return Demand(0, window, sys.maxsize if self.states is None else self.states.available)

    def is_roomy(self, count: int) -> bool:
        """Whether so many sequences could all take a page."""
        return self.window is None or self.window.allocator.available >= count

    def resume(self, kv: SequenceKV, point: ResumePoint | None) -> None:
        """Give an entering sequence its share of a point's pages. Its tokens behind the point are computed."""
        if point is None:
            return
        if self.window is not None:
            pages = point.pages[WINDOW]
            self.window.allocator.hold(pages)
            kv.window.first = point.position // self.page_size - len(pages)
            kv.window.pages.extend(pages)
        if self.states is not None:
            kv.states.current = point.pages[STATE][0]
            self.states.hold(point.pages[STATE])

    def begin(self, kv: SequenceKV, point: ResumePoint | None, *, num_matched: int) -> None:
        """It enters: a page for its state, and where points are to be made. num_matched: tokens whose pages are in the tree."""
        if self.states is not None:
            (kv.states.spare,) = self._taken(STATE, self.states)
        self.points.begin(kv, point, num_matched=num_matched)

    def demand(self, kv: SequenceKV, num_tokens: int) -> Demand:
        """What it lacks to be computed up to so many tokens; negative if it has more."""
        window = 0
        if self.window is not None:
            window = self.window.most(num_tokens, self._largest_chunk) - len(kv.window.pages)
        return Demand(0, window, int(self.states is not None and kv.states.spare == NO_STATE and kv.states.read == NO_STATE))

    def room(self, kv: SequenceKV) -> int:
        """Tokens that it could hold in all without preempting another one; without windows any number."""
        if self.window is None:
            return sys.maxsize
        return (kv.window.stop + self.window.allocator.available) * self.page_size

    def forget(self, kv: SequenceKV, start: int) -> None:
        """Give back the window pages that no item from `start` on reads."""
        if self.window is not None and (dropped := kv.window.drop_before(self.window.first_column(start))):
            self.window.allocator.give_back(dropped)

    def missing(self, kv: SequenceKV, stop: int) -> Demand:
        """What its next item, up to `stop`, cannot do without and has not got."""
        window, state = 0, 0
        if self.window is not None:
            window = -(-stop // self.page_size) - kv.window.stop
        if self.states is not None and kv.states.spare == NO_STATE:
            state = int(self.states.users(kv.states.current) > 1)
        return Demand(0, window, state)

    def prepare(self, kv: SequenceKV, start: int, stop: int, *, num_known: int) -> None:
        """Take the pages for its next item, which must be available, and make the points that it leads to.

        num_known: tokens that it has, known or sampled by a step in flight; what lies behind are drafts.
        """
        if self.window is not None and (lacking := -(-stop // self.page_size) - kv.window.stop) > 0:
            kv.window.pages.extend(self._taken(WINDOW, self.window.allocator, lacking))
        if self.states is not None:
            self._move_state(kv.states, self.states)
            rows = self.points.rows_to_keep(kv, start, stop, num_known=num_known)
            if rows and self.states.available:
                (kv.states.checkpoint,) = self._taken(STATE, self.states)
                kv.states.checkpoint_rows = rows
                self.read.append(kv.states.checkpoint)
        self.points.make(kv, start, stop, num_known=num_known)

    def prepared_until(self, stop: int) -> int:
        """Sequences whose last item ended at `stop` need nothing for items of one token that begin before this position."""
        page, into = divmod(stop, self.page_size)
        if not into:
            return stop
        return (page + 1) * self.page_size - (self.states is not None)  # the item that ends a page makes a point

    def step_planned(self) -> None:
        """The step in the making is complete: from the next one on, what it reads may be written to."""
        if self.read and self.states is not None:
            self.states.give_back(self.read)
            self.read = []

    def let_go(self, kv: SequenceKV) -> None:
        if self.window is not None:
            self.window.allocator.give_back(kv.window.pages)
        if self.states is not None:
            self.states.give_back(kv.states.owned())
        kv.window, kv.states, kv.points, kv.marks = WindowPages(), StatePages(), [], []

    def _move_state(self, own: StatePages, states: PageAllocator) -> None:
        """Where its next item reads its state, and where it writes it."""
        page = own.current
        if page == NO_STATE:
            own.read, own.current, own.spare = self.zero_page, own.spare, NO_STATE
            return
        own.read = page
        if states.users(page) == 1 and not states.shares(page):
            return
        if own.spare == NO_STATE and states.available:
            (own.spare,) = self._taken(STATE, states)
        if own.spare == NO_STATE:
            assert self._cache.points is not None, "a state that one sequence uses is shared with resume points alone"
            self._cache.points.drop_with(STATE, page)
            return
        own.current, own.spare = own.spare, NO_STATE
        self.read.append(page)

    def _taken(self, kind: MemoryKind, allocator: PageAllocator, count: int = 1) -> list[int]:
        """Pages of the kind, which are available: resume points are given up for them."""
        if self._cache.points is not None:
            self._cache.points.evict(kind, count)
        return allocator.take(count)


def check_idle(finite: FiniteMemory) -> None:
    """Raise AssertionError unless every page is free or the cache's alone."""
    for kind, allocator in finite.allocators.items():
        free, cached, total = allocator.num_free, allocator.num_cached, allocator.num_pages
        assert free + cached == total, f"nothing runs, but {free:,} free + {cached:,} cached {kind} pages are not all {total:,}"
        assert cached == allocator.num_idle, f"nothing runs, but {cached - allocator.num_idle:,} cached {kind} pages are in use"
