"""What a draft model guessed, until it is asked for: guesses are made on the device at the end of each step.

On a device they are not read before the next step is built. That takes them from where they were made (`ON_DEVICE`), but for a
request whose next token depends on those before: for it they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from enginery.contracts.drafting import ON_DEVICE


class Made(NamedTuple):
    """The guesses of a step, so many of each request that sampled.

    places: of these, by id, how many tokens it had then, and its place among them. read: the guesses of a place. is_read: whether
    they are on the host, or reading them waits for the device.
    """

    places: Mapping[str, tuple[int, int]]
    num_drafts: int
    read: Callable[[int], tuple[int, ...]]
    is_read: bool


_NOTHING: Final = Made({}, 0, lambda place: (), is_read=True)


class MadeDrafts:
    """The guesses of the newest step."""

    def __init__(self) -> None:
        self._made = _NOTHING

    def keep(self, made: Made | None) -> None:
        """In place of those of the step before."""
        self._made = made or _NOTHING

    def of(self, request_id: str, num_tokens: int, *, most: int, reads: bool) -> Sequence[int]:
        """What was kept, unless the request has gone another way since. reads: the tokens themselves are wanted."""
        made, (known, place) = self._made, self._made.places.get(request_id, (-1, -1))
        if known != num_tokens:
            return ()
        return made.read(place)[:most] if reads or made.is_read else (ON_DEVICE,) * min(made.num_drafts, most)
