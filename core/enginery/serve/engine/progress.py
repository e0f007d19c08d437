"""Whether the engine gets on with its work, and what is written down when it does not."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from enginery.serve.engine.replicas import Replica

_MAX_SHOWN: Final = 32
_PAUSE_S: Final = 2.0  # this process did not run meanwhile, so nobody was heard
_PREPARING_S: Final = 600.0  # that an engine may be stalled for longer while it prepares something
_log: Final = logging.getLogger(__name__)


class Progress:
    """Knows since when nothing has come of the engine's work."""

    def __init__(self) -> None:
        self._moved_s = time.monotonic()
        self._num_steps = 0

    def moved(self) -> None:
        """Note that something came of the work, or that there is work again."""
        self._moved_s = time.monotonic()

    def completed(self, num_steps: int) -> None:
        """Note the number of steps that have completed since the start."""
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self.moved()

    def stalled_s(self, *, has_work: bool) -> float:
        """Seconds since something last came of the work; 0 without work."""
        return time.monotonic() - self._moved_s if has_work else 0.0


async def watch(replicas: Sequence[Replica], limit_s: float) -> None:
    """Watch each. Never ends."""
    await asyncio.gather(*(_watch(replica, [other for other in replicas if other is not replica], limit_s) for replica in replicas))


def stalled_s(replica: Replica) -> float:
    """Seconds for which it had work, and nothing came of it, or said nothing, though all have hung up; fewer while it prepares."""
    client = replica.client
    silent_s = time.monotonic() - client.heard_s if client.state == "silent" else 0.0
    seconds = max(client.progress.stalled_s(has_work=bool(client.open_requests)), silent_s)
    return max(0.0, seconds - _PREPARING_S) if client.prepares else seconds


async def _watch(replica: Replica, others: Sequence[Replica], limit_s: float) -> None:
    """When an engine is stalled for `limit_s`: log all stacks and requests, once each time. Never ends.

    Where another serves it is ended then: whoever restarts the server would end the others' streams too.
    """
    was_stalled, look_s = False, min(1.0, limit_s / 4)
    while True:
        began_s = time.monotonic()
        await asyncio.sleep(look_s)
        if time.monotonic() - began_s > look_s + _PAUSE_S:
            replica.client.progress.moved()
        seconds = stalled_s(replica)
        if seconds >= limit_s and not was_stalled:
            _write_down(replica, seconds)
        elif seconds >= limit_s and any(other.serves and stalled_s(other) < limit_s for other in others):
            _log.error("%s is ended, as others serve", replica.name)
            await replica.client.child.give_up(f"it completed no step for {seconds:.0f} s (--watchdog-s)")
        was_stalled = seconds >= limit_s


def _write_down(replica: Replica, seconds: float) -> None:
    """What there is to know of an engine that has completed no step for so long."""
    engine, requests = replica.client, replica.client.open_requests
    _log.error("no step has completed for %.0f s; the last report was %s", seconds, engine.stats)
    for times in requests[:_MAX_SHOWN]:
        told = times.request_id, times.num_prompt, times.num_output, time.monotonic() - times.began_s
        _log.error("in the engine: %s, %d prompt tokens, %d generated, for %.1f s", *told)
    if len(requests) > _MAX_SHOWN:
        _log.error("and %d more", len(requests) - _MAX_SHOWN)
    engine.child.relay(_stacks())
    engine.child.dump_stacks()


def _stacks() -> str:
    """The stacks of this process's threads. faulthandler would write them by itself, and wait until somebody reads them."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    found = [f"Thread {names.get(ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames]
    return "".join(["Stacks of the HTTP process:\n", *found])
