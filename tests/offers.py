"""Registries in which plugins offer something else than they do, and sets of operations to offer."""

from __future__ import annotations

import dataclasses
from typing import Any

from enginery.contracts.ops import OpSpec
from enginery.contracts.versions import HookGroup
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry


def offering(registry: Registry, kind: type, *offers: Offer[object]) -> Registry:
    """The registry with these in place of all that it has of that kind."""
    others = (offer for offer in registry.on_offer if not isinstance(offer.spec, kind))
    return dataclasses.replace(registry, on_offer=(*others, *offers))


def op_spec(loads: Any, *, provides: tuple[str, ...] | None = None, name: str = "made", **fields: Any) -> OpSpec:
    """A set that loads these functions by their names and refuses nothing. fields: of `OpSpec`, where they are other ones."""
    usual = {"api": (2, 0), "priority": 1, "refuse": lambda needs: [], "load": lambda needs: loads}
    return OpSpec(name=name, provides=tuple(loads) if provides is None else provides, **(usual | fields))


def op_offer(spec: OpSpec, *, plugin: str = "made", distribution: str = "enginery-made", version: str = "1") -> Offer[OpSpec]:
    """The set as a plugin's."""
    return Offer(spec=spec, group=HookGroup.OP, name=spec.name, plugin=plugin, distribution=distribution, version=version)
