"""What the drafter is, and its options."""

from __future__ import annotations

from dataclasses import dataclass

from enginery.api import ConfigError, DraftContext, DrafterSpec, HostDrafter


@dataclass(frozen=True, kw_only=True)
class LookupOptions:
    """least, most: tokens that must have come before for a guess; the longest run is looked for first."""

    least: int = 2
    most: int = 4


def build(context: DraftContext) -> HostDrafter:
    """Indexes are made as requests come."""
    from enginery_draft_lookup.drafter import LookupDrafter

    options = context.options
    assert isinstance(options, LookupOptions)
    if not 1 <= options.least <= options.most:
        raise ConfigError(f"lookup.least is {options.least} and lookup.most is {options.most}; take 1 <= least <= most")
    return LookupDrafter(options)


LOOKUP = DrafterSpec(
    name="lookup",
    api=(2, 0),
    summary="what followed a request's last tokens when they came before",
    most=16,
    build=build,
    options=LookupOptions,
)
