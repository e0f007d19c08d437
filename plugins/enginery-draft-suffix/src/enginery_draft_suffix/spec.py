"""What the drafter is, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from enginery.api import ConfigError, DraftContext, DrafterSpec, HostDrafter

MOST: Final = 32  # guesses of a request in one step
LARGEST: Final = 2**31 - 1  # that Arctic Inference takes


@dataclass(frozen=True, kw_only=True)
class SuffixOptions:
    """depth: tokens of the longest run. cached_requests: answers that are kept for others. factor: guesses for each token that
    matched. least_share: how often a token must have followed to be guessed. salts: of requests, whose answers are kept apart.
    trees: guesses may branch, which needs a model and an attention backend that verify such.
    """

    depth: int = 24
    cached_requests: int = 1000
    factor: float = 1.0
    least_share: float = 0.1
    salts: int = 64
    trees: bool = False


def build(context: DraftContext) -> HostDrafter:
    """Raises `ConfigError` where Arctic Inference is not installed, and for options that would find nothing."""
    options = context.options
    assert isinstance(options, SuffixOptions)
    are_good = (
        2 <= options.depth <= LARGEST,
        options.salts >= 1,
        0 <= options.cached_requests <= LARGEST,
        0 < options.factor <= MOST,
        0 <= options.least_share <= 1,
    )
    if not all(are_good):
        raise ConfigError(
            f"{options} would find nothing; take depth >= 2, cached_requests >= 0, both below 2^31, salts >= 1, "
            f"0 < factor <= {MOST}, 0 <= least_share <= 1"
        )
    from enginery_draft_suffix.drafter import SuffixDrafter, open_trees

    return SuffixDrafter(partial(open_trees, options), options)


def trees(options: object) -> bool:
    """Only where they are asked for: chains are verified by more backends, and in graphs."""
    assert isinstance(options, SuffixOptions)
    return options.trees


SUFFIX = DrafterSpec(
    name="suffix",
    api=(2, 0),
    summary="what followed a request's last tokens in recent answers",
    most=MOST,
    build=build,
    trees=trees,
    options=SuffixOptions,
)
