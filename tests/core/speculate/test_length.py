"""The length of drafts follows what they yield: by simulated steps of known duration and acceptance."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from enginery.speculate.length import HOST_LENGTHS, LENGTHS, DraftLength
from enginery.worker.paths.decode_graphs import graph_sizes


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
            length.told([(now, right)])
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


@pytest.mark.parametrize(("chance", "fewest", "most"), [(0.0, 0, 3), (0.3, 4, 8)])
def test_trials_are_seldom_where_guesses_could_not_pay_if_they_cost_nothing(chance: float, fewest: int, most: int) -> None:
    taken = lengths_over(DraftLength(7), lambda length: 1 + 0.5 * length, chances=[chance] * 7, num_requests=64, steps=8000)
    late = taken[4000:]
    begun = sum(length > 0 and before == 0 for before, length in itertools.pairwise(late))
    assert fewest <= begun <= most


def test_one_slow_step_changes_nothing() -> None:
    length = DraftLength(7)
    lengths_over(length, lambda length: 1 + 0.02 * length, chances=[0.95] * 7, num_requests=1, steps=600)
    before = length.of(1)
    length.took(1, before, 50.0)
    assert share(lengths_over(length, lambda length: 1 + 0.02 * length, chances=[0.95] * 7, num_requests=1, steps=400), 7) > 0.7


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


def found_length(seconds: dict[int, float], *, num_requests: int, right: int, most_rows: int = 1 << 20) -> DraftLength:
    """Of a drafter of the host: so many guesses were right each time, and what steps take has been measured, for a while."""
    length = DraftLength(7, device="cuda", most_rows=most_rows, lengths=HOST_LENGTHS)
    for _ in range(400):
        length.told([(7, right)])
    for _ in range(3):
        for each, takes_s in sorted(seconds.items()):
            length.verified(num_requests, each, takes_s, told=takes_s / seconds[0], late=False)
    return length


@pytest.mark.parametrize(("takes_s", "counts", "verified"), [(1.2, [3], 0), (1.01, [3], 3), (1.2, [3] * 9, 3), (5.0, [3] * 64, 0)])
def test_what_few_requests_have_is_verified_where_it_pays(takes_s: float, counts: list[int], verified: int) -> None:
    """All 64 get as many rows: one request's three right guesses pay for a hundredth of the time, and not for a fifth."""
    times = {0: 1.0} | {each: 1 + (takes_s - 1) * each / 3 for each in (1, 2, 3)}
    assert found_length(times, num_requests=64, right=7).paying(counts, 64) == verified


def test_guesses_are_cut_to_the_length_that_pays_most() -> None:
    """The first is right, the others never: each has a row."""
    times = {each: 1 + 0.1 * each for each in LENGTHS}
    length = found_length(times, num_requests=2, right=1)
    assert length.paying([7, 7], 2) == 1
    assert length.paying([7], 2) == 1
    assert found_length(times, num_requests=2, right=7).paying([7, 4], 2) == 7
    assert found_length(times, num_requests=2, right=0).paying([7, 7], 2) == 0


def rate_of_found(
    a_row_s: float, *, chance: float, num_requests: int, share: float, steps: int, capture_s: float = 0.0, gap_s: float = 0.0
) -> float:
    """Tokens in the time of a step without guesses. share: of the requests that have guesses. The first of a length is captured.

    gap_s: for which the device waits before a step that verifies, and before the next one.
    """
    length, draw, captured, spent_s, told = DraftLength(7, device="cuda", lengths=HOST_LENGTHS), random.Random(1), {0}, 0.0, 0.0
    before = 0
    for _ in range(steps):
        counts = [5 for _ in range(num_requests) if draw.random() < share]
        now = length.paying(counts, num_requests)
        took_s = (1 + a_row_s * now) * draw.uniform(0.95, 1.05) + capture_s * (now not in captured) + gap_s * (now + before > 0)
        captured.add(now)
        found = [next((place for place in range(now) if draw.random() > chance), now) for _ in counts if now]
        length.told([(now, right) for right in found])
        tokens = num_requests + sum(found)
        length.verified(num_requests, now, took_s, told=tokens / num_requests, late=before > 0)
        before, spent_s, told = now, spent_s + took_s, told + tokens / num_requests
    return told / spent_s


@pytest.mark.parametrize("num_requests", [1, 64])
@pytest.mark.parametrize("capture_s", [0.0, 20.0])
def test_seldom_right_guesses_of_the_host_cost_little_and_right_ones_are_verified(num_requests: int, capture_s: float) -> None:
    """Trials, and what is captured for them, lose a hundredth of the time, beside those that a load begins with."""
    common = {"num_requests": num_requests, "capture_s": capture_s}
    assert rate_of_found(0.2, chance=0.05, share=0.06, steps=6000, **common) > 0.97  # type: ignore[arg-type]
    assert rate_of_found(0.05, chance=0.9, share=0.8, steps=6000, **common) > 2.0  # type: ignore[arg-type]


def test_what_the_device_waits_behind_a_verification_is_counted_too() -> None:
    """Three of ten requests have two right guesses now and then: worth it, but for two waits of a seventh of a step."""
    assert rate_of_found(0.04, chance=0.6, num_requests=64, share=0.3, steps=3000) > 1.1
    assert rate_of_found(0.04, chance=0.6, num_requests=64, share=0.3, steps=3000, gap_s=0.15) > 0.97
    assert rate_of_found(0.02, chance=0.9, num_requests=64, share=0.8, steps=3000, gap_s=0.15) > 1.8


@pytest.mark.parametrize("fixed", [None, 7])
def test_no_step_with_found_guesses_is_larger_than_the_largest_graph(fixed: int | None) -> None:
    """Sizes of graphs are larger than what they run: 51 requests of five rows are 255, and their graph has 56."""
    for count in (*range(1, 257),):
        length = DraftLength(7, fixed=fixed, most_rows=256, device="cuda")
        for each in (0, *LENGTHS, *LENGTHS) if fixed is None else ():
            length.verified(count, each, 1.0, told=1.0, late=False)
        size = next(size for size in graph_sizes(256) if size >= count)
        verified = length.paying([7] * count, count)
        assert size * (1 + verified) <= 256
        assert (verified > 0) == (count <= 128)


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
