"""Where the core runs a plugin's code: what goes wrong there names the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from enginery.errors import EnginError, PluginError
from enginery.plugin.loading import explain
from enginery.plugin.records import Offer


@contextmanager
def inside(offer: Offer[Any], doing: str) -> Iterator[None]:
    """Run a plugin's code. Its own `EnginError`s pass; anything else becomes a `PluginError`: PLUGIN could not DOING: why."""
    try:
        yield
    except EnginError:
        raise
    except Exception as error:  # a plugin's code
        raise PluginError(f"{offer.source} could not {doing}: {explain(error)}") from error
