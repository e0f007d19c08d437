"""What all parsers here are: a generator that reads the output as it comes, and tells what it has read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

from enginery.api import ParserEvent
from enginery_parsers.events import EventLog
from enginery_parsers.source import Source


class Reader(ABC):
    """Implements `enginery.api.OutputParser` by `read`."""

    def __init__(self) -> None:
        self.source = Source()
        self.events = EventLog()
        self._reading = self.read()  # which begins with the first feed

    def feed(self, text: str) -> list[ParserEvent]:
        self.source.add(text)
        return self._go_on()

    def finish(self) -> list[ParserEvent]:
        self.source.end()
        return self._go_on()

    @abstractmethod
    def read(self) -> Generator[None, None, None]:
        """Read `source` and tell `events`. Yields where more text is needed; ends when all is read."""

    def _go_on(self) -> list[ParserEvent]:
        next(self._reading, None)
        return self.events.take()
