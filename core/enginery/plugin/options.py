"""Options of descriptors: `-o NAME.field=value` into the descriptor's dataclass."""

from __future__ import annotations

import dataclasses
import typing
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from enginery.contracts.drafting import DrafterSpec, DraftModelOptions
from enginery.errors import FAULTS, ConfigError
from enginery.plugin.checker import alternatives
from enginery.plugin.near import did_you_mean, known_names
from enginery.plugin.records import Offer, PluginRecord, absent_plugins

_KIND_TEXTS: Final[Mapping[object, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "none",
}


def options_type(spec: object) -> type | None:
    """The dataclass of a descriptor's options, where its kind has options and it has some. Models that draft have some anyhow."""
    found: type | None = vars(spec).get("options")
    return DraftModelOptions if found is None and isinstance(spec, DrafterSpec) and spec.is_model else found


def options_problems(options: object) -> list[str]:
    """Why `options` cannot be set from text; empty if it can."""
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        return [f"options is {options!r}, but must be a dataclass"]
    problems = []
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"option {field.name!r} has no default")
        if not all(kind in _KIND_TEXTS or typing.get_origin(kind) is Literal for kind in alternatives(hints[field.name])):
            problems.append(
                f"option {field.name!r} is {hints[field.name]}; use int, float, bool, str, Literal, or one of them | None"
            )
    if not problems:
        options()  # raises where its defaults do not go together
    return problems


def parse_options(texts: Sequence[str], offers: Iterable[Offer[object]], records: Iterable[PluginRecord]) -> Mapping[str, object]:
    """The options of every descriptor that has some, by its name. Raises `ConfigError` for anything that is not understood."""
    types_by_name = {offer.name: options for offer in offers if (options := options_type(offer.spec)) is not None}
    given: dict[str, dict[str, str]] = defaultdict(dict)
    for text in texts:
        left, equals, value = text.partition("=")
        name, dot, key = left.strip().rpartition(".")
        if not equals or not dot:
            raise ConfigError(f"-o {text} is not understood; write -o NAME.key=value, where NAME is for instance a backend")
        if name not in types_by_name:
            lines = [f"-o {text}: nothing named {name!r} takes options{did_you_mean(name, types_by_name) or '.'}"]
            lines += [f"What takes options: {known_names(types_by_name)}.", *absent_plugins(records)]
            raise ConfigError("\n".join(lines))
        if key in given[name]:
            raise ConfigError(f"-o {name}.{key} is given twice ({given[name][key]} and {value}); give it once")
        given[name][key] = value
    return {name: _build(name, kind, given[name]) for name, kind in types_by_name.items()}


def _build(name: str, kind: type, given: Mapping[str, str]) -> object:
    hints = typing.get_type_hints(kind)
    values: dict[str, object] = {}
    for key, text in given.items():
        if key not in hints:
            raise ConfigError(
                f"-o {name}.{key}: {name} has no such option{did_you_mean(key, hints) or '.'} It has {known_names(hints)}."
            )
        kinds, value = alternatives(hints[key]), text.strip()
        if value.lower() == "none" and type(None) in kinds:
            values[key] = None
            continue
        try:
            values[key] = msgspec.convert(value, hints[key], strict=False)
        except msgspec.ValidationError as error:
            wanted = " or ".join(_KIND_TEXTS.get(kind) or " or ".join(map(str, typing.get_args(kind))) for kind in kinds)
            raise ConfigError(f"-o {name}.{key}={text}: the value must be {wanted}") from error
    try:
        return kind(**values)
    except FAULTS as error:  # a plugin's own check
        raise ConfigError(f"the options of {name} do not go together: {error}") from error
