"""Names close to one that was not found."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean a or b?`, or an empty string when nothing is close."""
    close = get_close_matches(name, sorted(set(known)), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def known_names(known: Iterable[str]) -> str:
    """The names, sorted, or the word none."""
    return ", ".join(sorted(set(known))) or "none"
