"""Calls whose arguments are pairs of tags, of which JSON text is made: GLM, LongCat, Qwen 3.5, MiMo, MiniMax M2."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from enginery.api import ParserSetup
from enginery_parsers.calls import CallParser
from enginery_parsers.source import Malformed, Marker, Wait

_NAME: Final = re.compile(r'[^\n<>"]+')
_JSON_TYPES: Final[Mapping[type, frozenset[str]]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"integer", "number"}),
    type(None): frozenset({"null"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_PYTHON_WORDS: Final[Mapping[str, str]] = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, kw_only=True)
class TaggedFormat:
    """A call is `begin`, the name, `name_end`, pairs of a key and a value, `end`.

    family: whose format it is, for errors. section, section_end: markers around one call, or around several if `many`; empty if
    there are none. A pair is `key`, the name, `key_end`, `value`, the value, `value_end`. breaks: line breaks at each end of a
    value that do not belong to it. python_words: the template writes True, False and None.
    """

    family: str
    section: str = ""
    section_end: str = ""
    many: bool = False
    begin: str
    name_end: str = ""
    key: str
    key_end: str
    value: str = ""
    value_end: str
    end: str
    breaks: int = 0
    python_words: bool = False


def _pairs(family: str, prefix: str) -> TaggedFormat:
    return TaggedFormat(
        family=family,
        begin=f"<{prefix}tool_call>",
        key=f"<{prefix}arg_key>",
        key_end=f"</{prefix}arg_key>",
        value=f"<{prefix}arg_value>",
        value_end=f"</{prefix}arg_value>",
        end=f"</{prefix}tool_call>",
    )


def _xml(family: str, *, breaks: int) -> TaggedFormat:
    return TaggedFormat(
        family=family,
        section="<tool_call>",
        section_end="</tool_call>",
        begin="<function=",
        name_end=">",
        key="<parameter=",
        key_end=">",
        value_end="</parameter>",
        end="</function>",
        breaks=breaks,
        python_words=True,
    )


GLM: Final = _pairs("GLM", "")
LONGCAT: Final = _pairs("LongCat", "longcat_")
QWEN: Final = _xml("Qwen 3.5", breaks=1)
MIMO: Final = _xml("MiMo", breaks=0)
MINIMAX: Final = TaggedFormat(
    family="MiniMax M2",
    section="<minimax:tool_call>",
    section_end="</minimax:tool_call>",
    many=True,
    begin='<invoke name="',
    name_end='">',
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    end="</invoke>",
)


class TaggedParser(CallParser):
    """Reads one `TaggedFormat`.

    Strings are written without quotes. What the tool's schema calls a string is streamed as one; another value is taken when it is
    whole: as JSON if it is of a type that the schema allows, otherwise as a string.
    """

    held_max = 1_000

    def __init__(self, setup: ParserSetup, written: TaggedFormat) -> None:
        self.begins = Marker(*filter(None, (written.section, written.begin)))
        self._written = written
        self._key_end = Marker(written.key_end, breaks=0)
        self._value_end = Marker(written.value_end, breaks=written.breaks)
        super().__init__(setup)

    def read_call(self, marker: str) -> Wait[None]:
        yield from self.source.gap()
        if marker == self._written.section and not (yield from self.source.literal(self._written.begin)):
            raise Malformed
        name = yield from self._read_name()
        self.begin(name)
        types = argument_types(self.tools[name].parameters)
        before = "{"
        while (yield from self._read_pair(types, before)):
            before = ", "
        self.arguments("{}" if before == "{" else "}")
        self.end()
        yield from self.source.breaks()
        if self._written.section_end:
            yield from self.skip(self._written.section_end)

    def _read_name(self) -> Wait[str]:
        name = ""
        while (yield from self.source.more()) and (part := self.source.run(_NAME)):
            name += part
        if not (yield from self.source.literal(self._written.name_end)):
            raise Malformed
        yield from self.source.gap()
        if (yield from self.source.peek()) != "<":
            raise Malformed
        return name.strip()

    def _read_pair(self, types: Mapping[str, frozenset[str]], before: str) -> Wait[bool]:
        """One argument; False if the call ends instead. Held until it is certain."""
        written = self._written
        self.source.hold()
        yield from self.source.gap()
        if (yield from self.source.literal(written.end)):
            self.source.release()
            return False
        key: list[str] = []
        if not (yield from self.source.literal(written.key)) or not (yield from self.source.until(self._key_end, key.append)):
            raise Malformed
        if written.value:
            yield from self.source.gap()
        if not (yield from self.source.literal(written.value)):
            raise Malformed
        yield from self.source.breaks(written.breaks)
        name = "".join(key).strip()
        allowed = types.get(name, frozenset())
        beginning = f"{before}{json.dumps(name, ensure_ascii=False)}: "
        if allowed == {"string"}:
            self.source.release()
            self.arguments(beginning + '"')
            found = yield from self.source.until(self._value_end, lambda text: self.arguments(_escaped(text)))
            if found:
                self.arguments('"')
        else:
            value: list[str] = []
            found = yield from self.source.until(self._value_end, value.append)
            if found:
                self.source.release()
                self.arguments(beginning + json_of("".join(value), allowed, python_words=written.python_words))
        if not found:
            raise Malformed
        return True


def argument_types(parameters: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The JSON types that a schema allows for each argument, empty for any."""
    properties = parameters.get("properties")
    found = properties if isinstance(properties, Mapping) else {}
    return {name: _types(schema, parameters) for name, schema in found.items()}


def resolved(schema: Any, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a schema refers to, if it refers to one of the definitions, or itself."""
    if not isinstance(schema, Mapping):
        return {}
    parts = str(schema.get("$ref", "")).split("/")
    definitions = parameters.get(parts[1]) if len(parts) == 3 and parts[0] == "#" else None
    found = definitions.get(parts[2]) if isinstance(definitions, Mapping) else schema
    return found if isinstance(found, Mapping) else {}


def json_of(text: str, allowed: frozenset[str], *, python_words: bool = False) -> str:
    """The JSON text of a value that is written as JSON, or as a string without quotes. python_words: None is null, and so on.

    Line breaks and other control characters in strings of JSON are escaped.
    """
    written = _PYTHON_WORDS.get(text.strip(), text) if python_words else text
    try:
        value = json.loads(written, parse_constant=_refuse, strict=False)
        if _CONTROL.search(written) and not _is_strict(written):
            # Half of a surrogate pair stays the escape that it was.
            written = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = _JSON_TYPES.get(type(value), frozenset())
    return written.strip() if fits & (allowed or fits) else json.dumps(text, ensure_ascii=False)


def _types(schema: Any, parameters: Mapping[str, Any]) -> frozenset[str]:
    """The types of a schema or of the alternatives in it; empty if it does not say."""
    whole = resolved(schema, parameters)
    alternatives = next((whole[word] for word in ("anyOf", "oneOf", "allOf") if isinstance(whole.get(word), list)), [whole])
    named = [_named_types(resolved(part, parameters)) for part in alternatives]
    return frozenset().union(*named) if all(named) else frozenset()


def _named_types(schema: Mapping[str, Any]) -> frozenset[str]:
    if isinstance(kind := schema.get("type"), str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    values = schema.get("enum")
    are_texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return frozenset({"string"} if are_texts else ())


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_strict(text: str) -> bool:
    """Whether JSON has no line breaks and the like in its strings."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)
