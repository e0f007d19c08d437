"""`EngineOptions` from the keyword arguments of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import msgspec

from enginery.config.schema import EngineOptions
from enginery.config.sources import instead_of
from enginery.errors import ConfigError
from enginery.plugin.near import known_names

_UNBOUNDED: Final = 1 << 60  # nobody else waits in this process, so a queue needs no bound


def engine_options(model: str | None, options: Mapping[str, object], *, owner: str) -> EngineOptions:
    """The options of an engine from the keyword arguments of `owner`, the class that errors name.

    Raises `ConfigError` for an option that does not exist or has a wrong type.
    """
    known = {option.name for option in dataclasses.fields(EngineOptions)}
    for name, value in options.items():
        if name not in known:
            hint = instead_of(name, value, known) or f"; known are {known_names(known)}"
            raise ConfigError(f"{owner} has no option {name!r}{hint}")
    given: dict[str, object] = {"model": None if model is None else str(model), "max_queued_requests": _UNBOUNDED, **options}
    if type(length := given.get("draft_length")) is int:
        given["draft_length"] = str(length)  # a number, or auto
    try:
        return msgspec.convert(given, EngineOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{owner} has an option of a wrong type: {error}") from error
