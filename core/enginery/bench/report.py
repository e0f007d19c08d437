"""What a benchmark reports, with all that is needed to repeat it, and how it compares with an earlier report. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

import msgspec

from enginery.config.schema import EngineOptions
from enginery.contracts.engine import EngineFacts
from enginery.errors import ConfigError
from enginery.plugin.hookspecs import PROJECT

if TYPE_CHECKING:
    from enginery.bench.floor import DeviceLimits

_LIBRARIES: Final = ("torch", "triton", "transformers")


@dataclass(frozen=True, kw_only=True)
class Row:
    """what: tells this measurement from others, and is the same in a report to compare with. measured: seconds, which are compared.

    derived: rates and shares that follow from them; None where there is none. details: anything else, as JSON.
    """

    what: Mapping[str, object]
    measured: Mapping[str, float]
    derived: Mapping[str, float | None] = field(default_factory=dict)
    details: Mapping[str, object] = field(default_factory=dict)


class ReportedRow(TypedDict):
    """A `Row` as JSON has it."""

    what: Mapping[str, object]
    measured: Mapping[str, float]
    derived: Mapping[str, float | None]
    details: Mapping[str, object]


class Report(TypedDict):
    """As JSON has it. settings: the options that are not defaults. limits: what the device does at best, in the same run."""

    bench: str
    command: str
    commit: str | None
    device: str
    versions: Mapping[str, str]
    settings: Mapping[str, object]
    limits: Sequence[Mapping[str, object]]
    rows: Sequence[ReportedRow]


class Change(TypedDict):
    """One time, in seconds, of two reports. what: the row; name: the time's name in it."""

    what: str
    name: str
    before: float
    after: float


def make_report(
    bench: str, device: str, rows: Iterable[Row], *, options: EngineOptions, limits: Iterable[DeviceLimits] = ()
) -> Report:
    """A report with all that is needed to repeat the measurement. bench: the command's name."""
    return {
        "bench": bench,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "device": device,
        "versions": _versions() | {"python": platform.python_version()},
        "settings": {name: value for name, value in vars(options).items() if value != vars(EngineOptions())[name]},
        "limits": [asdict(each) for each in limits],
        "rows": [msgspec.to_builtins(row) for row in rows],
    }


def _versions() -> dict[str, str]:
    """Of the libraries, of enginery and of its plugins, as far as they are installed, by distribution."""
    plugins = [point.dist.name for point in importlib.metadata.entry_points(group=PROJECT) if point.dist is not None]
    found = {}
    for name in sorted({*_LIBRARIES, PROJECT, *plugins}):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def facts_details(facts: EngineFacts) -> dict[str, object]:
    """What the engine chose: attention backends, the memory plan, and every decision with its reason."""
    return {
        "attention": facts.attn_backend,
        "memory_plan": facts.memory_plan,
        "decisions": [list(each) for each in facts.decisions],
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent of all do not exceed."""
    return sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]


def percentiles(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """NAME_p50_s, NAME_p90_s and NAME_p99_s of each name that has values, in seconds."""
    return {f"{name}_p{each}_s": percentile(values, each) for name, values in seconds.items() if values for each in (50, 90, 99)}


def read_report(path: Path, *, bench: str) -> Report:
    """A report that `--output` wrote. Raises `ConfigError` if it is none, or one of another benchmark."""
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.get("bench") != bench:
            raise ConfigError(f"{path} is no report of engine bench {bench}; its --output FILE writes one")
        return msgspec.convert(data, Report)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be compared with: {error}") from error


def compare(before: Report, after: Report) -> list[Change]:
    """Every time of `after` beside the one before. Raises `ConfigError` for another device, or a row that is not in `before`."""
    if before["device"] != after["device"]:
        raise ConfigError(f"the report to compare with is of another device, {before['device']}; this is {after['device']}")
    earlier = {_named(row): row["measured"] for row in before["rows"]}
    changes: list[Change] = []
    for what, measured in ((_named(row), row["measured"]) for row in after["rows"]):
        if measured.keys() - earlier.get(what, {}).keys():
            raise ConfigError("\n  ".join([f"the report to compare with has no\n  {what}\nbut only", *earlier]))
        changes += [{"what": what, "name": name, "before": earlier[what][name], "after": now} for name, now in measured.items()]
    return changes


def _named(row: ReportedRow) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in row["what"].items())


def _commit() -> str | None:
    """Of the tree that this file is tracked in, with a mark if it was changed since; None outside of one."""
    here = Path(__file__)
    script = f"git ls-files --error-unmatch {here.name} && git --no-optional-locks describe --always --dirty --exclude='*'"
    done = subprocess.run(script, shell=True, cwd=here.parent, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split()[-1] if done.returncode == 0 else None
