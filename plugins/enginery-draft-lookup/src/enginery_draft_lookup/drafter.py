"""An index for each request, which takes in what was told since it was last asked."""

from __future__ import annotations

from collections.abc import Sequence

from enginery.api import DraftAsk
from enginery_draft_lookup.index import NgramIndex
from enginery_draft_lookup.spec import LookupOptions


class LookupDrafter:
    """Implements `HostDrafter`."""

    def __init__(self, options: LookupOptions) -> None:
        self._options = options
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        """What followed the longest run of last tokens."""
        return [self._propose(ask) for ask in asks]

    def forget(self, key: str) -> None:
        """Drop its index."""
        self._indexes.pop(key, None)

    def _propose(self, ask: DraftAsk) -> list[int]:
        index = self._indexes.get(ask.key)
        if index is None:
            index = self._indexes[ask.key] = NgramIndex(least=self._options.least, most=self._options.most)
        index.extend(ask.token_ids[len(index) :])
        return index.propose(ask.most)
