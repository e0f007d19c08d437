"""Text that comes in pieces, read by generators that yield when they need more of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
Sink = Callable[[str], object]

HELD_MAX: Final = 1 << 18  # characters of an undecided call
_BLANKS: Final = tuple(" \t\r\n")


class Malformed(Exception):
    """What was read does not follow the format. The reader stands before the first wrong character, or at the end."""


class Marker:
    """Strings to look for, each with up to `breaks` line breaks before it, which belong to it."""

    def __init__(self, *markers: str, breaks: int = 2) -> None:
        starts = {marker[:length] for marker in markers for length in range(1, len(marker))}
        either = "|".join(re.escape(start) for start in sorted(starts, key=len, reverse=True))
        self.whole = re.compile(rf"\n{{0,{breaks}}}(?:{'|'.join(map(re.escape, markers))})")
        self.begun = re.compile(rf"\n{{0,{breaks}}}(?:{either})?\Z")
        self.longest = breaks + max(map(len, markers))


class Source:
    """The text that has come and is not read yet: at most one piece and the beginning of a marker.

    Between `hold` and `release` what is read is kept too, up to a number of characters; beyond, reading raises `Malformed`.
    """

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._ended = False
        self._held: list[str] | None = None
        self._num_held = 0
        self._held_max = HELD_MAX

    def add(self, text: str) -> None:
        """Add the next piece of text."""
        self._text = self._text[self._place :] + text
        self._place = 0

    def end(self) -> None:
        """Say that no more text follows."""
        self._ended = True

    def hold(self, text: str = "", *, most: int = HELD_MAX) -> None:
        """Keep what is read from now on, after `text`, which was read already."""
        self._held = [text]
        self._num_held = len(text)
        self._held_max = most

    def release(self) -> str:
        """Stop keeping. Returns what was kept since `hold`; empty if nothing was."""
        held, self._held = self._held, None
        return "".join(held or ())

    def ends_after(self, length: int) -> bool:
        """Whether that many characters are the last ones."""
        return self._ended and self._place + length == len(self._text)

    def more(self) -> Wait[bool]:
        """Wait for text; False at the end."""
        while self._place == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Wait[str]:
        """The next character; empty at the end."""
        return self._text[self._place] if (yield from self.more()) else ""

    def take(self, length: int) -> str:
        """Read that many characters of those that are here."""
        return self._read(self._place + length)

    def take_all(self) -> str:
        """Read and return all text that is here."""
        return self._read(len(self._text))

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read what matches of the text that is here; the run may go on in the next piece."""
        match = pattern.match(self._text, self._place)
        return self._read(match.end()) if match else ""

    def ahead(self, length: int) -> Wait[str]:
        """The next characters, unread; fewer at the end."""
        while len(self._text) - self._place < length and not self._ended:
            yield
        return self._text[self._place : self._place + length]

    def run_ahead(self, pattern: re.Pattern[str], most: int) -> Wait[str]:
        """The next characters that match, unread and as far as they go, up to `most`."""
        while True:
            match = pattern.match(self._text, self._place, self._place + most)
            run = match.group() if match else ""
            if len(run) == most or self._place + len(run) < len(self._text) or self._ended:
                return run
            yield

    def literal(self, wanted: str) -> Wait[bool]:
        """Read `wanted` if it is next; otherwise nothing."""
        while True:
            here = self._text[self._place : self._place + len(wanted)]
            if here == wanted:
                self.take(len(wanted))
                return True
            if self._ended or not wanted.startswith(here):
                return False
            yield

    def gap(self, *, most: int = 16) -> Wait[None]:
        """Read up to `most` blanks and line breaks."""
        while most > 0 and (yield from self.peek()) in _BLANKS:
            self.take(1)
            most -= 1

    def breaks(self, most: int = 2) -> Wait[None]:
        """Read up to `most` line breaks."""
        while most > 0 and (yield from self.peek()) == "\n":
            self.take(1)
            most -= 1

    def until(self, marker: Marker, sink: Sink) -> Wait[str]:
        """Read up to a marker and past it; the text before goes to `sink`. Returns the marker, empty at the end."""
        while True:
            match = marker.whole.search(self._text, self._place, self._reach(marker))
            end = match.start() if match else self._end_of_certain(marker)
            if end > self._place:
                sink(self._read(end))
            if match:
                return self._read(match.end())
            if self._ended:
                return ""
            yield

    def _reach(self, marker: Marker) -> int:
        """Where a search for the marker ends: behind it, more than can be held would have been read."""
        if self._held is None:
            return len(self._text)
        return min(len(self._text), self._place + self._held_max - self._num_held + marker.longest)

    def _end_of_certain(self, marker: Marker) -> int:
        if self._ended:
            return len(self._text)
        begun = marker.begun.search(self._text, max(self._place, len(self._text) - marker.longest + 1))
        return begun.start() if begun else len(self._text)

    def _read(self, end: int) -> str:
        if self._held is not None and end - self._place > self._held_max - self._num_held:
            end = self._place + self._held_max - self._num_held
            self._keep(end)
            raise Malformed
        return self._keep(end)

    def _keep(self, end: int) -> str:
        text = self._text[self._place : end]
        self._place = end
        if self._held is not None:
            self._held.append(text)
            self._num_held += len(text)
        return text
