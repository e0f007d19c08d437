"""Choosing an attention backend: a pure function of what is wanted, what is needed and what is on offer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from enginery.contracts.attention import AttnBackendSpec, AttnNeeds, Reason
from enginery.contracts.grammars import GrammarSpec
from enginery.contracts.ops import OpSpec
from enginery.errors import PluginError, Unsupported
from enginery.plugin.records import Offer, PluginRecord, absent_plugins, not_found


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One backend in a choice. reasons: all that speaks against it."""

    name: str
    plugin: str
    priority: int
    reasons: tuple[Reason, ...]
    chosen: bool

    def __str__(self) -> str:
        verdict = "; ".join(reason.text for reason in self.reasons) or ("chosen" if self.chosen else "a higher priority was chosen")
        return f"{self.name} (priority {self.priority}): {verdict}"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The backend that will be used, and every candidate, the likeliest first."""

    winner: Offer[AttnBackendSpec]
    candidates: tuple[Candidate, ...]


def ranked(offers: Iterable[Offer[Any]]) -> list[Offer[Any]]:
    """Highest priority first, equal ones by name."""
    return sorted(offers, key=lambda offer: (-offer.spec.priority, offer.name))


def refusals(offer: Offer[AttnBackendSpec] | Offer[GrammarSpec] | Offer[OpSpec], needs: Any) -> tuple[Reason, ...]:
    """Why the offer does not serve `needs`. An exception in the plugin's own rules is a reason too."""
    try:
        reasons = tuple(offer.spec.refuse(needs))
        if wrong := [reason for reason in reasons if not isinstance(reason, Reason)]:
            raise TypeError(f"refuse must return Reason objects, not {wrong[0]!r}")
        return reasons
    except Exception as error:  # a plugin's rule
        return (Reason(rule="error", text=f"{offer.source} failed while it was asked: {type(error).__name__}: {error}"),)


def weigh(needs: AttnNeeds, offers: Iterable[Offer[AttnBackendSpec]], *, wanted: str = "auto") -> tuple[Candidate, ...]:
    """Every backend with what speaks against it, the likeliest first; at most one is chosen."""
    by_rank = sorted(offers, key=lambda offer: (-offer.spec.priority_for(needs), offer.name))
    all_reasons = [(offer, refusals(offer, needs)) for offer in by_rank]
    eligible = (offer.name for offer, reasons in all_reasons if not reasons and wanted in ("auto", offer.name))
    chosen = next(eligible, None)
    return tuple(
        Candidate(
            name=offer.name,
            plugin=offer.plugin,
            priority=offer.spec.priority_for(needs),
            reasons=reasons,
            chosen=offer.name == chosen,
        )
        for offer, reasons in all_reasons
    )


def select(wanted: str, needs: AttnNeeds, offers: Sequence[Offer[AttnBackendSpec]], records: Sequence[PluginRecord]) -> Selection:
    """Use what is wanted by name or fail with its reasons; for "auto", the highest priority that refuses nothing."""
    by_name = {offer.name: offer for offer in offers}
    if wanted != "auto" and wanted not in by_name:
        raise PluginError(not_found("attention backend", wanted, by_name, records))
    candidates = weigh(needs, offers, wanted=wanted)
    for candidate in candidates:
        if candidate.chosen:
            return Selection(winner=by_name[candidate.name], candidates=candidates)
    if wanted != "auto":
        reasons = next(candidate.reasons for candidate in candidates if candidate.name == wanted)
        lines = [f"attention backend {wanted!r}, from {by_name[wanted].source}, refuses:", *(reason.text for reason in reasons)]
        raise Unsupported("\n  - ".join(lines) + "\nName another with --attention-backend, or leave the choice with auto.")
    lines = ["no attention backend serves this model on this device:", *map(str, candidates)]
    advice = absent_plugins(records) or ["Install a plugin that does; engine list-backends --why MODEL shows each one's reasons."]
    raise Unsupported("\n  - ".join(lines) + "\n" + "\n".join(advice))
