"""Who tells routers what is cached, and what is done where nobody asked for it: nothing."""

from __future__ import annotations

from typing import Protocol

from enginery.kv.prefix import PrefixWatcher


class PrefixEvents(Protocol):
    """Collects what changes in trees of prefixes, one of each lane."""

    def watcher(self, lane: int) -> PrefixWatcher | None:
        """To be told of this lane's; None: nobody is."""
        ...

    def cleared(self) -> None:
        """The trees were emptied."""
        ...

    def publish(self) -> None:
        """Send what has changed, after each step. Waits for nobody."""
        ...

    def close(self) -> None: ...


class NoEvents:
    """Implements `PrefixEvents` where nothing is published."""

    def watcher(self, lane: int) -> None:
        return None

    def cleared(self) -> None:
        pass

    def publish(self) -> None:
        pass

    def close(self) -> None:
        pass
