"""What a draft model guessed, until it is asked for: guesses are made on the device at the end of each step.

On a device they are not read before the next step is built. That takes them from where they were made (`ON_DEVICE`), but for a
request whose next token depends on those before: for it they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from enginery.contracts.drafting import ON_DEVICE, DraftTree
from enginery.schedule.request import Request
from enginery.speculate.combs import comb_parents


class Made(NamedTuple):
    """The guesses of a step, so many of each request that sampled: `num_drafts` tokens, which may be combs.

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
    """The guesses of the newest step. siblings: tokens beside each guess."""

    def __init__(self, siblings: int = 0) -> None:
        self.siblings = siblings
        self._made = _NOTHING

    @property
    def depth(self) -> int:
        """How many tokens they reach ahead."""
        return self._made.num_drafts // (1 + self.siblings)

    def keep(self, made: Made | None) -> None:
        """In place of those of the step before."""
        self._made = made or _NOTHING

    def of(self, wanted: Sequence[tuple[Request, int]]) -> list[tuple[str, Sequence[int]]]:
        """What was kept of each, up to so many, by id: nothing where it has gone another way since.

        The tokens themselves where they are on the host, and for a request whose next token depends on those before.
        """
        made = self._made
        places, num_drafts, found = made.places, made.num_drafts, list[tuple[str, Sequence[int]]]()
        whole = self._branching((ON_DEVICE,) * num_drafts)
        unread = [whole[:count] for count in range(num_drafts)] + [whole]
        for request, most in wanted:
            known, place = places.get(request.request_id, _NOWHERE)
            if known != len(request.token_ids):
                continue
            reads = made.is_read or request.reads_tokens
            found.append((request.request_id, self._branching(made.read(place))[:most] if reads else unread[min(num_drafts, most)]))
        return found

    def _branching(self, tokens: tuple[int, ...]) -> Sequence[int]:
        return DraftTree(tokens, comb_parents(self.depth, self.siblings)) if self.siblings and tokens else tokens
