"""Finds what followed the last tokens of a request when they came before: prompt lookup decoding (Saxena, 2023).

A step costs as much as it has new tokens, and a long prompt is taken in over several. One index a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

STRIDE: Final = 2048  # tokens: about 2 ms


class NgramIndex:
    """Where each run of `least` to `most` tokens was last followed by another token.

    window: only what lies so many tokens back counts; entries of what is older are forgotten with the next sweep. Runs are keyed by
    their bytes, of which a long prompt has hundreds of thousands.
    """

    def __init__(self, *, least: int = 2, most: int = 4, window: int = 1 << 16) -> None:
        self._least = least
        self._most = most
        self._window = window
        self._tokens = array("i")
        self._next: dict[bytes, int] = {}  # of a run: the place of the token behind it
        self._indexed = 1  # the runs before tokens up to this one are in it
        self._sweep_at = 2 * window

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that were told; of those that are not indexed yet `STRIDE` with each call, the first ones first."""
        self._tokens.extend(tokens)
        self._indexed = max(self._indexed, len(self._tokens) - self._window)
        self._index(min(len(self._tokens), self._indexed + STRIDE))
        if len(self._tokens) >= self._sweep_at:
            self._forget()

    def propose(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the longest run of last tokens that came before; empty if none did.

        Where that reaches the end, it goes on with what it has proposed: a loop is drafted as a loop.
        """
        tokens, size = self._tokens, len(self._tokens)
        for length in range(min(self._most, size), self._least - 1, -1):
            place = self._next.get(tokens[size - length :].tobytes(), -1)
            if place >= 0 and size - place <= self._window:
                drafts: list[int] = []
                for at in range(place, place + count):
                    drafts.append(tokens[at] if at < size else drafts[at - size])
                return drafts
        return []

    def _index(self, stop: int) -> None:
        """The runs before the tokens up to `stop`."""
        base, width = max(0, self._indexed - self._most), self._tokens.itemsize
        data = self._tokens[base:stop].tobytes()
        for place in range(self._indexed, stop):
            end = (place - base) * width
            for length in range(self._least, min(self._most, place) + 1):
                self._next[data[end - length * width : end]] = place
        self._indexed = stop

    def _forget(self) -> None:
        oldest = len(self._tokens) - self._window
        self._next = {run: place for run, place in self._next.items() if place >= oldest}
        self._sweep_at = len(self._tokens) + self._window
