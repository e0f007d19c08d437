"""Ranks on a Ray cluster: Ray places a process for each, starts it and watches it. No step goes through Ray.

this process ── actor: start `engine rank --join` ──> node      one task for each rank, which ends when the rank does
             ══ steps, reports (tcp with keys) ═════>
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from enginery.api import Death, EnginError, Joining, LaunchPlan, RunningRanks
from enginery_executor_ray.address import reach

_PLACE_S: Final = 120.0  # until Ray has room; an autoscaling cluster may start a node for it
_SOON_S: Final = 5.0  # then it is said that there is none yet
_LOOK_S: Final = 0.5
_LAST_LINES: Final = 12
_ANSWER_S: Final = 20.0  # for what Ray does at once
_END_S: Final = 2.0  # for what it does by itself when this process ends
_REACH_S: Final = 5.0  # a cluster that begins may not listen yet
_AnswerT = TypeVar("_AnswerT")
_log: Final = logging.getLogger(__name__)


class NoRoom(EnginError):
    """Ray has not placed the ranks."""


def own_address() -> str:
    """Of this node, as the others of the cluster reach it."""
    _connect()
    return str(ray.util.get_node_ip_address())


def place(plan: LaunchPlan) -> RunningRanks:
    """One processor for each rank, and a GPU where it computes on one, spread over the nodes; then wait until all have joined.

    Raises `NoRoom`, and what ended a rank.
    """
    assert plan.joining is not None, "this executor listens"
    _connect()
    needs: list[dict[str, float]] = [{"CPU": 1} if device == "cpu" else {"CPU": 1, "GPU": 1} for device in plan.devices]
    group = _asked(lambda: placement_group(needs, strategy="SPREAD"), _ANSWER_S)
    try:
        placed = _Placed(group, plan.joining, needs)
        return RayRanks(plan.joining.wait(placed.look), placed)
    except BaseException:
        _remove(group)
        raise


class RayRanks:
    """Implements `RunningRanks`: what Ray tells comes first, as it knows of lost nodes before a deadline does."""

    def __init__(self, joined: RunningRanks, placed: _Placed) -> None:
        self._joined, self._placed = joined, placed
        self._told: set[int] = set()

    def boot(self, rank: int, frame: bytes) -> None:
        self._joined.boot(rank, frame)

    def name(self, rank: int) -> str:
        return self._joined.name(rank)

    def poll(self) -> list[Death]:
        deaths = [death for death in (*self._joined.poll(), *self._placed.lost()) if death.rank not in self._told]
        found = {death.rank: death for death in reversed(deaths)}  # of two that tell, the rank's own words
        self._told |= found.keys()
        return list(found.values())

    def dump_stacks(self) -> None:
        self._joined.dump_stacks()

    def end(self, *, grace_s: float) -> None:
        self._joined.end(grace_s=grace_s)
        self._placed.end()


class _Placed:
    """The actors."""

    def __init__(self, group: PlacementGroup, joining: Joining, needs: list[dict[str, float]]) -> None:
        self._group: PlacementGroup | None = group
        self._actors: list[Any] = [
            _Rank.options(  # type: ignore[attr-defined]
                num_cpus=1, num_gpus=need.get("GPU", 0), scheduling_strategy=PlacementGroupSchedulingStrategy(group, place)
            ).remote()
            for place, need in enumerate(needs)
        ]
        self._runs = {
            actor.run.remote(joining.address, joining.key, rank): rank for rank, actor in enumerate(self._actors, start=1)
        }
        ranks = "1 rank" if len(needs) == 1 else f"{len(needs)} ranks, each"
        self._asked = f"{ranks} of {' and '.join(f'one {name}' for name in needs[0])}"
        self._asked_s, self._has_room, self._has_said = time.monotonic(), False, False
        self._looked_s = 0.0

    def look(self) -> None:
        """While ranks join: raise when one has ended, or when there is no room for them."""
        self._look_for_room()
        for death in self.lost():
            said = "; its last lines were:\n  " + "\n  ".join(death.last_lines) if death.last_lines else ""
            raise EnginError(f"rank {death.rank} {death.how}, before it joined{said}")

    def lost(self) -> list[Death]:
        """Of those whose process has ended, or whose node is gone. Asks Ray twice a second."""
        if time.monotonic() - self._looked_s < _LOOK_S or not self._runs:
            return []
        self._looked_s = time.monotonic()
        ended, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0)
        return [self._death(self._runs.pop(run), run) for run in ended]

    def end(self) -> None:
        """All of them, by force."""
        if self._group is not None:
            _remove(self._group)
            self._group = None

    def _look_for_room(self) -> None:
        if self._has_room or time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._has_room = _asked(lambda: placement_group_table(self._group)["state"] == "CREATED", _ANSWER_S)
        waited_s = time.monotonic() - self._asked_s
        if not self._has_room and waited_s > _PLACE_S:
            raise NoRoom(f"Ray has had no room for {self._asked} in {_PLACE_S:g} s; ray status tells what it has")
        if not self._has_room and waited_s > _SOON_S and not self._has_said:
            self._has_said = True
            _log.warning("Ray has no room yet for %s; it has %g s for it, and ray status tells what it has", self._asked, _PLACE_S)

    def _death(self, rank: int, run: Any) -> Death:
        try:
            code, last_lines = ray.get(run, timeout=_END_S)
        except ray.exceptions.RayError as error:
            return Death(rank, 1, f"was lost by Ray: {str(error).strip().splitlines()[0]}", ())
        return Death(rank, code, f"ended with exit code {code}", last_lines)


@ray.remote
class _Rank:
    """On a node: one `engine rank`. Ray kills it with this process."""

    def run(self, address: str, key: str, rank: int) -> tuple[int, tuple[str, ...]]:
        """To its end: its status, and what it wrote last. The rest is in Ray's log of this process."""
        command = [sys.executable, "-P", "-m", "enginery", "rank", "--join", address, "--rank", str(rank), "--rank-key-file", "-"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(f"{key}\n")
            process.stdin.close()
            last: deque[str] = deque(maxlen=_LAST_LINES)
            for line in process.stderr:
                last.append(line.rstrip("\n"))
                print(line, end="", file=sys.stderr, flush=True)
        return process.returncode, tuple(last)


def _asked(ask: Callable[[], _AnswerT], seconds: float) -> _AnswerT:
    """What Ray answers. Raises `EnginError` when it does not in this time: where a cluster is gone, calls never come back."""
    answer: Future[_AnswerT] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # the boundary of the thread
            answer.set_exception(error)

    threading.Thread(target=run, name="asks Ray", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise EnginError(f"the Ray cluster has not answered for {seconds:g} s; ray status tells whether it still runs") from error


def _remove(group: PlacementGroup) -> None:
    """With the actors in it. Ray does it too when this process ends, so whatever hinders it now is no matter."""
    with contextlib.suppress(EnginError, ray.exceptions.RayError, RuntimeError):
        _asked(lambda: remove_placement_group(group), _END_S)


def _connect() -> None:
    """To the cluster that RAY_ADDRESS names, or that runs here."""
    if ray.is_initialized():
        return
    try:
        reach(os.environ.get("RAY_ADDRESS", ""), _REACH_S, look_s=_LOOK_S)
        ray.init(address="auto", log_to_driver=False, logging_level="warning")
    except (OSError, RuntimeError, ValueError) as error:
        raise EnginError(
            f"there is no Ray cluster to put ranks on ({error}); start one by `ray start --head`, or set RAY_ADDRESS"
        ) from error
