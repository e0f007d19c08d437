"""Proposals are those of a search over all tokens, however they came; their cost does not grow with the text."""

from __future__ import annotations

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from enginery_draft_lookup.index import STRIDE, NgramIndex


def searched(tokens: list[int], count: int, *, least: int, most: int) -> list[int]:
    """The same by looking at every place, the last first."""
    size = len(tokens)
    for length in range(min(most, size), least - 1, -1):
        for place in range(size - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[size - length :]:
                found: list[int] = []
                for at in range(place, place + count):
                    found.append(tokens[at] if at < size else found[at - size])
                return found
    return []


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=9), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2))
def test_a_search_over_all_tokens_finds_the_same(parts: list[list[int]], count: int, least: int, more: int) -> None:
    index, told = NgramIndex(least=least, most=least + more), list[int]()
    for part in parts:
        index.extend(part)
        told += part
        assert index.propose(count) == searched(told, count, least=least, most=least + more)
    assert len(index) == len(told)


def test_a_loop_is_drafted_as_a_loop() -> None:
    index = NgramIndex()
    index.extend([7, 1, 2, 3, 1, 2, 3, 1, 2])
    assert index.propose(7) == [3, 1, 2, 3, 1, 2, 3]


def test_what_is_older_than_the_window_is_forgotten() -> None:
    index, rng = NgramIndex(window=50), random.Random(0)
    index.extend([1, 2, 3])
    index.extend([rng.randrange(10, 1 << 30) for _ in range(300)])
    index.extend([1, 2])
    assert index.propose(3) == []
    assert len(index._next) < 3 * 200


def test_a_step_late_in_a_long_text_costs_what_an_early_one_does() -> None:
    index, rng = NgramIndex(), random.Random(0)

    def cost() -> float:
        begun = time.thread_time()
        for _ in range(200):
            index.extend([rng.randrange(100)])
            index.propose(5)
        return time.thread_time() - begun

    early = cost()
    index.extend([rng.randrange(100) for _ in range(60_000)])
    for _ in range(60_000 // STRIDE):
        index.extend([])
    assert cost() < 20 * early + 0.01


def test_a_long_prompt_is_found_over_several_steps_and_then_all_of_it() -> None:
    index, rng = NgramIndex(), random.Random(0)
    text = [rng.randrange(100, 1 << 30) for _ in range(5 * STRIDE)]
    text += text[4 * STRIDE : 4 * STRIDE + 3]
    index.extend(text)
    assert len(index._next) <= 3 * STRIDE, "a step costs no more"
    assert index.propose(3) == []
    for _ in range(5):
        index.extend([])
    assert index.propose(3) == searched(text, 3, least=2, most=4) == text[4 * STRIDE + 3 : 4 * STRIDE + 6]
