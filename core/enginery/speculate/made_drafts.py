"""What a draft model guessed, until it is asked for: guesses are made on the device at the end of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from enginery.contracts.drafting import DraftAsk


class Made(NamedTuple):
    """Guesses at what follows, once a request has so many tokens."""

    num_tokens: int
    token_ids: tuple[int, ...]


class MadeDrafts:
    """The guesses of the newest step. Implements `enginery.contracts.drafting.HostDrafter`."""

    def __init__(self) -> None:
        self._by_key: Mapping[str, Made] = {}

    def keep(self, by_key: Mapping[str, Made]) -> None:
        """In place of those of the step before."""
        self._by_key = by_key

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        """What was kept of each, unless the request has gone another way since."""
        return [self._of(ask) for ask in asks]

    def forget(self, key: str) -> None:
        """The request has ended. What was kept goes with the next step."""

    def _of(self, ask: DraftAsk) -> tuple[int, ...]:
        made = self._by_key.get(ask.key)
        return made.token_ids[: ask.most] if made is not None and made.num_tokens == len(ask.token_ids) else ()
