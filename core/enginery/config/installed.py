"""The plugins that what was asked for leaves in."""

from __future__ import annotations

from enginery.config.schema import EngineOptions
from enginery.plugin.registry import Registry


def registry_for(asked: EngineOptions) -> Registry:
    """Find and load them, with their options; see `Registry.load`."""
    return Registry.load(blocked=asked.blocked_plugins, no_plugins=asked.no_plugins, options=asked.plugin_options)
