"""How many tokens to guess: as many as give the most told tokens a second, by what was accepted and by what steps took.

A verification of L guesses tells 1 + a1 + a1 a2 + ... + a1..aL tokens on average, where aj is how often the guess at place j is
right if those before it were. It takes t(B, L) seconds with B requests, guessing included. Both are measured while the engine runs:
now and then others are tried for a few steps, none, longer ones in turn and the next shorter one: a longer one is taken if it gives
a twelfth more, a shorter one if it gives a fiftieth. None, as plain steps overlap, and so five guesses may pay where one does not.

Speculation must not be slower than plain decoding. So a load that begins with guesses tries none after a few steps, and what
trials have lost, by what they told in their time, may be a hundredth of all the time so far and a tenth of what guesses won
lately: what is captured for one is lost too. A longer length that was never tried is taken to lose as much time as it
takes. Guesses that become seldom right are given up without a trial. Where they are so seldom right that they would not pay if they
cost nothing, other loads begin without them, and a trial only sees whether that has changed, and is seldomer.

A drafter of the host finds guesses for some requests, in some steps, and all requests get as many rows. So what pays is found anew
for each step (`paying`): guesses are verified if what they tell on average takes less time than without. A load that begins with
guesses tries so many as soon as some are found; other lengths, and what did not pay, are tried within the hundredth.

A draft model does not follow steps without guesses, and guesses badly for requests of which it has followed little. So who asks
takes none until there is a request that it has followed, or that begins, and tells of no others; a trial waits until then.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from enginery.speculate.combs import num_verified

LENGTHS: Final = (0, 1, 2, 3, 5, 7)
HOST_LENGTHS: Final = (0, 1, 3, 7)  # a guess of the host costs a row alone, and each length is captured for each number of requests
# Up to so many requests begin with so many guesses, where nothing is known of half as many. On CPUs each row costs, on GPUs few do.
FIRST_ON: Final = {"cpu": ((2, 5), (4, 2)), "cuda": ((2, 5), (128, 3))}
_BEFORE_THE_FIRST_TRIAL: Final = 4
_FEWEST_STEPS: Final = 8  # between trials, twice as many after each that changed nothing
_MOST_STEPS: Final = 256
_STEPS_WITHOUT_HOPE: Final = 512
_STEPS_OF_A_TRIAL: Final = 2
_STEPS_AROUND_IT: Final = 3  # that verify what steps of another length made, or wait for what is captured
_MOST_LOST: Final = 0.01
_OF_GAINS: Final = 0.1
_MOST_SAVED: Final = 16  # steps
_GAIN_OF_MORE: Final = 1.08
_GAIN_OF_FEWER: Final = 1.02
_WEIGHT_OF_A_TIME: Final = 0.2
_LONGEST_TIME: Final = 1.25  # times what was measured: more is something else, as a graph that is captured
_WEIGHT_OF_A_GUESS: Final = 0.02  # at least; the first ones have more
_WEIGHT_OF_A_STEP: Final = 0.25  # at most
_GUESSES_AT_FIRST: Final = 4  # that the share below is worth
_ACCEPTED_AT_FIRST: Final = 0.7


def told_on_average(rates: Sequence[float]) -> float:
    """Tokens of a verification. rates: how often the guess at each place is right, if those before it are."""
    return 1.0 + float(sum(itertools.accumulate(rates, operator.mul)))


@dataclass
class _Load:
    """What is known of a number of requests, up to the next power of two. lengths: those there may be. seconds: of a step, by
    length. gap_s: by how much a plain step takes longer behind one that was verified. around: steps of the last trial to come.
    last: how many the last step verified and its seconds, if it is of no trial. lost_s: by trials; below 0 they may lose as much.
    """

    lengths: list[int]
    length: int
    seconds: dict[int, float] = field(default_factory=dict)
    gap_s: float = 0.0
    trial: int | None = None
    steps: int = 0
    around: int = 0
    last: tuple[int, float] | None = None
    patience: int = _BEFORE_THE_FIRST_TRIAL
    turn: int = 0
    spent_s: float = 0.0
    lost_s: float = 0.0

    def note(self, length: int, seconds: float) -> None:
        """What a step of that length took. One slow step says little, and less than half of what was measured says it was wrong.
        What the first of a length took is no measure: graphs were captured. inf stands for it."""
        was = self.seconds.get(length)
        if was is None or 2 * seconds < was:
            self.seconds[length] = seconds
        else:
            self.seconds[length] += _WEIGHT_OF_A_TIME * (min(seconds, _LONGEST_TIME * was) - was)

    def took(self, length: int, seconds: float) -> None:
        """As `DraftLength.took`. Where the length that is taken becomes slower or faster, the machine or the contexts are to blame:
        others, measured some time ago, are by now as well."""
        was = self.seconds.get(length, math.inf)
        self.note(length, seconds if length in self.seconds else math.inf)
        if length == self.length and was < math.inf:
            ratio = self.seconds[length] / was
            self.seconds.update({other: ratio * each for other, each in self.seconds.items() if other != length})

    def won(self, length: int, told: float, seconds: float) -> None:
        """What a step that told so many tokens of a request took less than plain ones do: trials may lose some of it."""
        if 0 < length == self.length and 0 in self.seconds and (won_s := told * self.seconds[0] - seconds) > 0:
            self.lost_s = max(-_MOST_SAVED * self.seconds[length], self.lost_s - _OF_GAINS * won_s)

    def verified(self, length: int, seconds: float, *, late: bool) -> None:
        """As `DraftLength.verified`. Plain steps that began late say what they take longer for that."""
        if length:
            self.note(length, seconds if length in self.seconds else math.inf)
        elif not late:
            self.note(0, seconds)
        elif 0 in self.seconds:
            gap_s = min(max(0.0, seconds - self.seconds[0]), self.seconds[0])  # more is something else
            self.gap_s += _WEIGHT_OF_A_TIME * (gap_s - self.gap_s)

    def paying(self, told: Mapping[int, float]) -> int:
        """The length with the most tokens a second, 0 where plain ones have, or one to try. told: tokens of a request, for each."""
        rates = {length: tokens / (self.seconds.get(length, math.inf) + self.gap_s) for length, tokens in told.items()}
        rates[0] = _GAIN_OF_FEWER / self.seconds[0]
        best, unknown = max(rates, key=rates.__getitem__), [length for length in told if not rates[length]]
        if self.length in unknown:
            return self.length
        tried = unknown[0] if unknown else max(told)
        lost_s = min(self.seconds[0], self.seconds.get(tried, math.inf) - told[tried] / rates[best])
        return tried if self.lost_s + lost_s <= _MOST_LOST * self.spent_s else best


def _first_length(loads: Mapping[int, _Load], num_requests: int, first: Sequence[tuple[int, int]]) -> int:
    """What was found for half as many requests, once there was a trial; else of `first`."""
    half = loads.get((num_requests - 1).bit_length() - 1)
    if half is not None and half.patience > _BEFORE_THE_FIRST_TRIAL:
        return half.length
    return next((length for most, length in first if num_requests <= most), 0)


class DraftLength:
    """most: no longer than that. fixed: always so many, or those that have rows, and one at least, as a draft model that guesses
    nothing loses track. device: its kind, for what to begin with.
    most_rows: of a step that verifies, in which each request has a row more than guesses; of lengths that are measured none is
    longer, as it would be made for nothing. siblings: beside each guess, which have rows too. lengths: those that are measured.
    """

    def __init__(
        self,
        most: int,
        *,
        fixed: int | None = None,
        device: str = "cpu",
        most_rows: int = sys.maxsize,
        siblings: int = 0,
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        self.fixed, self._first, self._most_rows, self._siblings = fixed, FIRST_ON[device], most_rows, siblings
        self._lengths = [length for length in lengths if length <= most] if fixed is None else [fixed]
        self.most = self._lengths[-1]
        self._accepted = [_ACCEPTED_AT_FIRST] * max(self._lengths)
        self._num_guesses = [_GUESSES_AT_FIRST] * len(self._accepted)
        self._loads: dict[int, _Load] = {}

    def of(self, num_requests: int) -> int:
        """For the next step of so many requests."""
        if self.fixed is not None or not num_requests:
            return min(self.most, max(1, (self._most_rows // max(1, num_requests) - 1) // (1 + self._siblings)))
        load = self._load(num_requests)
        return load.length if load.trial is None else load.trial

    def found(self, num_requests: int) -> int:
        """The same, whatever is being tried."""
        return self.most if self.fixed is not None or not num_requests else self._load(num_requests).length

    def paying(self, counts: Sequence[int], num_requests: int) -> int:
        """How many guesses of a request to verify in a step of so many, of some of which `counts` were found. 0: none pay."""
        size = (num_requests - 1).bit_length()
        room = max(0, min(max(counts, default=0), self.most, (self._most_rows >> size) - 1))
        if self.fixed is not None or not room:
            return room
        load = self._loads.get(size)
        if load is None or 0 not in load.seconds:
            return 0
        lengths, more = load.lengths, [(self.told_each_step(length) - 1) / num_requests for length in range(room + 1)]
        return load.paying({each: 1 + sum(more[min(count, each)] for count in counts) for each in lengths if 0 < each <= room})

    def told(self, outcomes: Iterable[tuple[int, int]]) -> None:
        """What became of one step's guesses: of each request how many were verified, and how many were right. Requests that begin
        together may be alike, so that one step says no more than so much, however many they are."""
        counted = Counter(outcomes)
        for place, was in enumerate(self._accepted):
            tried = sum(times for (drafted, accepted), times in counted.items() if place < drafted and place <= accepted)
            if not tried:
                return
            right = sum(times for (_, accepted), times in counted.items() if place < accepted)
            self._num_guesses[place] += tried
            weight = min(_WEIGHT_OF_A_STEP, max(_WEIGHT_OF_A_GUESS * tried, tried / self._num_guesses[place]))
            self._accepted[place] = was + weight * (right / tried - was)

    def verified(self, num_requests: int, length: int, seconds: float, *, told: float, late: bool) -> None:
        """A step of so many requests that verified `length` guesses of some, and told so many tokens of each on average.

        late: it was launched after the one before was told.
        """
        load = self._loads.setdefault((num_requests - 1).bit_length(), self._load(num_requests))
        load.spent_s += seconds
        if (length or late) and 0 in load.seconds:
            load.lost_s = max(0.0, load.lost_s + seconds - told * load.seconds[0])
        load.verified(length, seconds, late=late)

    def passed(self, num_requests: int, verified: int, made: int, seconds: float) -> None:
        """Any step of so many requests. What those of a trial take longer than their tokens usually do is lost, and what the one
        before it does, as what the trial's first step runs may be captured meanwhile."""
        load = self._loads.get((num_requests - 1).bit_length())
        if load is None:
            return
        before, load.last = load.last, (verified, seconds)
        if load.around or (load.trial is not None and load.trial in (verified, made)):
            usual_s = load.seconds[load.length] / self.told_each_step(load.length)
            for length, each_s in (before, load.last) if before else (load.last,):
                load.lost_s = max(min(0.0, load.lost_s), load.lost_s + each_s - usual_s * self.told_each_step(length))
            load.around, load.last = max(0, load.around - 1), None

    def took(self, num_requests: int, length: int, seconds: float) -> None:
        """A step of so many requests that verified `length` guesses each and made as many."""
        if self.fixed is not None:
            return
        load = self._loads.setdefault((num_requests - 1).bit_length(), self._load(num_requests))
        load.took(length, seconds)
        wanted = load.length if load.trial is None else load.trial
        load.steps, load.spent_s = load.steps + (length == wanted), load.spent_s + seconds
        if load.trial is None:
            load.won(length, self.told_each_step(length), seconds)
            if load.length and load.steps >= _BEFORE_THE_FIRST_TRIAL and 0 in load.seconds and self._gains(load, 0):
                load.length = 0  # guesses are seldomer right than they were
            if load.steps >= load.patience:
                self._begin_trial(load)
        elif load.steps >= _STEPS_OF_A_TRIAL:
            self._end_trial(load)

    def told_each_step(self, length: int) -> float:
        """Tokens that a verification of `length` guesses tells on average."""
        return told_on_average(self._accepted[:length])

    def _load(self, num_requests: int) -> _Load:
        """Of one of which no time is known, as it begins."""
        size = (num_requests - 1).bit_length()
        if size in self._loads:
            return self._loads[size]
        wanted = _first_length(self._loads, num_requests, self._first)
        most_rows = self._most_rows >> size  # of a request: its own, and those of guesses and of what is beside them
        lengths = [length for length in self._lengths if not length or 1 + num_verified(length, self._siblings) <= most_rows]
        begun = max(length for length in lengths if length <= wanted)
        return _Load(lengths, begun if self._may_pay(begun) else 0)

    def _may_pay(self, length: int) -> bool:
        """Whether so many guesses would tell clearly more tokens a second than none, if they cost nothing."""
        return self.told_each_step(length) > _GAIN_OF_MORE

    def _begin_trial(self, load: _Load) -> None:
        """Of none, a longer one and the next shorter one in turn, if there is time to lose for it: else that is saved."""
        at = load.lengths.index(load.length)
        further = load.turn // 3 % (len(load.lengths) - at) if self._may_pay(load.lengths[-1]) else 0
        tried = (0, at + 1 + further, at - 1)[load.turn % 3]
        load.steps = 0
        if not 0 <= tried < len(load.lengths) or tried == at:
            load.turn += 1
        elif not tried or load.lost_s + self._lost_by(load, load.lengths[tried]) * (tried > at) <= _MOST_LOST * load.spent_s:
            load.turn, load.trial = load.turn + 1, load.lengths[tried]

    def _lost_by(self, load: _Load, length: int) -> float:
        """Seconds that a trial of this length loses: what its tokens take at the length that was found best is not lost."""
        usual_s = load.seconds[load.length]
        told_s = usual_s * self.told_each_step(length) / self.told_each_step(load.length)
        return (_STEPS_OF_A_TRIAL + _STEPS_AROUND_IT) * max(0.0, load.seconds.get(length, told_s + usual_s) - told_s)

    def _gains(self, load: _Load, length: int) -> bool:
        """Whether this length tells clearly more tokens a second than the one that is taken."""
        rates = {each: self.told_each_step(each) / load.seconds[each] for each in (length, load.length)}
        return rates[length] > (_GAIN_OF_MORE if length > load.length else _GAIN_OF_FEWER) * rates[load.length]

    def _end_trial(self, load: _Load) -> None:
        trial, load.trial, load.steps, load.around = load.trial, None, 0, _STEPS_AROUND_IT
        assert trial is not None, "a trial has a length"
        if trial in load.seconds and load.length in load.seconds and self._gains(load, trial):
            load.length, load.patience = trial, _FEWEST_STEPS
            load.turn -= 1  # on in this direction
            return
        load.patience = min(2 * load.patience, _MOST_STEPS) if self._may_pay(load.lengths[-1]) else _STEPS_WITHOUT_HOPE
