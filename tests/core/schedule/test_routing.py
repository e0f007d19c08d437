"""Which replica a request goes to, and what the front knows of the prefixes that each has."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginery.schedule.routing import Candidate, choose
from enginery.serve.engine.sent_prefixes import SentPrefixes, block_hashes, block_tokens


def standing(waiting: int = 0, cached: int = 0, **changes: object) -> Candidate:
    return Candidate(waiting=waiting, cached=cached, **{"num_sent": 0, **changes})


@pytest.mark.parametrize(
    ("standings", "chosen"),
    [
        ([standing(5), standing(4)], 1),
        ([standing(), standing(), standing()], 0),
        ([standing(num_sent=2), standing(num_sent=1), standing(num_sent=1)], 1),
        ([standing(0), standing(60, cached=64)], 1),
        ([standing(0), standing(64, cached=64)], 0),
        ([standing(0), standing(65, cached=64)], 0),
        ([standing(0, is_full=True), standing(10_000)], 1),
        ([standing(1, is_full=True), standing(0, is_full=True)], 1),
        ([standing(0, serves=False), standing(10_000, is_full=True)], 1),
        ([standing(0, cached=99, serves=False), standing(3)], 1),
        ([standing(0, is_silent=True), standing(10_000, is_full=True)], 1),
        ([standing(0, is_silent=True), standing(0, serves=False)], 0),
        ([standing(serves=False), standing(serves=False)], None),
        ([], None),
        ([standing(2, cached=100), standing(1, cached=99)], 1),
    ],
)
def test_the_least_work_wins(standings, chosen):
    """A prompt of 100 tokens: at least one is always computed, as the last row says."""
    assert choose(100, standings) == chosen


@given(st.lists(st.builds(standing, st.integers(0, 300), st.integers(0, 100), serves=st.booleans(), is_full=st.booleans())))
def test_who_serves_and_has_room_is_never_passed_over_for_less_work(standings):
    chosen = choose(100, standings)
    open_ones = [each for each in standings if each.serves and not each.is_full] or [each for each in standings if each.serves]
    if not open_ones:
        assert chosen is None
    else:
        best = min(each.waiting + max(1, 100 - each.cached) for each in open_ones)
        assert standings[chosen] in open_ones
        assert standings[chosen].waiting + max(1, 100 - standings[chosen].cached) == best


def test_equal_beginnings_have_equal_hashes_and_salts_are_apart():
    first, other = block_hashes(range(100), "", size=16), block_hashes([*range(40), *range(60)], "", size=16)
    assert len(first) == 6
    assert [one == two for one, two in zip(first, other, strict=True)] == [True, True, *[False] * 4]
    assert first[3] != block_hashes([0] * 16 + list(range(16, 64)), "", size=16)[3], "a hash is of all that stands before, too"
    assert not set(first) & set(block_hashes(range(100), "salt", size=16))
    assert block_hashes(range(15), "", size=16) == []


def test_blocks_are_whole_pages():
    assert [block_tokens(size) for size in (1, 16, 48, 64, 100)] == [64, 64, 96, 64, 100]


def test_what_was_used_least_recently_is_forgotten_from_its_end_on():
    prefixes = SentPrefixes()
    old, new = block_hashes(range(64), "", size=16), block_hashes(range(100, 164), "", size=16)
    prefixes.add(old, most=6)
    prefixes.add(new, most=6)
    assert (prefixes.num_known(old), prefixes.num_known(new), len(prefixes)) == (2, 4, 6)
    prefixes.add(old[:2], most=6)
    prefixes.add(block_hashes(range(200, 232), "", size=16), most=6)
    assert (prefixes.num_known(old), prefixes.num_known(new)) == (2, 2)
    prefixes.clear()
    assert (prefixes.num_known(old), len(prefixes)) == (0, 0)


def test_a_prompt_larger_than_all_there_is_keeps_its_beginning():
    prefixes, hashes = SentPrefixes(), block_hashes(range(160), "", size=16)
    prefixes.add(hashes, most=4)
    assert (prefixes.num_known(hashes), len(prefixes)) == (4, 4)


def test_it_never_grows_beyond_its_bound():
    prefixes, chance = SentPrefixes(), random.Random(0)
    for _ in range(200):
        prefixes.add(block_hashes(chance.choices(range(3), k=chance.randrange(200)), "", size=4), most=20)
        assert len(prefixes) <= 20
