"""Choosing among what plugins offer: pure functions of what is wanted, what is needed and what is on offer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from enginery.contracts.attention import AttnBackendSpec, AttnNeeds, Reason
from enginery.contracts.grammars import GrammarSpec
from enginery.contracts.model import CheckpointSpec, ModelSpec
from enginery.contracts.ops import OpNeeds, OpSpec
from enginery.contracts.parsers import ParserFacts, ParserKind, ParserSpec
from enginery.contracts.weights import WeightFormatSpec
from enginery.errors import FAULTS, PluginError, Unsupported
from enginery.plugin.loading import explain
from enginery.plugin.records import Offer, PluginRecord, absent_plugins, not_found

FLAG: Final = "--attention-backend"
_log = logging.getLogger(__name__)
NeedsT_contra = TypeVar("NeedsT_contra", contravariant=True)


class Refusing(Protocol[NeedsT_contra]):
    """A descriptor that says why it does not serve certain needs."""

    @property
    def refuse(self) -> Callable[[NeedsT_contra], Sequence[Reason]]: ...


RankedT = TypeVar(
    "RankedT", bound=AttnBackendSpec | CheckpointSpec | GrammarSpec | ModelSpec | OpSpec | ParserSpec | WeightFormatSpec
)


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


def ranked(offers: Iterable[Offer[RankedT]]) -> list[Offer[RankedT]]:
    """Highest priority first, equal ones by name."""
    return sorted(offers, key=lambda offer: (-offer.spec.priority, offer.name))


def refusals(offer: Offer[Refusing[NeedsT_contra]], needs: NeedsT_contra) -> tuple[Reason, ...]:
    """Why the offer does not serve `needs`. An exception in the plugin's own rules is a reason too."""
    try:
        reasons = tuple(offer.spec.refuse(needs))
        if wrong := [reason for reason in reasons if not isinstance(reason, Reason)]:
            raise TypeError(f"refuse must return Reason objects, not {wrong[0]!r}")
        return reasons
    except FAULTS as error:  # a plugin's rule
        failure = f"{offer.source} failed while it was asked: {explain(error)}"
        if failure not in offer.told:
            offer.told.add(failure)
            _log.warning("%s", failure)
        return (Reason(rule="error", text=failure),)


def op_winners(offers: Iterable[Offer[OpSpec]]) -> dict[str, Offer[OpSpec]]:
    """The offer that each operation of a plugin is taken from. offers: eligible, the highest priority first."""
    winners: dict[str, Offer[OpSpec]] = {}
    for offer in offers:
        for name in offer.spec.provides:
            winners.setdefault(name, offer)
    return winners


def select_ops(needs: OpNeeds, offers: Iterable[Offer[OpSpec]]) -> tuple[Offer[OpSpec], ...]:
    """The sets of operations that refuse nothing, highest priority first."""
    return tuple(offer for offer in ranked(offers) if not refusals(offer, needs))


def weigh_ops(needs: OpNeeds, offers: Iterable[Offer[OpSpec]]) -> list[str]:
    """A line for each set of operations: what is taken from it, or why nothing is; the likeliest first."""
    by_rank = [(offer, refusals(offer, needs)) for offer in ranked(offers)]
    winners = op_winners(offer for offer, reasons in by_rank if not reasons)
    lines = []
    for offer, reasons in by_rank:
        taken = [name for name in offer.spec.provides if winners.get(name) is offer]
        verdict = "; ".join(reason.text for reason in reasons) or (
            f"gives {', '.join(taken)}" if taken else "a higher priority gives all that it provides"
        )
        lines.append(f"{offer.name} (priority {offer.spec.priority}): {verdict}")
    return lines


def choose_family(
    families: Sequence[Offer[ModelSpec]], config: Mapping[str, object], architecture: str
) -> tuple[tuple[Offer[ModelSpec], str] | None, list[str]]:
    """The first that refuses nothing, with why it is that one; or None, and why each refuses. families: of it, ranked."""
    lines = []
    for chosen in families:
        reasons = refusals(chosen, config)
        if not reasons:
            others = [f"{offer.name} (priority {offer.spec.priority}, {offer.source})" for offer in families if offer is not chosen]
            instead = f" with priority {chosen.spec.priority}, before or instead of {', '.join(others)}" if others else ""
            return (chosen, f"serves {architecture}{instead}"), []
        lines += [f"{chosen.name} refuses {architecture}: {reason.text}" for reason in reasons]
    return None, lines


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


def select(
    wanted: str, needs: AttnNeeds, offers: Sequence[Offer[AttnBackendSpec]], records: Sequence[PluginRecord], flag: str = FLAG
) -> Selection:
    """Use what `flag` names or fail with its reasons; for "auto", the highest priority that refuses nothing."""
    by_name = {offer.name: offer for offer in offers}
    if wanted != "auto" and wanted not in by_name:
        raise PluginError(not_found("attention backend", wanted, by_name, records))
    candidates = weigh(needs, offers, wanted=wanted)
    for candidate in candidates:
        if candidate.chosen:
            return Selection(winner=by_name[candidate.name], candidates=candidates)
    if wanted != "auto":
        reasons = {candidate.name: candidate.reasons for candidate in candidates}[wanted]
        lines = [f"attention backend {wanted!r}, from {by_name[wanted].source}, refuses:", *(reason.text for reason in reasons)]
        raise Unsupported("\n  - ".join(lines) + f"\nName another with {flag}, or leave the choice with auto.")
    lines = ["no attention backend serves this model on this device:", *map(str, candidates)]
    advice = absent_plugins(records) or ["Install a plugin that does; engine list-backends --why MODEL shows each one's reasons."]
    raise Unsupported("\n  - ".join(lines) + "\n" + "\n".join(advice))


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
        except FAULTS as error:  # a plugin's rule
            failed = f"{offer.source} failed when asked whether parser {offer.name} suits the model: {explain(error)}"
            raise PluginError(f"{failed}; name another parser of {kind}, or none") from error
    return None
