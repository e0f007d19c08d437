"""LFM2: a list of calls as Python writes them, between two markers, or of JSON objects."""

from __future__ import annotations

import json
import re
from typing import Final

from enginery.api import ParserSetup
from enginery_parsers.calls import ObjectFormat, ObjectParser
from enginery_parsers.python_text import read_python, skip_space
from enginery_parsers.source import Malformed, Wait

LFM2: Final = ObjectFormat(begin="<|tool_call_start|>", end="<|tool_call_end|>", several=True)
_WORD: Final = re.compile(r"[^\s()\[\]{}=,'\"]+")
_WORD_MAX: Final = 200
_OBJECTS: Final = re.compile(r"[ \t\r\n]*\[?[ \t\r\n]*\{?")
_OBJECTS_MAX: Final = 32


class PythonicParser(ObjectParser):
    """Reads `[name(key=value, ...), ...]`. A call without a list around it is read too."""

    def __init__(self, setup: ParserSetup, written: ObjectFormat = LFM2) -> None:
        super().__init__(setup, written)
        self._end = written.end

    def read_call(self, marker: str) -> Wait[None]:
        if "{" in (yield from self.source.run_ahead(_OBJECTS, _OBJECTS_MAX)):
            yield from super().read_call(marker)
            return
        yield from self.source.gap()
        is_list = yield from self.source.literal("[")
        yield from self._read_one()
        while (yield from self.another("", ",")):
            yield from self._read_one()
        yield from self.skip(*(["]"] if is_list else []), self._end, blanks=self.source.release())

    def _read_one(self) -> Wait[None]:
        name = yield from self._read_word("(")
        before = "{"
        while not (yield from self._ends()):
            key = yield from self._read_word("=")
            if before == "{":
                self.begin(name)
            self.source.release()
            self.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            yield from read_python(self.source, self.arguments)
            self.source.hold()
            yield from skip_space(self.source)
            if not (yield from self.source.literal(",")) and (yield from self.source.peek()) != ")":
                raise Malformed
        if before == "{":
            self.begin(name)
        self.source.release()
        self.arguments("{}" if before == "{" else "}")
        self.end()

    def _ends(self) -> Wait[bool]:
        yield from skip_space(self.source)
        return (yield from self.source.literal(")"))

    def _read_word(self, then: str) -> Wait[str]:
        """Read a name and the character behind it, with white space around."""
        yield from skip_space(self.source)
        word = yield from self.source.run_ahead(_WORD, _WORD_MAX)
        self.source.take(len(word))
        yield from skip_space(self.source)
        if not word or not (yield from self.source.literal(then)):
            raise Malformed
        return word
