"""Reads Python literals as they come and passes them on as JSON."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Final

from enginery_parsers.json_text import DEPTH_MAX
from enginery_parsers.source import Malformed, Sink, Source, Wait

_ATOM_MAX: Final = 1_000
_BLANKS: Final = " \t\r\n"
_BLANKS_MAX: Final = 16
_SPACE: Final = re.compile(r"[ \t\r\n]+")
# Of a string, up to a quote that may end it.
_PLAIN: Final = re.compile(r"(?:[^\\'\"\x00-\x1f]++|['\"](?=[^ \t\r\n,)\]}:]))++")
_ATOM_PART: Final = re.compile(r"[-+.0-9A-Za-z_]+")
_JSON_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS: Final[Mapping[str, str]] = {
    "True": "true",
    "False": "false",
    "None": "null",
    **{word: word for word in ("true", "false", "null")},
}
_CLOSED_BY: Final = {"{": "}", "[": "]"}
_ESCAPES: Final[Mapping[str, str]] = {
    **{char: f"\\{char}" for char in '\\"/bfnrt'},
    "'": "'",
    "\n": "",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
}
_NUM_DIGITS: Final[Mapping[str, int]] = {"x": 2, "u": 4, "U": 8}
_AFTER_STRING: Final = frozenset(",)]}:")


def read_python(source: Source, sink: Sink) -> Wait[None]:
    """One value, to `sink` as JSON. Raises `Malformed` before the first character that cannot belong to it.

    Lists, objects, strings, numbers, and the words of Python or of JSON. A comma may stand before a closing bracket.
    """
    open_until: list[str] = []
    while True:
        yield from skip_space(source)
        char = yield from source.peek()
        if char in _CLOSED_BY and len(open_until) < DEPTH_MAX:
            sink(source.take(1))
            open_until.append(_CLOSED_BY[char])
            yield from skip_space(source)
            if (yield from source.peek()) != open_until[-1]:
                if char == "{":
                    yield from _read_key(source, sink)
                continue
        elif char in ("'", '"'):
            yield from _read_string(source, sink)
        else:
            yield from _read_atom(source, sink)
        while open_until:
            yield from skip_space(source)
            is_next = yield from source.literal(",")
            yield from skip_space(source)
            if (yield from source.literal(open_until[-1])):
                sink(open_until.pop())
            elif is_next:
                sink(", ")
                break
            else:
                raise Malformed
        else:
            return
        if open_until[-1] == "}":
            yield from _read_key(source, sink)


def skip_space(source: Source) -> Wait[None]:
    """Read white space, as much as there is."""
    while (yield from source.more()) and source.run(_SPACE):
        pass


def _read_key(source: Source, sink: Sink) -> Wait[None]:
    yield from _read_string(source, sink)
    yield from skip_space(source)
    if not (yield from source.literal(":")):
        raise Malformed
    sink(": ")


def _read_string(source: Source, sink: Sink) -> Wait[None]:
    quote = yield from source.peek()
    if quote not in ("'", '"'):
        raise Malformed
    source.take(1)
    sink('"')
    while (yield from source.more()):
        if text := source.run(_PLAIN):
            sink(text.replace('"', '\\"'))
            continue
        char = yield from source.peek()
        if char == "\\":
            yield from _read_escape(source, sink)
        elif char == quote and (yield from _closes(source)):
            source.take(1)
            sink('"')
            return
        else:
            sink(json.dumps(source.take(1))[1:-1])
    raise Malformed


def _closes(source: Source) -> Wait[bool]:
    """Whether the quote that is next ends its string. Templates write strings without escapes, so others stand within them."""
    for length in range(2, _BLANKS_MAX + 2):
        text = yield from source.ahead(length)
        if len(text) < length:
            return True
        if text[-1] not in _BLANKS:
            return text[-1] in _AFTER_STRING
    return True


def _read_escape(source: Source, sink: Sink) -> Wait[None]:
    """Read one escape. A backslash that begins none stands for itself."""
    char = (yield from source.ahead(2))[1:]
    if char in _ESCAPES:
        source.take(2)
        sink(_ESCAPES[char])
        return
    length = 2 + _NUM_DIGITS.get(char, 0)
    digits = (yield from source.ahead(length))[2:]
    if length == 2 or len(digits) < length - 2 or not re.fullmatch(r"[0-9a-fA-F]+", digits) or int(digits, 16) > 0x10FFFF:
        source.take(1)
        sink("\\\\")
        return
    source.take(length)
    sink(f"\\u{digits}" if char == "u" else json.dumps(chr(int(digits, 16)))[1:-1])


def _read_atom(source: Source, sink: Sink) -> Wait[None]:
    """Read a number or a word. One that the end of the text cuts is passed on as it is."""
    text = yield from source.run_ahead(_ATOM_PART, _ATOM_MAX)
    found = _WORDS.get(text) or (text if _JSON_NUMBER.fullmatch(text) else _number(text))
    if found:
        source.take(len(text))
        sink(found)
        return
    if source.ends_after(len(text)):
        sink(source.take(len(text)))
    raise Malformed


def _number(text: str) -> str:
    """A number that only Python writes so; empty if it is none."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return json.dumps(kind(text), allow_nan=False)
    return ""
