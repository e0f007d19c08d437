"""Who tells routers what is cached, and what is done where nobody asked for it: nothing."""

from __future__ import annotations

from typing import Protocol

from enginery.kv.prefix import PrefixWatcher


class PrefixEvents(Protocol):
    """Collects what changes in a tree of prefixes. watcher: to be told of it; None: nobody is."""

    @property
    def watcher(self) -> PrefixWatcher | None: ...

    def cleared(self) -> None:
        """The tree was emptied."""
        ...

    def publish(self) -> None:
        """Send what has changed, after each step. Waits for nobody."""
        ...

    def close(self) -> None: ...


class NoEvents:
    """Implements `PrefixEvents` where nothing is published."""

    watcher = None

    def cleared(self) -> None:
        pass

    def publish(self) -> None:
        pass

    def close(self) -> None:
        pass
