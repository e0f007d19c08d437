"""Where settings come from: flags, then the environment (`ENGINERY_<NAME>`), then a TOML file, then the defaults."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from enginery.config.schema import EngineOptions
from enginery.errors import ConfigError
from enginery.plugin.near import did_you_mean, known_names
from enginery.plugin.registry import Registry

PREFIX: Final = "ENGINERY_"
_NO_OPTION: Final = frozenset(PREFIX + name for name in ("STRICT_PLUGINS", "API_KEY", "ADMIN_KEY", "CPU_ISA"))  # read elsewhere
_LISTS: Final = (tuple[str, ...], list[str], tuple[int, str] | None)


@dataclass(frozen=True, kw_only=True)
class Sourced:
    """A setting, and what is to be named when something is wrong with it."""

    value: Any
    source: str


def served_names(asked: EngineOptions, model: str) -> tuple[str, ...]:
    """The names by which requests may call the model, the first its own. Raises `ConfigError`."""
    if asked.served_model_name is None:
        return (model,)
    names = tuple(name.strip() for name in asked.served_model_name.split(","))
    if not all(names) or len(set(names)) < len(names):
        given = f"--served-model-name {asked.served_model_name!r}"
        raise ConfigError(f"{given} has an empty name or one twice; give different names with commas between them")
    return names


def engine_options(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None, *, others: Collection[str] = ()
) -> EngineOptions:
    """Merge the sources, field by field. A flag that is None was not given. Raises `ConfigError` that names the source.

    others: settings that are known too, and not the engine's.
    """
    found = {name: each.value for name, each in settings_from(get_type_hints(EngineOptions), environ, file, others=others).items()}
    return EngineOptions(**found | {name: value for name, value in flags.items() if value is not None})


def flags_of_others() -> dict[str, str]:
    """By a flag of vLLM, SGLang or llama.cpp: what it is here, a flag first, or why there is none."""
    answers = tomllib.loads(Path(__file__).with_name("other_engines.toml").read_text(encoding="utf-8"))
    return {flag: answer for answer, flags in answers.items() for flag in flags}


def instead_of(name: str, value: object, known: Collection[str], write: Callable[[str], str] = str) -> str:
    """What an unknown setting is here, also if it is another engine's; of one that is false, what its --no-flag is. Empty: nothing.

    write: as its source writes what Python writes as NAME or NAME=False.
    """
    flags = {"option": f"here it is {write('plugin_options')}", "config": "a file of settings is named by --config alone"}
    if name in flags:  # as they are called there
        return f"; {flags[name]}"
    others, flag, is_on = flags_of_others(), name.replace("_", "-"), str(value).lower() not in ("false", "0")
    if not is_on and f"--no-{flag}" in others:
        flag, is_on = f"no-{flag}", True
    if (answer := others.get(f"--{flag}")) is None:
        return did_you_mean(write(name), map(write, known))

    def setting(found: re.Match[str]) -> str:
        option, turns_off = found[1].removeprefix("no-").replace("-", "_"), found[1].startswith("no-")
        return f"engine serve --{found[1]}" if option not in known else write(f"{option}={not is_on}" if turns_off else option)

    here = re.sub(r"(?:engine serve )?--([a-z-]+)", setting, answer)
    return f"; here it is {here}" if answer.startswith("--") else f"; {here}"


def registry_for(asked: EngineOptions) -> Registry:
    """The plugins that what was asked for leaves in, with their options; see `Registry.load`."""
    return Registry.load(blocked=asked.blocked_plugins, no_plugins=asked.no_plugins, options=asked.plugin_options)


def settings_from(
    kinds: Mapping[str, object], environ: Mapping[str, str], file: Path | None, *, others: Collection[str] = ()
) -> dict[str, Sourced]:
    """What the environment and, after it, the file say about the settings `kinds`, which gives their types.

    Raises `ConfigError` for names that are neither among them nor among `others`, and for values of another type.
    """
    found = dict(_from_file(file, kinds, others)) if file is not None else {}
    return found | dict(_from_environment(environ, kinds, others))


def _from_environment(
    environ: Mapping[str, str], kinds: Mapping[str, object], others: Collection[str]
) -> Iterator[tuple[str, Sourced]]:
    for variable, text in environ.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or variable in _NO_OPTION or name in others:
            continue
        if name not in kinds:
            hint = instead_of(name, text, {*kinds, *others}, lambda setting: PREFIX + setting.upper())
            raise ConfigError(f"{variable} is set, and there is no such setting: unset it, or correct its name{hint}")
        parts = [part.strip() for part in text.split(",")]
        value = list(filter(None, parts)) if kinds[name] in _LISTS else text
        yield name, Sourced(value=_checked(value, kinds[name], variable, strict=False), source=variable)


def _from_file(file: Path, kinds: Mapping[str, object], others: Collection[str]) -> Iterator[tuple[str, Sourced]]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # some editors begin with a byte order mark
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    for key, value in content.items():
        if key in others:
            continue
        if key not in kinds:
            known = {*kinds, *others}
            hint = instead_of(key, value, known, str.lower) or f"; known are {known_names(known)}"
            raise ConfigError(f"{file} has the key {key!r}, and there is no such setting{hint}")
        yield key, Sourced(value=_checked(value, kinds[key], f"{key} in {file}", strict=True), source=f"{key} in {file}")


def _checked(value: object, kind: object, source: str, *, strict: bool) -> Any:
    if kind is str and type(value) is int:
        value = str(value)  # of a setting that is a number or a word
    try:
        return msgspec.convert(value, type=kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source} is {value!r}: {error}") from error
