"""Combs: a chain of guesses, and beside each of them the likeliest other tokens, from the same logits.

    place      0    1    2    3    4    5         a chain of three, one other beside each
    token     d1   d2   d3   e1   e2   e3
    parent    -1    0    1   -1    0    1         e2 follows d1, as d2 does

A draft model takes no step more for it. The chain comes first, so where there is no room the others are left out before it, and
where one of these is right it is the last that is: of its keys and values one row has to be moved.
"""

from __future__ import annotations


def comb_parents(depth: int, siblings: int) -> tuple[int, ...]:
    """Of each token of a comb the place of the one before it, as in `DraftTree`."""
    return (*range(-1, depth - 1), *(place - 1 for place in range(depth) for _ in range(siblings)))


def num_verified(depth: int, siblings: int) -> int:
    return depth * (1 + siblings)
