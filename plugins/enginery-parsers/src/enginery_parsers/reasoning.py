"""Reasoning between `<think>` and `</think>`, or tags of another name, at the beginning of the output."""

from __future__ import annotations

from collections.abc import Generator

from enginery.api import ParserEvent, ParserSetup
from enginery_parsers.events import EventLog
from enginery_parsers.source import Marker, Source


class ThinkParser:
    """Reasoning until the closing tag, or to the end; then content. Tags in the midst of content are content.

    If the prompt ends within reasoning, the model need not open it, and may.
    """

    def __init__(self, setup: ParserSetup, tag: str = "think") -> None:
        self._begin, self._end = f"<{tag}>", Marker(f"</{tag}>")
        self._source = Source()
        self._events = EventLog()
        self._reader = self._read(inside=setup.inside)

    def feed(self, text: str) -> list[ParserEvent]:
        self._source.add(text)
        return self._go_on()

    def finish(self) -> list[ParserEvent]:
        self._source.end()
        return self._go_on()

    def _go_on(self) -> list[ParserEvent]:
        next(self._reader, None)
        return self._events.take()

    def _read(self, *, inside: bool) -> Generator[None, None, None]:
        source = self._source
        source.hold()
        yield from source.gap()
        opened = yield from source.literal(self._begin)
        before = source.release()
        if opened:
            yield from source.breaks()
        elif inside:
            self._events.reasoning(before)
        else:
            self._events.content(before)
        if opened or inside:
            yield from source.until(self._end, self._events.reasoning)
            yield from source.breaks()
        while (yield from source.more()):
            self._events.content(source.take_all())
