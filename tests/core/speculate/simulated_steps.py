"""Steps of known duration and acceptance, by which a length of drafts is found."""

from __future__ import annotations

import random
from collections.abc import Callable

from enginery.speculate.length import DraftLength


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
