"""Another length of drafts is tried as often as it may pay, and what that costs is earned before."""

from __future__ import annotations

import itertools

import pytest
from core.speculate.simulated_steps import lengths_over

from enginery.speculate.length import DraftLength


@pytest.mark.parametrize(("chance", "fewest", "most"), [(0.0, 0, 3), (0.3, 4, 8)])
def test_trials_are_seldom_where_guesses_could_not_pay_if_they_cost_nothing(chance: float, fewest: int, most: int) -> None:
    taken = lengths_over(DraftLength(7), lambda length: 1 + 0.5 * length, chances=[chance] * 7, num_requests=64, steps=8000)
    late = taken[4000:]
    begun = sum(length > 0 and before == 0 for before, length in itertools.pairwise(late))
    assert fewest <= begun <= most


def test_a_slow_step_before_a_trial_decides_nothing() -> None:
    """As where what the trial runs is captured while a plain step is still in flight."""
    length, taken = DraftLength(7), []
    for _ in range(1500):
        before, now = taken[-1] if taken else 0, length.of(16)
        taken.append(now)
        if before != now:
            length.took(16, before, 80.0)
            continue
        for _ in range(16 * (now > 0)):
            length.told([(now, 0)])
        length.took(16, now, 1 + 0.4 * (now > 0))
    assert taken.count(0) > 0.98 * len(taken)
    assert set(taken) > {0}


def test_a_trial_waits_for_steps_of_its_length() -> None:
    """Who asks may guess nothing for a while, though a trial has begun: such steps do not end it."""
    length = DraftLength(7)
    while not (tried := length.of(16)):
        length.took(16, 0, 1.0)
    for _ in range(20):
        length.took(16, 0, 1.0)
    assert length.of(16) == tried
    for _ in range(2):
        length.told([(tried, 0)])
        length.took(16, tried, 1.4)
    assert length.of(16) == 0


def test_where_nothing_is_guessed_though_something_should_be_no_trial_begins() -> None:
    """What a step of the wanted length takes is not known, so nothing can be compared with it."""
    length = DraftLength(7)
    wanted = length.of(4)
    for _ in range(50):
        length.took(4, 0, 1.0)
    assert length.of(4) == wanted > 0


def losing_trials(capture_s: float, *, steps: int = 4000) -> list[int]:
    """The lengths of steps, by the clock of who tells of them: what another length runs is captured when it is first run."""
    length, captured, taken, made = DraftLength(7), {(0, 0)}, list[int](), 0
    for _ in range(steps):
        verified, made = made, length.of(16)
        took_s = 1 + 0.5 * verified + capture_s * ((verified, made) not in captured)
        is_steady = verified == made == (taken[-1] if taken else 0)
        captured.add((verified, made))
        length.told([(verified, verified // 2)] * verified)
        length.passed(16, verified, made, took_s)
        if is_steady:
            length.took(16, made, took_s)
        taken.append(verified)
    return taken


def test_what_is_captured_for_a_trial_is_lost_by_it() -> None:
    """So the next ones wait until the hundredth has been earned."""
    trials = [sum(a == 0 < b for a, b in itertools.pairwise(losing_trials(capture_s))) for capture_s in (0.0, 100.0)]
    assert trials[0] > 4
    assert trials[1] == 1


def steps_until_a_trial(length: DraftLength, *, waiting_s: list[float]) -> int:
    """Of 16 requests that decode plainly, from the end of a trial on, which began after plain steps of so many seconds."""
    while not (tried := length.of(16)):
        length.passed(16, 0, 0, 1.0)
        length.took(16, 0, 1.0)
    for seconds in [*waiting_s, 1.0]:
        length.passed(16, 0, 0, seconds)
    for verified, made in [(0, tried), (tried, tried), (tried, tried), (tried, 0), (0, 0), (0, 0)]:
        length.passed(16, verified, made, 3.0)
        if verified == made == tried:
            length.took(16, tried, 3.0)
    steps = 0
    while not length.of(16):
        length.passed(16, 0, 0, 1.0)
        length.took(16, 0, 1.0)
        steps += 1
    return steps


def test_a_trial_that_waits_loses_nothing() -> None:
    """Until there are requests that the draft model follows, steps are plain ones, and some of them slow."""
    assert steps_until_a_trial(DraftLength(7), waiting_s=[5.0] * 50) == steps_until_a_trial(DraftLength(7), waiting_s=[])


def test_a_step_that_verifies_what_a_trial_guessed_is_of_it_though_it_guesses_nothing() -> None:
    length = DraftLength(7)
    while not (tried := length.of(16)):
        length.passed(16, 0, 0, 1.0)
        length.took(16, 0, 1.0)
    before = length._loads[4].lost_s
    length.passed(16, tried, 0, 60.0)
    assert length._loads[4].lost_s > before + 50


def test_what_guesses_win_pays_for_trials() -> None:
    """Where plain decoding is far slower, a longer length is tried soon, though what was captured took thirty steps."""
    length, steps = DraftLength(7, device="cuda"), 0
    while length.found(32) == 3:
        now = length.of(32)
        length.passed(32, now, now, 15.0 if steps in (6, 8) else 2.1 if now else 1.0)
        length.told([(now, now)])
        length.took(32, now, 2.1 if now else 1.0)
        steps += 1
    assert steps < 300


def test_plain_steps_among_guesses_win_nothing() -> None:
    """As while the draft model follows no request: what would be told with guesses was not."""
    length = DraftLength(7, device="cuda")
    for _ in range(4):
        length.told([(3, 3)] * 32)
        length.took(32, 3, 2.1)
    for now in [length.of(32)] * 2 + [3] * 3:  # a trial of none, and one that is not begun
        length.took(32, now, 2.1 if now else 1.0)
    before = length._loads[5].lost_s
    for _ in range(20):
        length.took(32, 0, 1.0)
    assert length._loads[5].lost_s == before
