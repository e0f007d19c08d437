"""Text with choices in it, to be written and to be recognised.

`[red|blue|]` is one of the alternatives, `<color>` a word of a list, `{hero}` a value that the caller chose. Choices nest.
The same template draws texts (`write`) and is compiled to a regular expression for what it can draw (`pattern`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

Words = Mapping[str, Sequence[str]]


class Slot(str):
    """The name of a value that is chosen outside of the template."""


class Choice(tuple["Parts | str", ...]):
    """Alternatives, equally likely."""


Parts = tuple["str | Slot | Choice", ...]


class Template:
    """One template. words: the lists that it may name between angle brackets."""

    def __init__(self, text: str, words: Words) -> None:
        self.text = text
        self.parts, end = _parse(text, 0, words)
        if end != len(text):
            raise ValueError(f"unbalanced bracket at {end} of {text!r}")

    def write(self, random: Callable[[], float], values: Mapping[str, str]) -> str:
        """One of its texts. random: as `random.Random.random`."""
        out: list[str] = []
        _write(self.parts, random, values, out)
        return "".join(out)

    def pattern(self, domains: Words) -> re.Pattern[str]:
        """What `write` can give, each slot being any of its domain. Group `NAME_1` is the first place of slot NAME."""
        return re.compile(_pattern(self.parts, domains, {}))

    def count(self) -> int:
        """How many ways there are to write it for one set of values."""
        return _count(self.parts)


def _parse(text: str, at: int, words: Words) -> tuple[Parts, int]:
    """Parts up to the end, or up to the `|` or `]` that ends an alternative."""
    parts: list[str | Slot | Choice] = []
    while at < len(text) and text[at] not in "|]":
        if text[at] == "[":
            alternatives: list[Parts | str] = []
            while text[at] in "[|":
                inner, at = _parse(text, at + 1, words)
                alternatives.append(_plain(inner))
            parts.append(Choice(alternatives))
            at += 1
        elif text[at] in "{<":
            end = text.index("}" if text[at] == "{" else ">", at)
            name = text[at + 1 : end]
            parts.append(Slot(name) if text[at] == "{" else Choice(words[name]))
            at = end + 1
        else:
            literal = re.compile(r"[^\[\]|{<]+").match(text, at)
            assert literal
            parts.append(literal[0])
            at = literal.end()
    return tuple(parts), at


def _plain(parts: Parts) -> Parts | str:
    """Text alone is quicker to write than parts."""
    if not parts:
        return ""
    return parts[0] if len(parts) == 1 and type(parts[0]) is str else parts


def _write(parts: Parts, random: Callable[[], float], values: Mapping[str, str], out: list[str]) -> None:
    for part in parts:
        if type(part) is Choice:
            chosen = part[int(random() * len(part))]
            if type(chosen) is str:
                out.append(chosen)
            else:
                _write(chosen, random, values, out)  # type: ignore[arg-type]
        else:
            out.append(values[part] if type(part) is Slot else part)  # type: ignore[arg-type]


def _pattern(parts: Parts, domains: Words, seen: dict[str, int]) -> str:
    def alternatives(options: Sequence[str]) -> str:
        return "|".join(map(re.escape, sorted(options, key=len, reverse=True)))

    out = []
    for part in parts:
        if isinstance(part, Slot):
            seen[part] = seen.get(part, 0) + 1
            out.append(f"(?P<{part}_{seen[part]}>{alternatives(domains[part])})")
        elif isinstance(part, Choice):
            out.append(
                f"(?:{'|'.join(re.escape(each) if isinstance(each, str) else _pattern(each, domains, seen) for each in part)})"
            )
        else:
            out.append(re.escape(part))
    return "".join(out)


def _count(parts: Parts) -> int:
    total = 1
    for part in parts:
        if isinstance(part, Choice):
            total *= sum(1 if isinstance(each, str) else _count(each) for each in part)
    return total
