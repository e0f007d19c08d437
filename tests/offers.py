"""Registries in which plugins offer something else than they do."""

from __future__ import annotations

import dataclasses

from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry


def offering(registry: Registry, kind: type, *offers: Offer[object]) -> Registry:
    """The registry with these in place of all that it has of that kind."""
    others = (offer for offer in registry.on_offer if not isinstance(offer.spec, kind))
    return dataclasses.replace(registry, on_offer=(*others, *offers))
