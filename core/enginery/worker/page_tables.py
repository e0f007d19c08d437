"""The page tables of the running requests, by seat, as steps change them: one of each kind of paged memory.

    columns     0    1    2    3
    seat 0   [ 17 |  4 |  9 |  s ]      s: the scratch page, past the last page of a request
    seat 1   [  s |  3 |  8 |  s ]      of a window: also before the first that is held

The scheduler tells what is new; nobody sends whole tables. A table is never read past the last page of its request.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, WINDOW, MemoryKind
from enginery.contracts.step import INT, NewPages, StepInput
from enginery.errors import Unsupported

_FIRST_COLUMNS: Final = 64


class KindTable:
    """One row of page numbers a seat, [num_seats, columns] int32; the columns grow with the longest request.

    firsts: [num_seats] int32, the first column that each holds.
    """

    def __init__(self, num_seats: int, *, scratch_page: int) -> None:
        self.scratch_page = scratch_page
        self.firsts = np.zeros(num_seats, np.int32)
        self._rows = np.full((num_seats, _FIRST_COLUMNS), scratch_page, np.int32)

    def release(self, seats: np.ndarray) -> None:
        self._rows[seats] = self.scratch_page
        self.firsts[seats] = 0

    def of(self, seats: np.ndarray, num_columns: int) -> np.ndarray:
        """The first columns of these seats' rows, copied: [B, num_columns] int32."""
        self._widen(num_columns)
        return self._rows[seats, :num_columns]

    def from_firsts(self, seats: np.ndarray, num_columns: int) -> np.ndarray:
        """The same, each row from the first column on that it holds."""
        firsts = self.firsts[seats]
        self._widen(int(firsts.max(initial=0)) + num_columns)
        columns = firsts[:, None] + np.arange(num_columns, dtype=np.int32)
        return np.asarray(self._rows[seats[:, None], columns])

    def add(self, new: NewPages) -> None:
        pages = np.frombuffer(new.pages, INT)
        rows = np.frombuffer(new.rows, INT).reshape(-1, 4).tolist()
        self._widen(max(first + count for _, first, _, count in rows))
        begin = 0
        for seat, first, drop_before, count in rows:
            row = self._rows[seat]
            if first == 0:
                row[count:] = self.scratch_page
            row[first : first + count] = pages[begin : begin + count]
            if drop_before:
                row[:drop_before] = self.scratch_page
            self.firsts[seat] = drop_before
            begin += count

    def _widen(self, num_columns: int) -> None:
        """To at least so many."""
        if num_columns > (there := self._rows.shape[1]):
            more = max(num_columns - there, there)
            self._rows = np.pad(self._rows, ((0, 0), (0, more)), constant_values=self.scratch_page)


class PageTables:
    """Takes steps in the order of their numbers, each once. window: None where the model has no pages of that kind."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.page_size = geometry.page_size
        self.next_number = 0
        self.full = KindTable(geometry.num_seats, scratch_page=geometry.scratch_page(FULL))
        self.window: KindTable | None = None
        self._kinds: dict[MemoryKind, KindTable] = {FULL: self.full}
        if WINDOW in geometry.pages:
            self._kinds[WINDOW] = self.window = KindTable(geometry.num_seats, scratch_page=geometry.scratch_page(WINDOW))

    def take(self, step: StepInput) -> None:
        """Change what the step changes. AssertionError unless it is the next one, `Unsupported` for another kind of memory."""
        assert step.number == self.next_number, f"step {step.number} came where step {self.next_number} was expected"
        self.next_number += 1
        if unknown := step.pages.keys() - self._kinds.keys():
            own = " and ".join(repr(kind) for kind in self._kinds)
            raise Unsupported(f"the step has pages of the kind {min(unknown)!r}; this worker has memory of the kind {own}")
        if step.released:
            seats = np.frombuffer(step.released, INT)
            for table in self._kinds.values():
                table.release(seats)
        for kind, new in step.pages.items():
            self._kinds[kind].add(new)
