"""What the parsers of tool calls have in common, and those of calls that are JSON objects."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from enginery.api import ParserSetup, ToolCallBegun, ToolCallEnded
from enginery_parsers.json_text import read_char, read_key, read_space, read_string, read_value
from enginery_parsers.reader import Reader
from enginery_parsers.source import HELD_MAX, Malformed, Marker, Wait

ARGUMENTS: Final = ("arguments", "parameters")
IGNORED: Final = ("id", "type")


class CallParser(Reader):
    """Passes content on, and hands over to `read_call` at each of the markers that begin a call.

    Until a call has begun, its text is held: a fault makes content of all of it, and the search for markers goes on where the fault
    is. After that a fault ends the call, and content goes on from there.
    """

    begins: Marker
    held_max = HELD_MAX

    def __init__(self, setup: ParserSetup) -> None:
        super().__init__()
        self.tools = {tool.name: tool for tool in setup.tools}
        self._new_id = setup.new_id
        self._num_calls = 0
        self._is_open = False

    def read(self) -> Generator[None, None, None]:
        """Read the whole output: content, and a call at each marker."""
        while marker := (yield from self.source.until(self.begins, self.content)):
            self.source.hold(marker, most=self.held_max)
            yield from self.attempt(marker.lstrip("\n"))

    def attempt(self, marker: str) -> Wait[None]:
        """Read a call. If it turns out to be malformed, what was held of it becomes content."""
        try:
            yield from self.read_call(marker)
        except Malformed:
            held = self.source.release()
            if self._is_open:
                self.end(complete=False)
            self.content(held)
        self.source.release()

    def read_call(self, marker: str) -> Wait[None]:
        """Read the call behind `marker`, and tell it by `begin`, `arguments` and `end`. Raises `Malformed`."""
        raise NotImplementedError

    def content(self, text: str) -> None:
        """Tell a piece of content."""
        self.events.content(text)

    def begin(self, name: str, call_id: str = "") -> None:
        """Tell the begin of a call, and let go of what was held. Raises `Malformed` if there is no such tool.

        call_id: the model's own, where the format has one.
        """
        if name not in self.tools:
            raise Malformed
        self.source.release()
        self._is_open = True
        self.events.add(ToolCallBegun(self._num_calls, call_id or self._new_id(), name))

    def arguments(self, text: str) -> None:
        """Tell a piece of the open call's arguments, which are JSON."""
        self.events.arguments(self._num_calls, text)

    def end(self, *, complete: bool = True) -> None:
        """Tell the end of the open call, and hold what follows."""
        self.events.add(ToolCallEnded(self._num_calls, complete))
        self._num_calls += 1
        self._is_open = False
        self.source.hold()

    def skip(self, *markers: str, blanks: str = "") -> Wait[None]:
        """Leave out those of the markers that follow, in this order, with blanks before and line breaks after each.

        blanks: that were read before the first one.
        """
        self.source.hold(blanks)
        for marker in markers:
            yield from self.source.gap()
            if (yield from self.source.literal(marker)):
                self.source.release()
                yield from self.source.breaks()
                self.source.hold()
        self.content(self.source.release())

    def another(self, separator: str, begin: str) -> Wait[bool]:
        """Whether `begin` follows, with a separator before it or not; then it is read. What stands before it is held."""
        yield from self.source.breaks()
        self.source.hold()
        yield from self.source.gap()
        yield from self.source.literal(separator)
        yield from self.source.gap()
        return (yield from self.source.literal(begin))

    def read_call_object(self) -> Wait[None]:
        """`{"name": ..., "arguments": {...}}` after its first character.

        The members come in any order; `parameters` means `arguments`, `id` and `type` are ignored. The call ends with its
        arguments; a fault after them is no fault of the call.
        """
        name: str | None = None
        early: list[str] | None = None
        is_said = False
        while True:
            yield from read_space(self.source, _ignore)
            key = yield from self._read_member_name()
            if key == "name" and name is None:
                name = yield from self._read_name()
                if early is not None:
                    self._say(name, "".join(early))
                    is_said = True
            elif key in ARGUMENTS and not is_said and early is None:
                if (yield from self.source.peek()) != "{":
                    raise Malformed
                if name is None:
                    early = []
                    yield from read_value(self.source, early.append)
                else:
                    self.begin(name)
                    yield from read_value(self.source, self.arguments)
                    self.end()
                    is_said = True
            elif key in IGNORED:
                yield from read_value(self.source, _ignore)
            else:
                raise Malformed
            yield from read_space(self.source, _ignore)
            if (yield from self.source.peek()) != ",":
                break
            self.source.take(1)
        if name is None:
            raise Malformed
        yield from read_char(self.source, "}", _ignore)
        if not is_said:
            self._say(name, "{}")
        self.source.release()

    def _say(self, name: str, arguments: str) -> None:
        self.begin(name)
        self.arguments(arguments)
        self.end()

    def _read_member_name(self) -> Wait[str]:
        text: list[str] = []
        yield from read_key(self.source, text.append)
        yield from read_space(self.source, _ignore)
        return str(json.loads("".join(text).rstrip(" \t\r\n:")))

    def _read_name(self) -> Wait[str]:
        text: list[str] = []
        yield from read_string(self.source, text.append)
        name = str(json.loads("".join(text)))
        if name not in self.tools:
            raise Malformed
        return name


@dataclass(frozen=True, kw_only=True)
class ObjectFormat:
    """Calls that are objects between two markers. several: there may be more than one, as a list or one after another."""

    begin: str
    end: str
    several: bool = False


HERMES: Final = ObjectFormat(begin="<tool_call>", end="</tool_call>")
LONGCAT: Final = ObjectFormat(begin="<longcat_tool_call>", end="</longcat_tool_call>")
GRANITE: Final = ObjectFormat(begin="<|tool_call|>", end="", several=True)
PHI: Final = ObjectFormat(begin="<|tool_call|>", end="<|/tool_call|>", several=True)
NEMOTRON: Final = ObjectFormat(begin="<TOOLCALL>", end="</TOOLCALL>", several=True)
TOOL_CALLS: Final = ObjectFormat(begin="<tool_calls>", end="</tool_calls>", several=True)


class ObjectParser(CallParser):
    """The marker, an object or several, the other marker, with blanks and line breaks between them."""

    def __init__(self, setup: ParserSetup, written: ObjectFormat) -> None:
        self.begins = Marker(written.begin)
        self._written = written
        super().__init__(setup)

    def read_call(self, marker: str) -> Wait[None]:
        yield from self.source.gap()
        is_list = self._written.several and (yield from self.source.literal("["))
        yield from self.source.gap()
        yield from read_char(self.source, "{", _ignore)
        yield from self.read_call_object()
        while self._written.several and (yield from self.another(",", "{")):
            yield from self.read_call_object()
        closing = ("]" if is_list else "", self._written.end)
        yield from self.skip(*filter(None, closing), blanks=self.source.release())


class LlamaParser(CallParser):
    """The object, at the beginning of the output or of a line, after `<|python_tag|>`, or after another one and a semicolon."""

    begins = Marker("<|python_tag|>", "\n{")

    def read(self) -> Generator[None, None, None]:
        """Read the whole output, in which an object at the beginning is a call too."""
        self.source.hold()
        yield from self.source.gap()
        if (yield from self.source.literal("{")):
            yield from self.attempt("{")
        else:
            self.content(self.source.release())
        yield from super().read()

    def read_call(self, marker: str) -> Wait[None]:
        if marker != "{":
            yield from self.source.gap()
            yield from read_char(self.source, "{", _ignore)
        yield from self.read_call_object()
        while (yield from self.another(";", "{")):
            yield from self.read_call_object()
        self.content(self.source.release())


def _ignore(text: str) -> None:
    pass
