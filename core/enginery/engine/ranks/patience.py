"""When the ranks of an engine are given up. The rule, with the seconds of `--step-deadline` as D:

    in D        a rank is heard, and shows that it works: its processors do, or it is at another place than before
    in 10 x D   it gets further: it is heard at all, or the step ends, or the start comes to its next phase or more bytes of weights

Who waits for another rank, or for a step, need not work; that all wait for each other for D breaks the rule too. Where a start may
compile kernels, other processes work for the rank, or those of another rank that compiles the same; and a disk may be slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from enginery.engine.ranks.messages import Alive
from enginery.worker.ranks.gloo import Standing

FURTHER: Final = 10  # deadlines to get further
_OTHERS_WORK: Final = ("start: weights", "start: attention", "start: model")
_LEAST_WORK: Final = 0.01  # of the time; a waiting process works less


@dataclass
class _Heard:
    """What is known of a rank. at_s: when it was heard last. worked_s: when it last showed work. further_s: when it got further."""

    at_s: float
    worked_s: float
    further_s: float
    alive: Alive | None = None

    def take(self, alive: Alive, now_s: float) -> None:
        before, self.alive = self.alive, alive
        if before is None or (alive.phase, alive.number) != (before.phase, before.number):
            self.further_s = self.worked_s = now_s
        else:
            works = alive.worked_s - before.worked_s > _LEAST_WORK * (now_s - self.at_s)
            if works or alive.waits != before.waits or (alive.phase.startswith(_OTHERS_WORK) and not alive.waits):
                self.worked_s = now_s
        self.at_s = now_s

    @property
    def is_at_work(self) -> bool:
        """Whether it neither waits for another rank nor for a step."""
        return self.alive is not None and not self.alive.waits and self.alive.phase != "idle"

    @property
    def doing(self) -> str:
        if self.alive is None:
            return "its start"
        return f"the exchange {self.alive.waits!r}" if self.alive.waits else self.alive.phase


class Patience:
    """Knows since when ranks 1 .. count have not got on. Times are of a clock that only goes forward."""

    def __init__(self, count: int, *, deadline_s: float, standing: Standing, now_s: float) -> None:
        """standing: of rank 0, which is this process."""
        self._deadline_s, self._standing = deadline_s, standing
        self._heard = {rank: _Heard(now_s, now_s, now_s) for rank in range(1, count + 1)}

    def take(self, alive: Alive, now_s: float) -> None:
        self._heard[alive.rank].take(alive, now_s)

    def pause(self, seconds: float) -> None:
        """So long nobody could be heard, because this process did not run."""
        for heard in self._heard.values():
            heard.at_s, heard.worked_s, heard.further_s = heard.at_s + seconds, heard.worked_s + seconds, heard.further_s + seconds

    def doing(self, rank: int) -> str:
        """What it did when it was heard last."""
        return self._heard[rank].doing

    def broken(self, busy: tuple[str, float] | None, now_s: float, name: Callable[[int], str]) -> str:
        """How the rule is broken; empty: it is not. busy: what all ranks do together, and since when; None: nothing."""
        for rank, heard in self._heard.items():
            allowed_s = self._deadline_s * (FURTHER if heard.alive is None else 1)
            if now_s - heard.at_s > allowed_s:
                return f"{name(rank)} has said nothing for {allowed_s:g} s, since {heard.doing}: it was stopped, or starved"
        return "" if busy is None else self._late(*busy, now_s, name)

    def _late(self, what: str, since_s: float, now_s: float, name: Callable[[int], str]) -> str:
        deadline_s = self._deadline_s
        still = [now_s - max(heard.worked_s, since_s) > deadline_s for heard in self._heard.values()]
        for is_still, (rank, heard) in zip(still, self._heard.items(), strict=True):
            if is_still and heard.is_at_work:
                return f"{name(rank)} hangs: for {deadline_s:g} s it has done nothing in {what}, in {heard.doing}"
        if self._standing.waits and all(still):
            others = ", ".join(f"rank {rank} in {heard.doing}" for rank, heard in self._heard.items())
            return f"the ranks wait for each other in {what}: rank 0 in the exchange {self._standing.waits!r}, {others}"
        if now_s - max(since_s, *(heard.further_s for heard in self._heard.values())) > FURTHER * deadline_s:
            return f"{what} has got no further for {FURTHER * deadline_s:g} s; --step-deadline {deadline_s:g} allows no more"
        return ""
