"""What a draft model guessed, until it is asked for: guesses are made on the device at the end of each step.

On a device they are not read before the next step is built. That takes them from where they were made (`ON_DEVICE`), but for a
request whose next token depends on those before: for it they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from enginery.contracts.drafting import ON_DEVICE, DraftAsk


class Made(NamedTuple):
    """Guesses at what follows, once a request has so many tokens: how many they are, and how to read them.

    is_read: whether they are on the host, or reading them waits for the device.
    """

    num_tokens: int
    num_drafts: int
    read: Callable[[], tuple[int, ...]]
    is_read: bool = True


class MadeDrafts:
    """The guesses of the newest step."""

    def __init__(self) -> None:
        self._by_key: dict[str, Made] = {}

    def keep(self, by_key: dict[str, Made]) -> None:
        """In place of those of the step before."""
        self._by_key = by_key

    def forget(self, key: str) -> None:
        """The request has ended."""
        self._by_key.pop(key, None)

    def of(self, ask: DraftAsk, *, reads: bool) -> Sequence[int]:
        """What was kept, unless the request has gone another way since. reads: the tokens themselves are wanted."""
        made = self._by_key.get(ask.key)
        if made is None or made.num_tokens != len(ask.token_ids):
            return ()
        return made.read()[: ask.most] if reads or made.is_read else (ON_DEVICE,) * min(made.num_drafts, ask.most)
