"""Prompt lookup decoding: a request's own text as its drafter."""

from enginery.api import DrafterSpec, hookimpl
from enginery_draft_lookup.spec import LOOKUP


@hookimpl
def register_drafters() -> list[DrafterSpec]:
    """One, of the host."""
    return [LOOKUP]
