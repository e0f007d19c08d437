"""Guesses that the host found are verified where, and as far as, that pays."""

from __future__ import annotations

import random

import pytest

from enginery.speculate.length import HOST_LENGTHS, LENGTHS, DraftLength
from enginery.worker.paths.decode_graphs import graph_sizes


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
