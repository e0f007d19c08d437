"""Which plugins are installed, from the metadata of distributions alone: nothing is imported here."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from enginery import __version__
from enginery.errors import ConfigError
from enginery.plugin.near import did_you_mean, known_names
from enginery.plugin.records import PluginRecord, Status

GROUP: Final = "enginery"
CORE: Final = "core"
CORE_DISTRIBUTION: Final = "enginery"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which plugins may be imported. only: a manifest's names, None outside of replaying. strict: any failure is fatal.

    absent: with `only`, what the parent process said of the others.
    """

    blocked: frozenset[str] = frozenset()
    no_plugins: bool = False
    strict: bool = False
    only: frozenset[str] | None = None
    absent: tuple[PluginRecord, ...] = ()

    @classmethod
    def read(cls, *, blocked: Sequence[str], no_plugins: bool, environ: Mapping[str, str] = os.environ) -> Wanted:
        """What was asked for, with ENGINERY_BLOCKED_PLUGINS, ENGINERY_NO_PLUGINS and ENGINERY_STRICT_PLUGINS added."""
        named = [name.strip() for name in environ.get("ENGINERY_BLOCKED_PLUGINS", "").split(",")]
        return cls(
            blocked=frozenset(blocked) | frozenset(filter(None, named)),
            no_plugins=no_plugins or _is_on(environ, "ENGINERY_NO_PLUGINS"),
            strict=_is_on(environ, "ENGINERY_STRICT_PLUGINS"),
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """An installed plugin. entry_point None: it is not to be imported, and the record says why."""

    record: PluginRecord
    entry_point: EntryPoint | None = None


def discover(wanted: Wanted) -> list[Found]:
    """Every installed plugin in order of name and distribution, with what its metadata says about its status."""
    found = sorted(_installed(), key=lambda item: (item.record.name, item.record.distribution, item.record.version))
    known = {item.record.name for item in found}
    if CORE in wanted.blocked - known:
        raise ConfigError(f"{CORE} is no plugin and cannot be blocked; leave out -p no:{CORE}")
    for name in sorted(wanted.blocked - known):
        hint = did_you_mean(name, known)
        raise ConfigError(f"plugin {name!r}, to be blocked, is not installed{hint or '.'} Installed: {known_names(known)}.")
    by_name: dict[str, list[PluginRecord]] = defaultdict(list)
    for item in found:
        if item.record.status is Status.AVAILABLE:
            by_name[str(canonicalize_name(item.record.name))].append(item.record)
    return [_with_status(item, by_name[str(canonicalize_name(item.record.name))], wanted) for item in found]


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value not in ("", "0", "false", "no", "1", "true", "yes"):
        raise ConfigError(f"{name} is {value!r}, but must be 1 or 0")
    return value in ("1", "true", "yes")


def _with_status(item: Found, same_name: list[PluginRecord], wanted: Wanted) -> Found:
    record = item.record
    if record.name in wanted.blocked or wanted.no_plugins:
        named = f"-p no:{record.name} or ENGINERY_BLOCKED_PLUGINS names it"
        why = named if record.name in wanted.blocked else "--no-plugins or ENGINERY_NO_PLUGINS is set"
        return _settled(item, Status.BLOCKED, f"{why}; leave that out to use it")
    if record.status is not Status.AVAILABLE:
        return item
    if record.name == CORE:
        return _settled(item, Status.CONFLICT, f"the name {CORE} is reserved for enginery's own parts")
    if len(same_name) > 1:
        rivals = " and ".join(f"{rival.distribution} {rival.version}" for rival in same_name)
        return _settled(item, Status.CONFLICT, f"{rivals} both provide a plugin named {record.name}; uninstall one")
    if wanted.only is not None and record.name not in wanted.only:
        return _absent(item, wanted.absent)
    return item


def _absent(item: Found, told: Sequence[PluginRecord]) -> Found:
    """A plugin that the parent process has not: for the reason that it told, if it did."""
    for record in told:
        if (record.name, record.distribution) == (item.record.name, item.record.distribution):
            return _settled(item, record.status, record.reason)
    return _settled(item, Status.AVAILABLE, "it was not there when the engine was started; start it again")


def _settled(item: Found, status: Status, reason: str) -> Found:
    return Found(record=replace(item.record, status=status, reason=reason))


def _installed() -> Iterable[Found]:
    """One item per entry point of each distribution, one for each stale copy of its metadata, and one for each that has none."""
    copies: dict[str, list[_Metadata]] = defaultdict(list)
    others: dict[str, Found] = {}
    for distribution in distributions():
        if f"[{GROUP}]" in (distribution.read_text("entry_points.txt") or ""):
            metadata = _Metadata.read(distribution)
            copies[str(canonicalize_name(metadata.name))].append(metadata)
        elif (found := _unregistered(distribution)) is not None:
            others.setdefault(str(canonicalize_name(found.record.name)), found)
    yield from (found for name, found in others.items() if name not in copies)
    for same in copies.values():
        used = _used(same)
        yield from (found for metadata in same for found in _offered(metadata, used))


@dataclass(frozen=True, kw_only=True)
class _Metadata:
    """What one distribution says of itself. problem: why it cannot be read."""

    name: str
    version: str
    place: Path
    entry_points: tuple[EntryPoint, ...] = ()
    refusal: str = ""
    problem: str = ""

    @classmethod
    def read(cls, distribution: Distribution) -> _Metadata:
        place = Path(str(distribution.locate_file("")))
        try:
            told = distribution.metadata  # parsed anew each time it is asked for
            name, version = told["Name"], told["Version"]
            Version(version)
            return cls(
                name=name,
                version=version,
                place=place,
                entry_points=tuple(distribution.entry_points.select(group=GROUP)),
                refusal=core_refusal(told.get_all("Requires-Dist") or distribution.requires or [], __version__),
            )
        except Exception as error:  # other people's files: whatever is wrong with them is a row, not a crash
            name = str(distribution.read_text("entry_points.txt")).partition(f"[{GROUP}]")[2].partition("=")[0].strip()
            return cls(name=name or "?", version="?", place=place, problem=f"{type(error).__name__}: {error}")


def _used(same: list[_Metadata]) -> _Metadata:
    """The copy that Python imports from: the first place on sys.path; within one place, the highest version."""
    readable = [copy for copy in same if not copy.problem] or same[:1]
    here = [copy for copy in readable if copy.place == readable[0].place]
    return max(here, key=lambda copy: Version("0" if copy.problem else copy.version))


def _offered(metadata: _Metadata, used: _Metadata) -> Iterable[Found]:
    """Of the copy that is used, or of a stale one, which is told all the same."""
    status, why = (Status.INCOMPATIBLE, metadata.refusal) if metadata.refusal else (Status.AVAILABLE, "")
    if metadata is not used:
        if metadata.version == used.version:
            return
        status, old_place = Status.CONFLICT, f"{metadata.name} {metadata.version} in {metadata.place}"
        advice = "uninstall the distribution until pip finds no more of it, then install it again"
        why = f"stale metadata, not used: {old_place} besides {used.version} in {used.place}; {advice}"
    elif metadata.problem:
        why = f"its metadata in {metadata.place} cannot be read: {metadata.problem}; install it again"
        yield Found(record=_record(metadata.name, metadata, Status.BROKEN, why))
    for each in metadata.entry_points:
        usable = each if status is Status.AVAILABLE else None
        yield Found(record=_record(each.name, metadata, status, why), entry_point=usable)


def _record(name: str, metadata: _Metadata, status: Status, reason: str) -> PluginRecord:
    return PluginRecord(name=name, distribution=metadata.name, version=metadata.version, status=status, reason=reason)


def _unregistered(distribution: Distribution) -> Found | None:
    """What requires enginery and registers nothing; None for any other distribution. Most are told from their text alone."""
    if "\nrequires-dist: enginery" not in (distribution.read_text("METADATA") or "").lower():
        return None
    try:
        name, version, requires = distribution.metadata["Name"], distribution.metadata["Version"], distribution.requires or []
        groups = sorted({entry_point.group for entry_point in distribution.entry_points})
        if not any(_is_core(Requirement(each)) for each in requires):
            return None
    except Exception:  # other people's files, which are no plugins for all we know
        return None
    has = f"it has {', '.join(groups)}" if groups else "it has none at all"
    why = (
        f"it requires enginery and has no entry point in the group {GROUP} ({has}), so nothing of it is used; "
        f"if it is a plugin, give its pyproject.toml [project.entry-points.{GROUP}] and install it again"
    )
    return Found(record=PluginRecord(name=name, distribution=name, version=version, status=Status.UNREGISTERED, reason=why))


def _is_core(requirement: Requirement) -> bool:
    """Whether it is this package that is required, here and without an extra."""
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    return applies and str(canonicalize_name(requirement.name)) == CORE_DISTRIBUTION


def core_refusal(requires: Iterable[str], core_version: str) -> str:
    """Why a distribution with these requirements does not fit this core; empty if it does."""
    for requirement in map(Requirement, requires):
        if _is_core(requirement) and not requirement.specifier.contains(core_version, prereleases=True):
            return f"it needs {requirement}, this is enginery {core_version}; install a release of it that was made for this one"
    return ""
