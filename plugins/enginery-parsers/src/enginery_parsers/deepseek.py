"""DeepSeek: calls in a section, between markers."""

from __future__ import annotations

import re
from typing import Final

from enginery_parsers.framed import FramedFormat, FramedParser
from enginery_parsers.source import Malformed, Wait


def tag(words: str) -> str:
    """A marker as the family writes it: U+FF5C for the bar."""
    return f"<\uff5c{words}\uff5c>"


CALLS_BEGIN: Final = tag("tool▁calls▁begin")
CALL_BEGIN: Final = tag("tool▁call▁begin")
SEPARATOR: Final = tag("tool▁sep")
CALL_END: Final = tag("tool▁call▁end")
CALLS_END: Final = tag("tool▁calls▁end")
_NAME: Final = re.compile(r"[^\n`]+")

DEEPSEEK: Final = FramedFormat(
    sections=(CALLS_BEGIN,),
    begin=CALL_BEGIN,
    head=re.compile(r"\s*(?P<name>.*?)\s*", re.DOTALL),
    separator=SEPARATOR,
    ends=("```", CALL_END, CALLS_END),
)


class DeepSeekV3Parser(FramedParser):
    """V3 and R1: the word `function`, the separator, the name, and the arguments in a fenced block of JSON."""

    def read_head(self) -> Wait[tuple[str, str]]:
        if (yield from self.read_until_separator()) != "function":
            raise Malformed
        name = ""
        while (yield from self.source.more()) and (part := self.source.run(_NAME)):
            name += part
        yield from self.source.gap()
        if (yield from self.source.literal("```")):
            yield from self.source.literal("json")
        return name.strip(), ""
