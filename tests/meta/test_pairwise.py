"""What is left out of a full cross, and what is not."""

from __future__ import annotations

import itertools

from pairwise import in_turn, pairwise, spread

AXES = {"page": [1, 16], "chunk": [16, 4096], "batch": [1, 7], "family": list("abcdefg")}


def rows_of(*, everything: bool) -> list[tuple[object, ...]]:
    return pairwise(*AXES.items(), everything=everything).args[1]


def test_any_two_values_meet_in_few_cases() -> None:
    chosen = rows_of(everything=False)
    wanted = {pair for row in itertools.product(*AXES.values()) for pair in itertools.combinations(enumerate(row), 2)}
    assert {pair for row in chosen for pair in itertools.combinations(enumerate(row), 2)} == wanted
    assert len(chosen) == len(set(chosen)) <= 16
    assert rows_of(everything=False) == chosen


def test_everything_is_every_combination() -> None:
    assert sorted(rows_of(everything=True)) == sorted(itertools.product(*AXES.values()))


def test_two_axes_are_crossed() -> None:
    assert len(pairwise(("one", [1, 2, 3]), ("other", [4, 5]), everything=False).args[1]) == 6


def test_an_axis_may_have_several_names_and_be_of_fixtures() -> None:
    marked = pairwise(("one, two", [(1, 2)]), ("three", [3]), everything=False, indirect=["three"])
    assert (*marked.args, marked.kwargs) == (["one", "two", "three"], [(1, 2, 3)], {"indirect": ["three"]})


def test_in_turn_each_value_is_met_and_the_longest_axis_has_a_case_a_value() -> None:
    chosen = in_turn(("family", "abcde"), ("page", [1, 16]), everything=False).args[1]
    assert chosen == [("a", 1), ("b", 16), ("c", 1), ("d", 16), ("e", 1)]
    assert len(in_turn(("family", "abcde"), ("page", [1, 16]), everything=True).args[1]) == 10


def test_values_are_spread() -> None:
    assert spread(range(10), 3, everything=False) == [0, 3, 6]
    assert spread("abc", 5, everything=False) == ["a", "b", "c"]
    assert spread("abc", 1, everything=True) == ["a", "b", "c"]
