"""`EngineOptions` from the keyword arguments of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from enginery.config.schema import EngineOptions
from enginery.config.sources import flags_of_others
from enginery.errors import ConfigError
from enginery.plugin.near import did_you_mean, known_names

_UNBOUNDED: Final = 1 << 60  # nobody else waits in this process, so a queue needs no bound


def engine_options(model: str | None, options: Mapping[str, object], *, owner: str) -> EngineOptions:
    """The options of an engine from the keyword arguments of `owner`, the class that errors name.

    Raises `ConfigError` for an option that does not exist or has a wrong type.
    """
    known = {option.name for option in dataclasses.fields(EngineOptions)}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{owner} has no option {name!r}{_instead(name, value, known)}")
    given: dict[str, object] = {"model": None if model is None else str(model), "max_queued_requests": _UNBOUNDED, **options}
    if type(length := given.get("draft_length")) is int:
        given["draft_length"] = str(length)  # a number, or auto
    try:
        return msgspec.convert(given, EngineOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{owner} has an option of a wrong type: {error}") from error


def _instead(name: str, value: object, known: Collection[str]) -> str:
    """What the option is here, also if it is another engine's; of one that is False, what its --no-flag is."""
    others, flag = flags_of_others(), name.replace("_", "-")
    if value is False and f"--no-{flag}" in others:
        flag, value = f"no-{flag}", True
    if (answer := others.get(f"--{flag}")) is None:
        return did_you_mean(name, known) or f"; known are {known_names(known)}"

    def keyword(found: re.Match[str]) -> str:
        option, is_off = found[1].removeprefix("no-").replace("-", "_"), found[1].startswith("no-")
        return f"engine serve --{found[1]}" if option not in known else f"{option}={not value}" if is_off else option

    here = re.sub(r"(?:engine serve )?--([a-z-]+)", keyword, answer)
    return f"; here it is {here}" if answer.startswith("--") else f"; {here}"
