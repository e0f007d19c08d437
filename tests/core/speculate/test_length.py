"""The length of drafts follows what they yield: by simulated steps of known duration and acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from core.speculate.simulated_steps import lengths_over, share

from enginery.speculate.length import LENGTHS, DraftLength


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


def rate_of(length: DraftLength, seconds: Callable[[int], float], *, chance: float, num_requests: int, tokens: int) -> float:
    """Tokens of a request in the time of a step without guesses, until each has so many. Times vary by a tenth."""
    draw, told, spent_s = random.Random(1), 0, 0.0
    while told < tokens * num_requests:
        now = length.of(num_requests)
        step_s = seconds(now) * draw.uniform(0.9, 1.1)
        for _ in range(num_requests):
            right = next((place for place in range(now) if draw.random() > chance), now)
            length.told([(now, right)])
            told += 1 + right
        length.took(num_requests, now, step_s)
        spent_s += step_s
    return told / num_requests / spent_s


@pytest.mark.parametrize("chance", [0.3, 0.8])
@pytest.mark.parametrize("num_requests", [1, 2, 4, 8, 16, 64])
def test_it_is_never_clearly_slower_than_no_guesses(num_requests: int, chance: float) -> None:
    """A row costs nothing, what it costs on a CPU, or too much. From the first token on, where that begins with no guesses."""
    a_row_s = {1: 0.15, 2: 0.15, 4: 0.3}.get(num_requests, 1.0)
    for seconds in (lambda length: 1 + 0.05 * length, lambda length: 1 + a_row_s * length, lambda length: 1 + 1.2 * length):
        length = DraftLength(7)
        first = rate_of(length, seconds, chance=chance, num_requests=num_requests, tokens=160)
        later = rate_of(length, seconds, chance=chance, num_requests=num_requests, tokens=400)
        assert later > 0.98
        assert first > (0.98 if num_requests > 4 else 0.85)


def test_guesses_that_pay_are_made_with_many_requests_too() -> None:
    length = DraftLength(7)
    rate_of(length, lambda length: 1 + 0.1 * length, chance=0.85, num_requests=32, tokens=1500)
    assert rate_of(length, lambda length: 1 + 0.1 * length, chance=0.85, num_requests=32, tokens=500) > 1.5


@pytest.mark.parametrize("num_requests", [8, 64, 256])
def test_a_length_is_found_that_pays_though_shorter_ones_do_not(num_requests: int) -> None:
    """As of the embedded model on a GPU: a verification of any length takes three plain steps, as nothing overlaps it."""

    def seconds(length: int) -> float:
        return 2.8 + 0.05 * length if length else 1.0

    taken = lengths_over(DraftLength(7, device="cuda"), seconds, chances=[0.85] * 7, num_requests=num_requests, steps=5000)
    assert share(taken, 7) + share(taken, 5) > 0.9


def test_a_gpu_begins_with_guesses_where_rows_cost_little() -> None:
    assert [DraftLength(7, device="cuda").of(count) for count in (1, 8, 32, 64, 256)] == [5, 3, 3, 3, 0]
    assert [DraftLength(7).of(count) for count in (1, 4, 8, 64)] == [5, 2, 0, 0]


@pytest.mark.parametrize(("num_right", "begins"), [(0, 0), (1, 3)])
def test_other_loads_begin_with_guesses_unless_they_were_seldom_right(num_right: int, begins: int) -> None:
    length = DraftLength(7, device="cuda")
    assert length.of(20) == 3
    assert length.found(128) == 3, "as far as is known; in idle moments that is asked of every load"
    for _ in range(100):
        length.told([(3, num_right)])
    assert length.of(128) == begins


@pytest.mark.parametrize(("a_verification_s", "begins"), [(2.1, 5), (9.0, 0)])
def test_a_load_begins_with_what_was_found_for_half_as_many(a_verification_s: float, begins: int) -> None:
    length = DraftLength(5, device="cuda")

    def seconds(taken: int) -> float:
        return a_verification_s + 0.05 * taken if taken else 1.0

    lengths_over(length, seconds, chances=[0.85] * 5, num_requests=32, steps=2000)
    assert length.found(32) == begins
    assert (length.found(64), length.found(128)) == (begins, 3), "of 128 no half is known"


def test_one_slow_step_changes_nothing() -> None:
    length = DraftLength(7)
    lengths_over(length, lambda length: 1 + 0.02 * length, chances=[0.95] * 7, num_requests=1, steps=600)
    before = length.of(1)
    length.took(1, before, 50.0)
    assert share(lengths_over(length, lambda length: 1 + 0.02 * length, chances=[0.95] * 7, num_requests=1, steps=400), 7) > 0.7


def test_no_guess_is_made_that_cannot_be_verified() -> None:
    """The rows of a step are limited: 256 requests with a guess each would have 512."""
    length, longest = DraftLength(7, most_rows=256, device="cuda"), {}
    for count in (1, 3, 31, 64, 85, 100, 128, 200, 256, 300):
        longest[count] = max(lengths_over(length, lambda length: 1.0, chances=[1.0] * 7, num_requests=count, steps=300))
        assert count * (1 + longest[count]) <= max(256, count)
    assert longest[200] == 0 < longest[64]


def test_tokens_beside_guesses_have_rows_too() -> None:
    combs = [DraftLength(7, most_rows=64, device="cuda", siblings=siblings) for siblings in (0, 1, 2, 3)]
    assert [comb.of(8) for comb in combs] == [3, 3, 2, 1]
    assert max(lengths_over(combs[3], lambda _: 1.0, chances=[1.0] * 7, num_requests=8, steps=300)) == 1


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
        length.told([(3, 1)])  # the first is always right, the second never
    assert length.told_each_step(0) == 1
    assert length.told_each_step(1) == pytest.approx(2, abs=0.01)
    assert length.told_each_step(3) == pytest.approx(2, abs=0.01)


def test_of_a_fixed_number_those_are_guessed_that_have_rows_and_one_to_keep_track() -> None:
    lengths = [DraftLength(4, fixed=4, most_rows=64, siblings=siblings) for siblings in (0, 1)]
    told = [[length.of(count) for count in (0, 1, 12, 16, 32, 64)] for length in lengths]
    assert told == [[4, 4, 4, 3, 1, 1], [4, 4, 2, 1, 1, 1]]
    assert DraftLength(0, fixed=0, most_rows=64).of(1) == 0


@pytest.mark.parametrize("slow", [2.0, 3.0])
def test_a_machine_that_is_slow_for_a_while_does_not_make_guesses_look_bad(slow: float) -> None:
    """Every step takes longer for 60 steps, so long after a trial of none that nothing else is known than what that took."""
    length, draw, taken = DraftLength(7, device="cuda"), random.Random(1), []
    for step in range(4000):
        now = length.of(32)
        for _ in range(8):
            length.told([(now, next((place for place in range(now) if draw.random() > 0.75), now))])
        length.took(32, now, (2.1 if now else 1.0) * (slow if step % 400 > 340 else 1.0) * draw.uniform(0.97, 1.03))
        taken.append(now)
    assert sum(now > 0 for now in taken) > 0.95 * len(taken)


def test_the_first_step_of_a_load_may_take_long() -> None:
    """As where its graph is captured: by what none take, known of a time before, guesses would be given up."""
    length = DraftLength(7, device="cuda")
    length.took(4, 0, 0.6)
    length.took(4, 3, 23.0)
    assert length.found(4) == 3
    for _ in range(3):
        length.told([(3, 3)])
        length.took(4, 3, 1.5)
    assert length.found(4) == 3


def test_one_step_of_many_requests_that_are_alike_says_no_more_than_a_step() -> None:
    """128 requests begin together, with the same first tokens: their guesses are wrong together, as long as that lasts."""
    length = DraftLength(7)
    for _ in range(50):
        length.told([(3, 3)] * 128)
    length.told([(3, 0)] * 128)
    assert length.told_each_step(3) > 3
    for _ in range(9):
        length.told([(3, 0)] * 128)
    assert length.told_each_step(3) < 1.2
