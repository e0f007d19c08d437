"""What there is of the plugins that are installed."""

from __future__ import annotations

from enginery.contracts.attention import AttnBackendSpec
from enginery.plugin.records import PluginRecord
from enginery.plugin.registry import Registry


def load(**flags) -> Registry:
    return Registry.load(**flags)


def record_of(registry: Registry, name: str) -> PluginRecord:
    (found,) = (record for record in registry.records if record.name == name)
    return found


def backends(registry: Registry) -> list[str]:
    return [offer.name for offer in registry.offers(AttnBackendSpec)]
