"""What one answer's grammar may do to everybody's step: take so much time, and fail for its own request alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from enginery.contracts.grammars import CompiledGrammar, GrammarSpec, GrammarState, RevocableGrammarState
from enginery.errors import FAULTS, EnginError, RequestError
from enginery.plugin.boundary import checked
from enginery.plugin.loading import explain
from enginery.plugin.records import Offer

TOKEN_S: Final = 0.005  # of processor time for each token; usual masks take a tenth or less
SPARE_S: Final = 0.1
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class BoundedGrammar:
    """A plugin's grammar, whose answers are bounded."""

    offer: Offer[GrammarSpec]
    compiled: CompiledGrammar

    def start(self) -> BoundedState:
        """Raises `RequestError` that names the plugin where that fails."""
        try:
            return BoundedState.of(checked(self.offer, self.compiled.start(), GrammarState), self.offer.source)
        except FAULTS as error:  # a plugin's code
            raise _failure(self.offer.source, error) from error


class BoundedState:
    """A state that fails once it has taken `SPARE_S` more of the step loop's processor time than `TOKEN_S` for each token.

    What the plugin's code raises ends the request too, and is logged; nobody else's step ends for it.
    """

    def __init__(self, state: GrammarState, source: str) -> None:
        self._state, self._source = state, source
        self._mask_s = TOKEN_S  # what a mask may take
        self._over_s = 0.0
        self._failed: RequestError | None = None  # what the next mask raises

    @classmethod
    def of(cls, state: GrammarState, source: str) -> BoundedState:
        """One that can go back, if the state can. source: the plugin, as messages name it."""
        return RevocableBoundedState(state, source) if isinstance(state, RevocableGrammarState) else cls(state, source)

    def fill_mask(self, row: np.ndarray) -> None:
        """Raises `RequestError` when the time is used up, or the plugin fails, too."""
        if self._failed is not None:
            raise self._failed
        begun_s = time.thread_time()
        try:
            self._state.fill_mask(row)
        except FAULTS as error:  # a plugin's code
            raise _failure(self._source, error) from error
        self._over_s = max(0.0, self._over_s + time.thread_time() - begun_s - self._mask_s)
        if self._over_s > SPARE_S:
            raise RequestError("the answer's grammar takes too much time at every token; make it simpler", param="grammar")

    def accept(self, token_id: int) -> bool:
        """Its time counts too. A state that fails takes nothing. One that has failed is asked no more: the next mask says why."""
        return self._failed is not None or self._ask(lambda: self._state.accept(token_id))

    @property
    def is_finished(self) -> bool:
        """Its time counts too. A state that fails, or has failed, goes on to the next mask, which says why."""
        return self._failed is None and self._ask(lambda: self._state.is_finished)

    def _ask(self, ask: Callable[[], bool | None]) -> bool:
        begun_s = time.thread_time()
        try:
            return bool(ask())
        except FAULTS as error:  # a plugin's code
            self._failed = _failure(self._source, error)
            return False
        finally:
            self._over_s += time.thread_time() - begun_s


class RevocableBoundedState(BoundedState):
    """Implements `RevocableGrammarState`: of a state that can go back.

    What it is asked about drafts has a budget of its own, so that guesses cannot use up the time of the answer.
    """

    def __init__(self, state: RevocableGrammarState, source: str) -> None:
        super().__init__(state, source)
        self._revocable = state
        self._ahead_over_s = 0.0

    def rollback(self, count: int) -> None:
        """Its time counts too. What failed behind these tokens is forgotten; should this fail, the next mask says so."""
        self._failed = None
        self._ask(lambda: self._revocable.rollback(count))

    @contextmanager
    def ahead(self, num_masks: int) -> Iterator[None]:
        """What is asked inside is about drafts, and rolled back there: `num_masks` together may take `TOKEN_S`."""
        told_over_s, self._over_s, self._mask_s = self._over_s, self._ahead_over_s, TOKEN_S / num_masks
        try:
            yield
        finally:
            self._ahead_over_s, self._over_s, self._mask_s = self._over_s, told_over_s, TOKEN_S


def _failure(source: str, error: BaseException) -> RequestError:
    """What the request is told. A plugin may raise `RequestError`; anything else is a bug of it, and is logged."""
    if isinstance(error, RequestError):
        return error
    _log.error("%s failed in the grammar of an answer, which ends", source, exc_info=error)
    why = str(error) if isinstance(error, EnginError) else f"{source} failed in the answer's grammar: {explain(error)}"
    return RequestError(why, param="grammar")
