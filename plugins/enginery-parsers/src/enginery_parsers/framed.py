"""Calls whose name stands between markers, with the arguments as JSON behind it: Kimi, MiniMax-Text, DeepSeek."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from enginery.api import ParserSetup
from enginery_parsers.calls import CallParser
from enginery_parsers.json_text import read_value
from enginery_parsers.source import Malformed, Marker, Wait


@dataclass(frozen=True, kw_only=True)
class FramedFormat:
    """A call is `begin`, the head, `separator`, the arguments, and those of `ends` that follow.

    sections: markers that may stand before `begin`. head: must match; its groups are `name` and, if the model names the call, `id`.
    again: begins a further call behind these ends.
    """

    sections: tuple[str, ...] = ()
    begin: str
    head: re.Pattern[str]
    separator: str
    ends: tuple[str, ...]
    again: str = ""


# docs/tool_call_guidance.md of Kimi K2: the id is the function's full name and the number of the call in the conversation.
KIMI: Final = FramedFormat(
    sections=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    begin="<|tool_call_begin|>",
    head=re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:]+):\d+)\s*|\s*(?:functions\.)?(?P<bare>[^\s:]+)\s*"),
    separator="<|tool_call_argument_begin|>",
    ends=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
)
# MiniMax-Text-01_Function_Call_Guide.md of the checkpoint.
MINIMAX_TEXT: Final = FramedFormat(
    begin="<function_call>",
    head=re.compile(r"(?:\s*```\w*\s*functions\.)?(?P<name>[^\s(`]+)\s*"),
    separator="(",
    ends=(")", "```"),
    again="functions.",
)


class FramedParser(CallParser):
    """Reads one `FramedFormat`."""

    held_max = 1_000

    def __init__(self, setup: ParserSetup, written: FramedFormat) -> None:
        self.begins = Marker(*written.sections, written.begin)
        self._written = written
        self._separator = Marker(written.separator, breaks=0)
        self._ids: set[str] = set()
        super().__init__(setup)

    def read_call(self, marker: str) -> Wait[None]:
        if marker in self._written.sections:
            yield from self.source.gap()
            if not (yield from self.source.literal(self._written.begin)):
                raise Malformed
        yield from self._read_one()
        while self._written.again and (yield from self.another("", self._written.again)):
            yield from self._read_one()
        self.content(self.source.release())

    def _read_one(self) -> Wait[None]:
        name, call_id = yield from self.read_head()
        yield from self.source.gap()
        if (yield from self.source.peek()) != "{":
            raise Malformed
        self.begin(name, "" if call_id in self._ids else call_id)
        self._ids.add(call_id)
        yield from read_value(self.source, self.arguments)
        self.end()
        yield from self.skip(*self._written.ends)

    def read_head(self) -> Wait[tuple[str, str]]:
        """Read all before the arguments. Returns the name and the id, which is empty if there is none."""
        match = self._written.head.fullmatch((yield from self.read_until_separator()))
        if match is None:
            raise Malformed
        found = match.groupdict()
        return found.get("name") or found.get("bare") or "", found.get("id") or ""

    def read_until_separator(self) -> Wait[str]:
        """Read up to the separator and past it. Returns the text before it."""
        text: list[str] = []
        if not (yield from self.source.until(self._separator, text.append)):
            raise Malformed
        return "".join(text)
