"""What is known of each plugin, whether it could be used or not, and what it offers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from enginery.contracts.versions import HookGroup
from enginery.plugin.near import did_you_mean, known_names

SpecT = TypeVar("SpecT")
SpecT_co = TypeVar("SpecT_co", covariant=True)


class Status(StrEnum):
    """available: found, not imported. no-device: loaded, but this machine has no device that any of its backends runs on.

    unregistered: a distribution that requires enginery and has no entry point for it, so that it is never imported.
    """

    AVAILABLE = "available"
    LOADED = "loaded"
    BLOCKED = "blocked"
    INCOMPATIBLE = "incompatible"
    CONFLICT = "conflict"
    BROKEN = "broken"
    NO_DEVICE = "no-device"
    UNREGISTERED = "unregistered"


FAILED = frozenset({Status.INCOMPATIBLE, Status.CONFLICT, Status.BROKEN})


@dataclass(frozen=True, kw_only=True)
class PluginId:
    """A plugin as all processes of an engine have it. offers: `group:name` of its descriptors, `commands`, `routes`, `observer`."""

    name: str
    distribution: str
    version: str
    offers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"plugin {self.name} ({self.distribution}=={self.version})"


@dataclass(frozen=True, kw_only=True)
class PluginRecord(PluginId):
    """One row of `engine plugins`."""

    status: Status
    reason: str = ""

    @property
    def is_live(self) -> bool:
        """Whether its parts can be used."""
        return self.status in (Status.LOADED, Status.NO_DEVICE)


@dataclass(frozen=True, kw_only=True)
class Offer(Generic[SpecT_co]):
    """A descriptor and where it is from. told: what its `refuse` raised and the log has; a choice asks it often."""

    spec: SpecT_co
    group: HookGroup
    name: str
    plugin: str
    distribution: str
    version: str
    told: set[str] = field(default_factory=set, repr=False, compare=False)

    @property
    def source(self) -> str:
        """The plugin as messages name it: `plugin NAME (DISTRIBUTION==VERSION)`."""
        return f"plugin {self.plugin} ({self.distribution}=={self.version})"


def not_found(what: str, name: str, known: Iterable[str], records: Iterable[PluginRecord]) -> str:
    """The message for a name that no live plugin offers: near matches, all names, and plugins that might have had it."""
    known = list(known)
    missing = f"there is no {what} {name!r}{did_you_mean(name, known) or '.'} Known: {known_names(known)}."
    return "\n".join([missing, *absent_plugins(records)])


def absent_plugins(records: Iterable[PluginRecord]) -> list[str]:
    """A sentence for those plugins that are installed but for one reason not live."""
    by_reason: dict[str, list[PluginRecord]] = {}
    for record in records:
        if not record.is_live:
            by_reason.setdefault(f"{record.status}: {record.reason}", []).append(record)
    said = []
    for why, absent in by_reason.items():
        many = f"plugins {', '.join(record.name for record in absent)} might offer it but are {why}"
        said.append(many if len(absent) > 1 else f"{absent[0]} might offer it but is {why}")
    return said
