"""Fewer combinations on a CPU: any two values meet in one of them. All are run where there is a CUDA device, or if the environment
says FULL_TESTS=1, as `make test-full` does."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest
import torch

from enginery.testing.cases import covering

HAS_CUDA = torch.cuda.is_available()
Value = TypeVar("Value")
EVERYTHING = HAS_CUDA or os.environ.get("FULL_TESTS") == "1"


def pairwise(
    *axes: tuple[str, Iterable[object]], indirect: Sequence[str] = (), everything: bool = EVERYTHING
) -> pytest.MarkDecorator:
    """Like one `parametrize` for each axis. An axis of several names has a tuple for each value. indirect: names of fixtures."""
    names = [name.strip() for together, _ in axes for name in together.split(",")]
    choices = [[value if "," in together else (value,) for value in values] for together, values in axes]
    rows = [tuple(itertools.chain(*row)) for row in crossed(*choices, everything=everything)]
    return pytest.mark.parametrize(names, rows, indirect=list(indirect))


def crossed(*axes: Iterable[object], everything: bool = EVERYTHING) -> list[tuple[object, ...]]:
    """All combinations of values, or such that any two values meet in one: together an axis of several names for `in_turn`."""
    choices = [list(values) for values in axes]
    places = list(itertools.product(*(range(len(values)) for values in choices)))
    chosen = places if everything else covering(places)
    return [tuple(values[place] for values, place in zip(choices, row, strict=True)) for row in chosen]


def in_turn(
    *axes: tuple[str, Iterable[object]], indirect: Sequence[str] = (), everything: bool = EVERYTHING
) -> pytest.MarkDecorator:
    """Fewer still, for tests that take seconds: every value in one case at least, and a value of the longest axis in one alone."""
    if everything:
        return pairwise(*axes, indirect=indirect, everything=True)
    names = [name.strip() for together, _ in axes for name in together.split(",")]
    choices = [[value if "," in together else (value,) for value in values] for together, values in axes]
    longest = max(len(values) for values in choices)
    rows = [tuple(itertools.chain(*(values[index % len(values)] for values in choices))) for index in range(longest)]
    return pytest.mark.parametrize(names, rows, indirect=list(indirect))


def spread(values: Iterable[Value], count: int, *, everything: bool = EVERYTHING) -> list[Value]:
    """All of the values, or so many of them from the first on, as far apart as they can be."""
    found = list(values)
    return found if everything or count >= len(found) else [found[index * len(found) // count] for index in range(count)]


def examples(count: int) -> int:
    """How many of a property test that drives a scheduler by chance for a hundred actions; the same ones every time."""
    return count if EVERYTHING else max(1, count * 3 // 10)
