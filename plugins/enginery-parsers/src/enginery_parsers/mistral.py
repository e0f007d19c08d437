"""Mistral: a list of objects behind a marker, or, of newer models, the name, another marker and the arguments."""

from __future__ import annotations

import re
from typing import Final

from enginery.api import ParserSetup
from enginery_parsers.calls import ObjectFormat, ObjectParser
from enginery_parsers.json_text import read_value
from enginery_parsers.source import Malformed, Marker, Wait

MISTRAL: Final = ObjectFormat(begin="[TOOL_CALLS]", end="", several=True)
ARGUMENTS: Final = "[ARGS]"
_HEAD: Final = re.compile(r"(?P<name>[^\s\[\]]+)(?:\[CALL_ID\](?P<id>\w{9}))?\s*")
_HEAD_MAX: Final = 1_000
_ID_CHARS: Final = 9


class MistralParser(ObjectParser):
    """Reads both. Ids are as long as the templates demand of what comes back."""

    def __init__(self, setup: ParserSetup) -> None:
        super().__init__(setup, MISTRAL)
        self._arguments = Marker(ARGUMENTS, breaks=0)
        self._ids: set[str] = set()

    def begin(self, name: str, call_id: str = "") -> None:
        call_id = "" if call_id in self._ids else call_id  # two of one answer are never the same
        self._ids.add(call_id)
        super().begin(name, call_id or self._new_id()[-_ID_CHARS:])

    def read_call(self, marker: str) -> Wait[None]:
        yield from self.source.gap()
        if (yield from self.source.peek()) in ("[", "{"):
            yield from super().read_call(marker)
            return
        self.source.hold(self.source.release(), most=_HEAD_MAX)
        head: list[str] = []
        found = yield from self.source.until(self._arguments, head.append)
        match = _HEAD.fullmatch("".join(head))
        yield from self.source.gap()
        if not found or match is None or (yield from self.source.peek()) != "{":
            raise Malformed
        self.begin(match["name"], match["id"] or "")
        yield from read_value(self.source, self.arguments)
        self.end()
        self.content(self.source.release())
