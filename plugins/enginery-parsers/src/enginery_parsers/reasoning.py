"""Reasoning between `<think>` and `</think>`, or tags of another name, at the beginning of the output."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Final

from enginery.api import ParserSetup
from enginery_parsers.reader import Reader
from enginery_parsers.source import Malformed, Marker, Wait

# What begins a call, or several, and what ends them, of the families that reason between tags.
_CALLS: Final[Mapping[str, str]] = {
    "<tool_call>": "</tool_call>",
    "<longcat_tool_call>": "</longcat_tool_call>",
    "<minimax:tool_call>": "</minimax:tool_call>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",
}


class ThinkParser(Reader):
    """Reasoning until the closing tag, or to the end; then content. Tags in the midst of content are content.

    If the prompt ends within reasoning, the model need not open it, and may. Some call without closing it: calls that nothing but
    the closing tag follows are content, for the parser of calls. Where a tool is strict they are not, as no grammar was followed.
    """

    def __init__(self, setup: ParserSetup, *, begin: str = "<think>", end: str = "</think>") -> None:
        super().__init__()
        self._begin, self._end = begin, end
        self._inside = setup.inside
        may_call = bool(setup.tools) and not any(tool.strict for tool in setup.tools)
        self._ends = Marker(self._end, *(_CALLS if may_call else ()))
        self._ends_of_calls = {begin: Marker(end, self._end) for begin, end in _CALLS.items()}
        self._in_calls = ("{", "[", "<", *(tool.name[:1] for tool in setup.tools))

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
            self.events.content(before.lstrip("\n"))  # a prompt may end with the closing tag, as GLM's does
        if opened or self._inside:
            yield from self._read_reasoning()
        while (yield from source.more()):
            self.events.content(source.take_all())

    def _read_reasoning(self) -> Wait[None]:
        """All of it, and the closing tag."""
        is_over = False
        while not is_over and (marker := (yield from self.source.until(self._ends, self.events.reasoning))):
            begin = marker.lstrip("\n")
            if begin == self._end:
                yield from self.source.breaks()
                return
            self.source.hold(marker)
            try:
                is_over = yield from self._read_calls(begin)
            except Malformed:
                self.events.reasoning(self.source.release())

    def _read_calls(self, begin: str) -> Wait[bool]:
        """Calls, whose first marker is read and held. Returns whether the reasoning is over. Raises `Malformed` for no call."""
        source, is_another = self.source, True
        while is_another:
            yield from source.gap()
            if (yield from source.peek()) not in self._in_calls:
                raise Malformed
            end = yield from source.until(self._ends_of_calls[begin], _ignore)
            if end.lstrip("\n") == self._end:
                self.events.reasoning(source.release().removesuffix(end))
                yield from source.breaks()
                return True
            if not end:
                raise Malformed
            yield from source.gap()
            is_another = yield from source.literal(begin)
        calls = source.release()
        if (yield from source.literal(self._end)):
            yield from source.breaks()
            source.hold()
            yield from source.gap()
            answer = source.release()
            if (yield from source.more()):
                self.events.reasoning(calls.removesuffix("\n").removesuffix("\n"))
                self.events.content(answer)
                return True
        elif (yield from source.more()):
            self.events.reasoning(calls)
            return False
        self.events.content(calls)
        return True


def _ignore(text: str) -> None:
    pass
