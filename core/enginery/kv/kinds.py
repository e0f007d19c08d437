"""The kinds of memory that a model has, and what a sequence has of each.

A page belongs to a kind, and kinds differ in their reach alone: how many pages before a position must be there to go on from it.

    full      [ 0 | 1 | 2 | 3 | 4 | 5 ]     all of them: keys and values, latents
    window    [     ·     | 3 | 4 | 5 ]     ceil((w - 1) / page size): a token sees itself and w - 1 before it
    state     [         ·         | 5 ]     1: what a recurrence keeps after the page's last token

Page numbers of kinds have nothing to do with each other. The pages of a window are read while they are in reach and never written
again once they are full, so resume points share them. A state is read from one page and written to another: mostly the same, but
one with another owner is only read.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from enginery.kv.pages import PageAllocator


class Demand(NamedTuple):
    """Pages of each kind that are asked for, or there."""

    full: int = 0
    window: int = 0
    state: int = 0

    def plus(self, other: Demand) -> Demand:
        return Demand(self.full + other.full, self.window + other.window, self.state + other.state)

    def fits(self, available: Demand) -> bool:
        return self.full <= available.full and self.window <= available.window and self.state <= available.state


NOTHING: Final = Demand()


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowKind:
    """The window pages of a model. reach: as above, of its largest window. most: what one sequence may need at once."""

    allocator: PageAllocator
    page_size: int
    reach: int

    @classmethod
    def of(cls, num_pages: int, *, window: int, page_size: int) -> WindowKind:
        """window: the largest of the model, in tokens."""
        return cls(allocator=PageAllocator(num_pages), page_size=page_size, reach=reach_of(window, page_size))

    def first_column(self, start: int) -> int:
        """The first page that an item from `start` on needs, or a sequence that ends one token earlier and is resumed there."""
        return max(0, (start - 1) // self.page_size - self.reach)

    def most(self, num_tokens: int, chunk: int) -> int:
        """Pages that a sequence of so many tokens needs at once, if it is computed in chunks of up to `chunk`."""
        return most_window_pages(num_tokens, chunk, reach=self.reach, page_size=self.page_size)


def reach_of(window: int, page_size: int) -> int:
    """Pages before a position that a token there may see."""
    return -(-(window - 1) // page_size)


def most_window_pages(num_tokens: int, chunk: int, *, reach: int, page_size: int) -> int:
    """Those before the chunk and the page that it begins in, one that is given up late, and those that it fills."""
    return min(-(-num_tokens // page_size), reach + 2 + -(-chunk // page_size))


@dataclass(slots=True, eq=False)
class WindowPages:
    """The window pages of one sequence: those of the columns `first` on.

    num_told, first_told: `stop` and `first` as the workers know them.
    """

    first: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    num_told: int = 0
    first_told: int = 0

    @property
    def stop(self) -> int:
        return self.first + len(self.pages)

    def drop_before(self, column: int) -> list[int]:
        """Take the pages before `column` out: for the caller to give back."""
        count = min(max(column - self.first, 0), len(self.pages))
        dropped = self.pages[:count].tolist()
        self.pages = self.pages[count:]
        self.first += count
        return dropped

    def ending_at(self, column: int, reach: int) -> tuple[int, ...] | None:
        """The pages in reach of the position where `column` begins; None if it has not got all of them."""
        first = max(0, column - reach)
        if first < self.first or column > self.stop:
            return None
        return tuple(self.pages[first - self.first : column - self.first])


NO_STATE = -1


@dataclass(slots=True, eq=False)
class StatePages:
    """The state pages of one sequence.

    current: has its state after its scheduled tokens; `NO_STATE` before the first. spare: to be written to next, because the
    current one is another's or there is none. read: what its next item reads. checkpoint: a resume point's page, that its next item
    also writes to, after `checkpoint_rows` of its tokens.
    """

    current: int = NO_STATE
    spare: int = NO_STATE
    read: int = NO_STATE
    checkpoint: int = NO_STATE
    checkpoint_rows: int = 0

    def kept(self, start: int, stop: int) -> dict[int, int]:
        """By position, the page that has the state there once its next item, from `start` to `stop`, is computed."""
        checkpoint = {start + self.checkpoint_rows: self.checkpoint} if self.checkpoint_rows else {}
        return {**checkpoint, stop: self.current}

    def owned(self) -> list[int]:
        """Each page that it is a user of."""
        return [page for page in (self.current, self.spare) if page != NO_STATE]
