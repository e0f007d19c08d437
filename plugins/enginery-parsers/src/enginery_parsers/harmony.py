"""gpt-oss' harmony format: messages with headers that say who is addressed, and on which channel.

https://github.com/openai/harmony, docs/format.md. An answer is one message after another, the first without `<|start|>assistant`
where the prompt ends with it: `<|channel|>analysis<|message|>`, text, `<|end|>`, `<|start|>assistant<|channel|>final<|message|>`
and so on. A message to `functions.name` is a call; its recipient stands behind the role or behind the channel.

The library `openai-harmony` reads tokens of one vocabulary, which it downloads, and refuses what is malformed. Parsers get text,
and may lose none of it, so they are written here; the tests compare them with the library.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Final, NamedTuple

from enginery.api import ParserSetup
from enginery_parsers.calls import CallParser
from enginery_parsers.json_text import read_value
from enginery_parsers.reader import Reader
from enginery_parsers.source import Malformed, Marker, Sink, Source, Wait

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
_FUNCTIONS: Final = "functions."
TO_FUNCTION: Final = f" to={_FUNCTIONS}"
_HEADER_MAX: Final = 1_000
_AROUND: Final = Marker(START, CHANNEL, END, CALL, RETURN, breaks=0)
_OF_HEADER: Final = Marker(MESSAGE, START, END, CALL, RETURN, breaks=0)
_HEADER: Final = re.compile(
    r"(?:<\|start\|>\s*+assistant)?(?:\s*+to=(?P<first>[^\s<]++))?"
    r"(?:\s*+<\|channel\|>\s*+(?P<channel>analysis|commentary|final))?(?:\s*+to=(?P<second>[^\s<]++))?"
    r"\s*+(?:<\|constrain\|>)?\s*+(?:json|code|text)?\s*+",
    re.IGNORECASE,
)


class Header(NamedTuple):
    """What a header says; empty where it says nothing."""

    channel: str
    recipient: str


def read_header(source: Source, begun: str) -> Wait[Header | None]:
    """Read up to `<|message|>` and past it. begun: what was read of the header. None if it is none. All of it is held."""
    source.hold(begun, most=_HEADER_MAX)
    parts: list[str] = [begun]
    try:
        marker = yield from source.until(_OF_HEADER, parts.append)
    except Malformed:
        return None
    match = _HEADER.fullmatch("".join(parts))
    if marker != MESSAGE or match is None:
        return None
    return Header(channel=match["channel"] or "", recipient=match["first"] or match["second"] or "")


class HarmonyReasoning(Reader):
    """The channel `analysis` is reasoning, others are content, without their headers. Messages to functions stay as they are.

    What is malformed is content. The setup's `inside`: the prompt ends before a header.
    """

    def __init__(self, setup: ParserSetup) -> None:
        super().__init__()
        self._inside = setup.inside

    def read(self) -> Generator[None, None, None]:
        source = self.source
        marker = ""
        if self._inside and (yield from source.literal(TO_FUNCTION)):
            marker = TO_FUNCTION
        sink: Sink = self.events.content
        while True:
            if not marker:
                marker = yield from source.until(_AROUND, sink)
            if marker not in (START, CHANNEL, TO_FUNCTION):
                if not marker:
                    return
                sink, marker = self.events.content, ""
                continue
            header = yield from read_header(source, marker)
            held = source.release()
            sink, marker = self.events.content, ""
            if header is None:
                sink(held)
            elif header.recipient.startswith(_FUNCTIONS):
                sink(held)
                marker = yield from source.until(_AROUND, sink)
                if marker in (END, CALL, RETURN):
                    sink(marker)
                    marker = ""
            elif header.channel == "analysis":
                sink = self.events.reasoning


class HarmonyParser(CallParser):
    """Calls are messages to functions; all else is content."""

    begins = Marker(START, CHANNEL, breaks=0)

    def read(self) -> Generator[None, None, None]:
        """Read the whole output, which may begin within a header."""
        if (yield from self.source.literal(TO_FUNCTION)):
            self.source.hold(TO_FUNCTION, most=_HEADER_MAX)
            yield from self.attempt(TO_FUNCTION)
        yield from super().read()

    def read_call(self, marker: str) -> Wait[None]:
        header = yield from read_header(self.source, marker)
        if header is None or not header.recipient.startswith(_FUNCTIONS):
            raise Malformed
        name = header.recipient.removeprefix(_FUNCTIONS)
        yield from self.source.gap()
        char = yield from self.source.peek()
        if char == "<":
            yield from self._without_arguments(name)
            return
        if char != "{":
            raise Malformed
        self.begin(name)
        yield from read_value(self.source, self.arguments)
        self.end()
        yield from self._skip_end()

    def _without_arguments(self, name: str) -> Wait[None]:
        for end in (CALL, END):
            if (yield from self.source.literal(end)):
                self.begin(name)
                self.arguments("{}")
                self.end()
                return
        raise Malformed

    def _skip_end(self) -> Wait[None]:
        self.source.hold()
        yield from self.source.gap()
        for end in (CALL, END, RETURN):
            if (yield from self.source.literal(end)):
                self.source.release()
                return
        self.content(self.source.release())
