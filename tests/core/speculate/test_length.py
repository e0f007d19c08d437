"""The length of drafts follows what they yield: by simulated steps of known duration and acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from enginery.speculate.length import LENGTHS, DraftLength


def lengths_over(
    length: DraftLength, seconds: Callable[[int], float], *, chances: list[float], num_requests: int, steps: int
) -> list[int]:
    """What is taken step by step, where the guess at place j is right with chances[j] if those before it were."""
    draw, taken = random.Random(1), []
    for _ in range(steps):
        now = length.of(num_requests)
        taken.append(now)
        for _ in range(min(num_requests, 4)):
            right = next((place for place in range(now) if draw.random() > chances[place]), now)
            length.told(now, right)
        length.took(num_requests, now, seconds(now) * draw.uniform(0.97, 1.03))
    return taken


def share(taken: list[int], length: int) -> float:
    late = taken[len(taken) // 2 :]
    return late.count(length) / len(late)


@pytest.mark.parametrize(
    ("num_requests", "a_guess_s", "chance", "best"),
    [(1, 0.02, 0.95, 7), (1, 1.5, 0.9, 0), (64, 0.02, 0.95, 7), (64, 0.6, 0.3, 0), (16, 0.05, 0.0, 0)],
)
def test_the_length_becomes_the_one_with_the_most_tokens_a_second(
    num_requests: int, a_guess_s: float, chance: float, best: int
) -> None:
    taken = lengths_over(
        DraftLength(7), lambda length: 1 + a_guess_s * length, chances=[chance] * 7, num_requests=num_requests, steps=1500
    )
    assert share(taken, best) > 0.8


def test_it_follows_when_guesses_become_right() -> None:
    length = DraftLength(7)
    bad = lengths_over(length, lambda length: 1 + 0.2 * length, chances=[0.02] * 7, num_requests=4, steps=800)
    assert share(bad, 0) > 0.8
    good = lengths_over(length, lambda length: 1 + 0.2 * length, chances=[0.98] * 7, num_requests=4, steps=3000)
    assert share(good, 7) + share(good, 5) > 0.7


def test_one_slow_step_changes_nothing() -> None:
    length = DraftLength(7)
    lengths_over(length, lambda length: 1 + 0.02 * length, chances=[0.95] * 7, num_requests=1, steps=600)
    before = length.of(1)
    length.took(1, before, 50.0)
    assert share(lengths_over(length, lambda length: 1 + 0.02 * length, chances=[0.95] * 7, num_requests=1, steps=400), 7) > 0.7


def test_loads_are_told_apart() -> None:
    length = DraftLength(7)
    lengths_over(length, lambda length: 1 + 2.0 * length, chances=[0.9] * 7, num_requests=64, steps=300)
    assert length.of(64) == 0
    assert length.of(1) > 0


def test_what_is_asked_for_stays() -> None:
    length = DraftLength(7, fixed=3)
    taken = lengths_over(length, lambda length: 1 + 5.0 * length, chances=[0.0] * 7, num_requests=8, steps=200)
    assert set(taken) == {3}
    assert length.most == 3


def test_none_is_longer_than_the_drafter_is_good_for() -> None:
    length = DraftLength(4)
    taken = lengths_over(length, lambda length: 1.0, chances=[1.0] * 7, num_requests=2, steps=600)
    assert max(taken) == 3
    assert length.most == max(each for each in LENGTHS if each <= 4)
    assert length.of(0) == 3


def test_tokens_of_a_verification() -> None:
    length = DraftLength(7)
    for _ in range(2000):
        length.told(3, 1)  # the first is always right, the second never
    assert length.told_each_step(0) == 1
    assert length.told_each_step(1) == pytest.approx(2, abs=0.01)
    assert length.told_each_step(3) == pytest.approx(2, abs=0.01)
