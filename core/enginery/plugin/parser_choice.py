"""Choosing the parser of tool calls, or of reasoning, for a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from enginery.contracts.parsers import ParserFacts, ParserKind, ParserSpec
from enginery.errors import PluginError
from enginery.plugin.records import Offer, PluginRecord, not_found
from enginery.plugin.selection import ranked


def choose_parser(
    kind: ParserKind, wanted: str, facts: ParserFacts, *, offers: Sequence[Offer[ParserSpec]], records: Sequence[PluginRecord]
) -> Offer[ParserSpec] | None:
    """What is wanted by name; for "auto" the highest priority that suits, or None; for "none" None. Raises `PluginError`."""
    of_kind = {offer.name: offer for offer in ranked(offers) if offer.spec.kind == kind}
    if wanted == "none":
        return None
    if wanted != "auto":
        if wanted not in of_kind:
            raise PluginError(not_found(f"parser of {kind}", wanted, of_kind, records))
        return of_kind[wanted]
    for offer in of_kind.values():
        try:
            if offer.spec.suits(facts):
                return offer
        except Exception as error:  # a plugin's rule
            raise PluginError(f"{offer.source} failed when asked whether parser {offer.name} suits the model: {error}") from error
    return None
