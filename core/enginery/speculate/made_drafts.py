"""What a draft model guessed, until it is asked for: guesses are made on the device at the end of each step.

On a device they are not read before the next step is built. That takes them from where they were made (`ON_DEVICE`), but for a
request whose next token depends on those before: for it they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from enginery.contracts.drafting import ON_DEVICE
from enginery.schedule.request import Request


class Made(NamedTuple):
    """The guesses of a step, so many of each request that sampled.

    places: of these, by id, how many tokens it had then, and its place among them. read: the guesses of a place. is_read: whether
    they are on the host, or reading them waits for the device.
    """

    places: Mapping[str, tuple[int, int]]
    num_drafts: int
    read: Callable[[int], tuple[int, ...]]
    is_read: bool


_NOWHERE: Final = (-1, -1)
_NOTHING: Final = Made({}, 0, lambda place: (), is_read=True)


class MadeDrafts:
    """The guesses of the newest step."""

    def __init__(self) -> None:
        self._made = _NOTHING

    def keep(self, made: Made | None) -> None:
        """In place of those of the step before."""
        self._made = made or _NOTHING

    def of(self, wanted: Sequence[tuple[Request, int]]) -> list[tuple[str, Sequence[int]]]:
        """What was kept of each, up to so many, by id: nothing where it has gone another way since.

        The tokens themselves where they are on the host, and for a request whose next token depends on those before.
        """
        made = self._made
        places, num_drafts, found = made.places, made.num_drafts, list[tuple[str, Sequence[int]]]()
        unread = [(ON_DEVICE,) * count for count in range(num_drafts + 1)]
        for request, most in wanted:
            known, place = places.get(request.request_id, _NOWHERE)
            if known != len(request.token_ids):
                continue
            reads = made.is_read or request.reads_tokens
            found.append((request.request_id, made.read(place)[:most] if reads else unread[min(num_drafts, most)]))
        return found
