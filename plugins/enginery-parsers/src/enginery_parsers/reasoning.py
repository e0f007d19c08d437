"""Reasoning between `<think>` and `</think>`, or tags of another name, at the beginning of the output."""

from __future__ import annotations

from collections.abc import Generator

from enginery.api import ParserSetup
from enginery_parsers.reader import Reader
from enginery_parsers.source import Marker


class ThinkParser(Reader):
    """Reasoning until the closing tag, or to the end; then content. Tags in the midst of content are content.

    If the prompt ends within reasoning, the model need not open it, and may.
    """

    def __init__(self, setup: ParserSetup, tag: str = "think") -> None:
        super().__init__()
        self._begin, self._end = f"<{tag}>", Marker(f"</{tag}>")
        self._inside = setup.inside

    def read(self) -> Generator[None, None, None]:
        source = self.source
        source.hold()
        yield from source.gap()
        opened = yield from source.literal(self._begin)
        before = source.release()
        if opened:
            yield from source.breaks()
        elif self._inside:
            self.events.reasoning(before)
        else:
            self.events.content(before)
        if opened or self._inside:
            yield from source.until(self._end, self.events.reasoning)
            yield from source.breaks()
        while (yield from source.more()):
            self.events.content(source.take_all())
