"""Making resume points of sequences: where, of which pages, and when they go into the tree.

Points are made where the last page ends before a prompt's last token; where more of its pages were in the prefix tree than of what
one can go on from, which proves a branch (arXiv:2411.19379); at ends of chunks, which go first; and at the last page's end that a
sequence passed while it decoded, which moves along with it. Drafts may lead over one: then its state goes to a page of its own, and
the point is given up if they were wrong.

The next turn of a chat goes on where the last one ended. Once a sequence leaves a point there, the end of its prompt and the point
where the turn before ended serve only who repeats or changes a turn: they are given up like ends of chunks, before others, unless
such a one comes (`ResumePoints.keep`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from enginery.contracts.batch import STATE, WINDOW, MemoryKind
from enginery.kv.kinds import WindowKind
from enginery.kv.prefix import RadixPrefixCache
from enginery.kv.resume import ResumePoint

if TYPE_CHECKING:
    from enginery.kv.manager import SequenceKV


class PointMaker:
    """Makes none where there is no tree, or all memory is of one kind.

    within_items: whether states can be kept amid an item of a prompt, at one place.
    """

    def __init__(
        self, page_size: int, cache: RadixPrefixCache, *, window: WindowKind | None, has_states: bool, within_items: bool
    ) -> None:
        self.page_size, self._cache, self._window = page_size, cache, window
        self._has_states, self._within_items = has_states, within_items

    def begin(self, kv: SequenceKV, point: ResumePoint | None, *, num_matched: int) -> None:
        """It goes on from `point`, or begins. num_matched: tokens whose pages are in the tree."""
        if self._cache.points is None:
            return
        kv.superseded, start = [], 0
        if point is not None:
            start = point.position
            if point.passing and start == num_matched:
                self._cache.points.keep(point)
            else:
                self._cache.points.use(point)
            if point.trails:
                kv.superseded.append(point)
        last = (len(kv.token_ids) - 1) // self.page_size * self.page_size
        kv.marks = sorted(mark for mark in {num_matched, last} if mark > start)

    def cut(self, kv: SequenceKV, start: int, stop: int, *, num_known: int) -> int:
        """Where a chunk that may go up to `stop` is to end: states are kept at ends of items, of whole pages, and where that can be
        at one place amid each.
        """
        if not self._has_states or self._cache.points is None:
            return stop
        amid = [mark for mark in kv.marks if start < mark < stop]
        stop = next(iter(amid[self._within_items :]), stop)
        whole = stop - stop % self.page_size
        return whole if start < whole and stop < num_known else stop

    def rows_to_keep(self, kv: SequenceKV, start: int, stop: int, *, num_known: int) -> int:
        """After how many rows of its next item, `start` to `stop`, its state is also to be kept; 0: nowhere amid it.

        Amid drafts at the first page's end: its own page goes on to wherever they are right.
        """
        if not self._has_states or self._cache.points is None:
            return 0
        if stop > num_known:
            rows = self.page_size - start % self.page_size
        else:
            rows = next((mark for mark in kv.marks if mark > start), stop) - start if self._within_items else 0
        return rows if start + rows < stop else 0

    def make(self, kv: SequenceKV, start: int, stop: int, *, num_known: int) -> None:
        """The points that its next item leads to. Its pages are there."""
        ends_page, is_chunk = stop - stop % self.page_size, stop < num_known
        marked = set[int]()
        kept = kv.states.kept(start, stop)
        while kv.marks and kv.marks[0] <= stop:
            if self._point(kv, mark := kv.marks.pop(0), kept):
                marked.add(mark)
        if is_chunk and ends_page > start and ends_page not in marked:
            self._point(kv, ends_page, kept, passing=True)
        elif not is_chunk and self._has_states and (position := min(kept.keys() - marked)) % self.page_size == 0:
            self._point(kv, position, kept, trails=True)

    def settle(self, kv: SequenceKV, *, leaves: bool = False) -> None:
        """Points whose step has completed go into the tree, with those pages of the prefix that are there; the others wait.

        leaves: it is the last chance.
        """
        assert self._cache.points is not None, "points are made where there is a tree"
        done = [point for point in kv.points if point.position <= kv.num_written]
        for point in [point for point in done if point.trails][:-1]:  # the last has moved along
            self._cache.points.drop(point)
        kv.points = [point for point in kv.points if not self._is_settled(point, kv, leaves=leaves)]

    def _is_settled(self, point: ResumePoint, kv: SequenceKV, *, leaves: bool) -> bool:
        """Whether it was given up, or is in the tree from now on. One that trails waits for the sequence to leave."""
        if point.is_dropped:
            return True
        is_done = point.position <= kv.num_written and (leaves or not point.trails)
        return is_done and self._cache.attach(point, kv.token_ids, kv.salt)

    def take_back(self, kv: SequenceKV) -> None:
        """Give up the points behind what is written, where no step is in flight: drafts led to them that were wrong."""
        if self._cache.points is not None:
            for point in kv.points:
                if point.position > kv.num_written:
                    self._cache.points.drop(point)
            kv.points = [point for point in kv.points if not point.is_dropped]

    def leave(self, kv: SequenceKV) -> None:
        """Leave behind where its last page ended, and give up what is not in the tree. Its written pages are."""
        points = self._cache.points
        if points is None:
            return
        self._trail_window(kv)
        done = {point.position: point for point in kv.points if point.trails and point.position <= kv.num_written}
        self.settle(kv, leaves=True)
        for point in kv.points:
            points.drop(point)
        if done and done[last := max(done)] not in kv.points:
            for point in kv.superseded:
                if point.position < last:
                    points.supersede(point)

    def _trail_window(self, kv: SequenceKV) -> None:
        """Without states the last page's end needs no preparation: its window is still held."""
        position = kv.num_written - kv.num_written % self.page_size
        if not self._has_states and position and all(point.position != position for point in kv.points):
            self._point(kv, position, {}, trails=True)

    def _point(
        self, kv: SequenceKV, position: int, kept: Mapping[int, int], *, passing: bool = False, trails: bool = False
    ) -> bool:
        """Make one, if there is a tree and what it needs is there still. kept: which page has the state at a position."""
        if (points := self._cache.points) is None:
            return False
        pages: dict[MemoryKind, tuple[int, ...]] = {}
        if self._window is not None:
            in_reach = kv.window.ending_at(position // self.page_size, self._window.reach)
            if in_reach is None:
                return False
            pages[WINDOW] = in_reach
        if self._has_states:
            if position not in kept:
                return False
            pages[STATE] = (kept[position],)
        kv.points.append(points.make(position, pages, passing=passing, trails=trails))
        if position > kv.num_shared and not (passing or trails):
            kv.superseded.append(kv.points[-1])
        return True
