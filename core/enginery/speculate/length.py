"""How many tokens to guess: as many as give the most told tokens a second, by what was accepted and by what steps took.

A verification of L guesses tells 1 + a1 + a1 a2 + ... + a1..aL tokens on average, where aj is how often the guess at place j is
right if those before it were. It takes t(B, L) seconds with B requests, guessing included. Both are measured while the engine runs:
now and then another length is tried for a few steps, the next longer one, the next shorter one or none: a longer one is taken if it
gives a twelfth more, a shorter one if it gives a fiftieth. None is tried too because it is no neighbour: steps without guesses are
plain decoding, which may be faster than a length whose neighbours are both slower.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

LENGTHS: Final = (0, 1, 2, 3, 5, 7)
_FIRST: Final = ((2, 5), (8, 3), (32, 1))  # up to so many requests begin with so many guesses, others with none
_FEWEST_STEPS: Final = 8  # between trials, twice as many after each that changed nothing
_MOST_STEPS: Final = 256
_STEPS_OF_A_TRIAL: Final = 3
_GAIN_OF_MORE: Final = 1.08
_GAIN_OF_FEWER: Final = 1.02
_WEIGHT_OF_A_TIME: Final = 0.2
_WEIGHT_OF_A_GUESS: Final = 0.02
_ACCEPTED_AT_FIRST: Final = 0.7


def told_on_average(rates: Sequence[float]) -> float:
    """Tokens of a verification. rates: how often the guess at each place is right, if those before it are."""
    return 1.0 + float(sum(itertools.accumulate(rates, operator.mul)))


@dataclass
class _Load:
    """What is known of a number of requests, up to the next power of two. seconds: of a step, by length."""

    length: int
    seconds: dict[int, float] = field(default_factory=dict)
    trial: int | None = None
    steps: int = 0
    patience: int = _FEWEST_STEPS
    turn: int = 0


class DraftLength:
    """most: no longer than that. fixed: always so many, whatever is measured."""

    def __init__(self, most: int, *, fixed: int | None = None) -> None:
        self.fixed = fixed
        self._lengths = [length for length in LENGTHS if length <= most] if fixed is None else [fixed]
        self._accepted = [_ACCEPTED_AT_FIRST] * max(self._lengths)
        self._loads: dict[int, _Load] = {}

    @property
    def most(self) -> int:
        """The largest that there may be."""
        return self._lengths[-1]

    def of(self, num_requests: int) -> int:
        """For the next step of so many requests."""
        if self.fixed is not None or not num_requests:
            return self.most
        load = self._load(num_requests)
        return load.length if load.trial is None else load.trial

    def told(self, num_drafted: int, num_accepted: int) -> None:
        """What became of one request's guesses."""
        for place in range(min(num_accepted + 1, num_drafted, len(self._accepted))):
            was = self._accepted[place]
            self._accepted[place] = was + _WEIGHT_OF_A_GUESS * ((place < num_accepted) - was)

    def took(self, num_requests: int, length: int, seconds: float) -> None:
        """A step of so many requests that verified `length` guesses each and made as many."""
        if self.fixed is not None:
            return
        load = self._load(num_requests)
        was = load.seconds.get(length)
        load.seconds[length] = seconds if was is None else was + _WEIGHT_OF_A_TIME * (min(seconds, 4 * was) - was)
        load.steps += 1
        if load.trial is None and load.steps >= load.patience:
            self._begin_trial(load)
        elif load.trial is not None and load.steps >= _STEPS_OF_A_TRIAL:
            self._end_trial(load)

    def told_each_step(self, length: int) -> float:
        """Tokens that a verification of `length` guesses tells on average."""
        return told_on_average(self._accepted[:length])

    def _load(self, num_requests: int) -> _Load:
        size = (num_requests - 1).bit_length()
        if size not in self._loads:
            wanted = next((length for most, length in _FIRST if num_requests <= most), 0)
            length = max(each for each in self._lengths if each <= wanted)
            self._loads[size] = _Load(length)
        return self._loads[size]

    def _begin_trial(self, load: _Load) -> None:
        """Of the next longer one, the next shorter one and none in turn."""
        at = self._lengths.index(load.length)
        tried = (at + 1, at - 1, 0)[load.turn % 3]
        load.turn, load.steps = load.turn + 1, 0
        load.trial = self._lengths[tried] if 0 <= tried < len(self._lengths) and tried != at else None

    def _end_trial(self, load: _Load) -> None:
        trial, load.trial, load.steps = load.trial, None, 0
        assert trial is not None, "a trial has a length"
        if trial in load.seconds and load.length in load.seconds:
            rates = {length: self.told_each_step(length) / load.seconds[length] for length in (trial, load.length)}
            if rates[trial] > (_GAIN_OF_MORE if trial > load.length else _GAIN_OF_FEWER) * rates[load.length]:
                load.length, load.patience = trial, _FEWEST_STEPS
                load.turn -= 1  # on in this direction
                return
        load.patience = min(2 * load.patience, _MOST_STEPS)
