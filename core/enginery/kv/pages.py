"""Who owns which page of one kind of memory. Numbers only: the memory itself is the pools'."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class OutOfPages(Exception):
    """More pages were asked for than are free. The scheduler counts before it takes, so users never see it."""


class PageAllocator:
    """Hands out the pages 0 .. num_pages - 1 and counts the owners of each: a page without one is free.

    Owners are users, who need the page, and the cache, which can do without it: its resume points hold pages with `cached=True`.
    Pages of prefixes have one owner, the sequence or the tree; there the tree's locks say who uses them.

    num_cached: pages that the cache owns, alone or with users. num_idle: those that it owns alone.
    The free pages are a stack that starts in order and takes runs back in order, so that pages taken together usually lie together.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_cached = self.num_idle = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = array("i", bytes(4 * num_pages))
        self._shares = array("i", bytes(4 * num_pages))  # of the cache

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that are free, or would be if the cache gave up what it owns alone."""
        return len(self._free) + self.num_idle

    def take(self, num_pages: int) -> list[int]:
        """`num_pages` pages that now have one user, the caller. Raises `OutOfPages`, taking none."""
        first = len(self._free) - num_pages
        if first < 0:
            raise OutOfPages(f"{num_pages:,} pages were asked for, {self.num_free:,} of {self.num_pages:,} are free")
        pages = self._free[first:]
        del self._free[first:]
        pages.reverse()
        for page in pages:
            self._users[page] = 1
        return pages

    def hold(self, pages: Sequence[int], *, cached: bool = False) -> None:
        """One owner more for each page. A page that is free is a bug: AssertionError."""
        for page in pages:
            assert self.is_taken(page), f"page {page} of {self.num_pages:,} is held but is not taken"
            if cached:
                self.num_cached += not self._shares[page]
                self._shares[page] += 1
            else:
                self.num_idle -= not self._users[page]
                self._users[page] += 1

    def give_back(self, pages: Sequence[int], *, cached: bool = False) -> None:
        """One owner less for each page; without any it is free. Giving back what one has not got is a bug: AssertionError."""
        owners, freed = self._shares if cached else self._users, list[int]()
        for page in pages:
            if not (0 <= page < self.num_pages and owners[page]):
                raise AssertionError(f"page {page} of {self.num_pages:,} was given back but is not taken")
            owners[page] -= 1
            if owners[page]:
                continue
            if cached:
                self.num_cached -= 1
                self.num_idle -= not self._users[page]
            elif self._shares[page]:
                self.num_idle += 1
            if not (self._users[page] or self._shares[page]):
                freed.append(page)
        freed.reverse()
        self._free.extend(freed)

    def is_taken(self, page: int) -> bool:
        return bool(self._users[page] or self._shares[page])

    def users(self, page: int) -> int:
        return self._users[page]

    def shares(self, page: int) -> int:
        """How many resume points of the cache have `page`."""
        return self._shares[page]
