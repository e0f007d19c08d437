"""Names close to one that was not found."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from operator import attrgetter
from typing import Final

_WORD: Final = re.compile(r"[^\W_]+")
_BEGINNING: Final = 3  # letters that are enough to mean a name that begins with them


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean a or b?`, or an empty string when nothing is close. A long name costs no more than a short one."""
    close = sorted((edits, each) for each in set(known) if (edits := _edits(name, each)) is not None)
    return f"; did you mean {' or '.join(each for _, each in close[:3])}?" if close else ""


def known_names(known: Iterable[str]) -> str:
    """The names, sorted, or the word none."""
    return ", ".join(sorted(set(known))) or "none"


def _edits(name: str, known: str) -> int | None:
    """Letters to add and to take away; None where nobody writes `name` for `known`.

    `name` may be the beginning of `known`, have its words or some, or have more words or letters. Otherwise at most two letters may
    differ, or one in twelve of both names: GemmaForCausalLM is not LlamaForCausalLM, though they share a long end. Names with
    different numbers are never close.
    """
    if len(name) > 2 * len(known):
        return None
    letters, given, meant = len(name) + len(known), _plain(name), _plain(known)
    words, meant_words = set(_WORD.findall(given)), set(_WORD.findall(meant))
    alike = sum(map(attrgetter("size"), SequenceMatcher(None, given, meant, autojunk=False).get_matching_blocks()))
    edits = letters - 2 * alike
    is_part = len(name) >= _BEGINNING and (meant.startswith(given) or words <= meant_words)
    has_more = set() < meant_words < words or (given.startswith(meant) and 2 * len(name) <= 3 * len(known))
    is_slip = 1 < alike >= edits <= max(2, letters // 12) and _digits(name) == _digits(known)
    return edits if is_part or has_more or is_slip else None


def _plain(name: str) -> str:
    return name.casefold().replace("_", "-")


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))
