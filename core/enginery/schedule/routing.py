"""Which of several a request goes to: replicas behind one front, or lanes of one scheduler.

Pure: what is known of them comes in, and a number goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A replica, or a lane, as one request meets it.

    waiting: tokens that it has yet to compute; a request that decodes has one. cached: tokens of the request's prompt that it has
    already. num_sent: requests that it was ever sent. serves: whether it takes requests. is_silent: it has said nothing for long.
    is_full: its queue has no room.
    """

    waiting: int
    cached: int
    num_sent: int
    serves: bool = True
    is_silent: bool = False
    is_full: bool = False


def choose(num_prompt: int, candidates: Sequence[Candidate]) -> int | None:
    """The place of the one that comes to the end of a prompt of so many tokens with the least work. None: none serves.

    A silent or a full one only if all are. Of equals the one that was sent less, so that their caches differ; then the first.
    """

    def work(place: int) -> tuple[bool, bool, int, int, int]:
        found = candidates[place]
        return found.is_silent, found.is_full, found.waiting + max(1, num_prompt - found.cached), found.num_sent, place

    return min((place for place, found in enumerate(candidates) if found.serves), key=work, default=None)
