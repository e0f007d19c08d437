"""A bound on the time that one answer's grammar may take of everybody's step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from enginery.contracts.grammars import GrammarState, RevocableGrammarState
from enginery.errors import RequestError

TOKEN_S: Final = 0.005  # of processor time for each token; usual masks take a tenth or less
SPARE_S: Final = 0.1


class BoundedState:
    """A state that fails once it has taken `SPARE_S` more of the step loop's processor time than `TOKEN_S` for each token."""

    def __init__(self, state: GrammarState) -> None:
        self._state = state
        self._mask_s = TOKEN_S  # what a mask may take
        self._over_s = 0.0

    @classmethod
    def of(cls, state: GrammarState) -> BoundedState:
        """One that can go back, if the state can."""
        return RevocableBoundedState(state) if isinstance(state, RevocableGrammarState) else cls(state)

    def fill_mask(self, row: np.ndarray) -> None:
        """Raises `RequestError` when the time is used up, too."""
        begun_s = time.thread_time()
        self._state.fill_mask(row)
        self._over_s = max(0.0, self._over_s + time.thread_time() - begun_s - self._mask_s)
        if self._over_s > SPARE_S:
            raise RequestError("the answer's grammar takes too much time at every token; make it simpler", param="grammar")

    def accept(self, token_id: int) -> bool:
        """Its time counts too."""
        begun_s = time.thread_time()
        try:
            return self._state.accept(token_id)
        finally:
            self._over_s += time.thread_time() - begun_s

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._state.is_finished


class RevocableBoundedState(BoundedState):
    """Implements `RevocableGrammarState`: of a state that can go back.

    What it is asked about drafts has a budget of its own, so that guesses cannot use up the time of the answer.
    """

    def __init__(self, state: RevocableGrammarState) -> None:
        super().__init__(state)
        self._revocable = state
        self._ahead_over_s = 0.0

    def rollback(self, count: int) -> None:
        """Its time counts too."""
        begun_s = time.thread_time()
        self._revocable.rollback(count)
        self._over_s += time.thread_time() - begun_s

    @contextmanager
    def ahead(self, num_masks: int) -> Iterator[None]:
        """What is asked inside is about drafts, and rolled back there: `num_masks` together may take `TOKEN_S`."""
        told_over_s, self._over_s, self._mask_s = self._over_s, self._ahead_over_s, TOKEN_S / num_masks
        try:
            yield
        finally:
            self._ahead_over_s, self._over_s, self._mask_s = self._over_s, told_over_s, TOKEN_S
