"""Who tells routers what is cached, and what is done where nobody asked for it: nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from enginery.kv.prefix import PrefixWatcher

if TYPE_CHECKING:
    from enginery.engine.kv_events.publisher import LaneEvents


class NoEvents:
    """What is done with changes of trees of prefixes, one of each lane, where nobody is told of them."""

    def watcher(self, lane: int) -> PrefixWatcher | None:
        """To be told of this lane's; None: nobody is."""
        return None

    def cleared(self) -> None:
        """The trees were emptied."""

    def publish(self) -> None:
        """Send what has changed, after each step. Waits for nobody."""

    def close(self) -> None:
        """Send what waits, and end."""


PrefixEvents: TypeAlias = "NoEvents | LaneEvents"
