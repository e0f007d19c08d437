"""Suffix decoding: recent answers as a drafter."""

from enginery.api import DrafterSpec, hookimpl
from enginery_draft_suffix.spec import SUFFIX


@hookimpl
def register_drafters() -> list[DrafterSpec]:
    """One, of the host."""
    return [SUFFIX]
