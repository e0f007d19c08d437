"""What a grammar allows behind drafts that may turn out wrong: asked once for all drafts of a request, then taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from enginery.contracts.grammars import GrammarState
from enginery.engine.grammar_budget import RevocableBoundedState
from enginery.errors import RequestError

ALL: int = -1  # a word of a mask in which every token is allowed


class DraftMasks:
    """The masks of the rows behind each of one request's drafts."""

    def __init__(self, state: RevocableBoundedState, drafts: Sequence[int]) -> None:
        self._state = state
        self._drafts = drafts
        self._rows: list[np.ndarray] = []
        self._failure: RequestError | None = None
        self._is_asked = False

    def behind(self, count: int, num_words: int) -> np.ndarray:
        """[num_words] int32, behind the first `count` drafts; all tokens where it does not take these, as nobody gets there.

        Raises `RequestError` where the grammar failed here or at a draft before.
        """
        if not self._is_asked:
            self._is_asked = True
            self._ask(num_words)
        if count < len(self._rows):
            return self._rows[count]
        if self._failure is not None:
            raise self._failure
        return np.full(num_words, ALL, np.int32)

    def _ask(self, num_words: int) -> None:
        """Take the drafts as long as they are allowed, note the masks, and go back. An answer that ends needs no mask behind."""
        state, num_taken = self._state, 0
        with state.ahead(1 + len(self._drafts)):
            try:
                self._rows.append(_mask_of(state, num_words))
                for token in self._drafts:
                    if not self._rows[-1].view(np.uint32)[token >> 5] >> (token & 31) & 1:
                        break
                    if not state.accept(token):
                        self._rows.pop()  # too wide: who draws this token is to do so in a decoding row
                        raise RequestError(f"the grammar does not take the token {token}, which its mask allows", param="grammar")
                    num_taken += 1
                    if state.is_finished:
                        break
                    self._rows.append(_mask_of(state, num_words))
            except RequestError as failure:
                self._failure = failure
            state.rollback(num_taken)


def _mask_of(state: GrammarState, num_words: int) -> np.ndarray:
    row = np.empty(num_words, np.int32)
    state.fill_mask(row)
    return row


class GrammarAhead(NamedTuple):
    """A grammar behind the first `num_drafts` drafts: of its state there is the mask alone."""

    masks: DraftMasks
    num_drafts: int

    def fill_mask(self, row: np.ndarray) -> None:
        """As if the drafts had been accepted."""
        row[:] = self.masks.behind(self.num_drafts, len(row))
