"""`observe_step`: plugins watch the loop without being able to stop it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from enginery.contracts.schedule import StepReport

_log = logging.getLogger(__name__)


class Observer(NamedTuple):
    """One plugin's observer. source: the plugin with its distribution and version."""

    source: str
    call: Callable[..., Any]


class Observers:
    """The observers that are still on; empty when nobody observes."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._live = list(observers)

    def __bool__(self) -> bool:
        return bool(self._live)

    def report(self, report: StepReport) -> None:
        """Tell every observer. One that raises is logged once and switched off."""
        for observer in tuple(self._live):
            try:
                observer.call(report=report)
            except Exception:  # a plugin's code
                self._live.remove(observer)
                _log.exception("observe_step of %s failed at step %d; it is switched off", observer.source, report.step)
