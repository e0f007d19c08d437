"""What a parent process loaded, for its children to load exactly that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from enginery.errors import PluginError
from enginery.plugin.records import PluginId, PluginRecord


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The live plugins, the core's own parts among them, and the options given to them. Plain data: JSON and msgpack carry it.

    absent: the others, so that a child can say why it has no part of theirs.
    """

    plugins: tuple[PluginId, ...]
    options: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    absent: tuple[PluginRecord, ...] = ()

    @classmethod
    def of(cls, records: Sequence[PluginRecord], *, options: tuple[str, ...], blocked: tuple[str, ...]) -> Manifest:
        entries = (
            PluginId(name=record.name, distribution=record.distribution, version=record.version, offers=record.offers)
            for record in records
            if record.is_live
        )
        absent = tuple(record for record in records if not record.is_live)
        return cls(plugins=tuple(entries), options=options, blocked=blocked, absent=absent)

    def digest(self) -> str:
        """A hash of all that can be used: what a child reports back."""
        text = json.dumps(asdict(replace(self, absent=())), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def check(self, records: Sequence[PluginRecord]) -> None:
        """Raise `PluginError` with every difference between this manifest and what a child loaded."""
        here = {record.name: record for record in sorted(records, key=lambda record: record.is_live)}  # a live one comes last
        problems = [f"{entry} {why}" for entry in self.plugins if (why := _difference(entry, here.get(entry.name)))]
        if problems:
            advice = "Give every process the same environment: the same interpreter, PYTHONPATH and installed plugins."
            lines = ["this process does not have the plugins that its parent loaded; here", *problems]
            raise PluginError("\n  - ".join(lines) + "\n" + advice)


def _difference(there: PluginId, here: PluginRecord | None) -> str:
    """How the plugin of that name is another one here, or unusable; empty if it is the same."""
    if here is None:
        return "is not installed"
    if not here.is_live:
        return f"is {here.status}: {here.reason}"
    if (here.distribution, here.version) != (there.distribution, there.version):
        return f"is {here.distribution}=={here.version}"
    return "" if here.offers == there.offers else f"offers {', '.join(here.offers)} instead of {', '.join(there.offers)}"
