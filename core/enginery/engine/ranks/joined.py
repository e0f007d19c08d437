"""The ranks that join an engine from other hosts, as the engine has them.

    engine rank --join  -- Join -->  engine        who it is; refused by a text, or kept
                        <-- BootFrame --           the frame that a rank of this host is given on stdin, with the rank's number
                        <-- StillHere, Stacks --   every half second, to notice who is gone; write the stacks of all threads
                        -- Gone -->                the process of the rank has ended

All over one port with keys (`keys`); steps and reports have ports of their own. An `engine rank` ends its process when this
connection is lost, so to close it ends all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from enginery import __version__
from enginery.contracts.parallel import Death
from enginery.engine.ranks import messages
from enginery.engine.ranks.patience import FURTHER
from enginery.errors import EngineDied

_REFUSED: Final = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_LOOK_MS: Final = 50
_SLOWEST_REACH_S: Final = 0.5
_REACHES: Final = 10  # in a deadline
_QUIET_S: Final = 60.0  # between two lines of the log that say the same
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joined:
    """One that has joined. identity: of its connection."""

    identity: bytes
    said: messages.Join

    def __str__(self) -> str:
        return f"{self.said.host} process {self.said.pid}"


class Door:
    """The port where ranks join, a ROUTER. Used by one thread at a time."""

    def __init__(self, link: zmq.Socket[bytes], address: str) -> None:
        link.router_mandatory = True
        self._link, self._monitor, self.address = link, link.get_monitor_socket(_REFUSED), address
        self._quiet_until_s = 0.0

    def receive(self, timeout_ms: int) -> tuple[bytes, messages.FromJoined] | None:
        """Who said what; None: nobody in this time."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            if time.monotonic() > self._quiet_until_s:
                self._quiet_until_s = time.monotonic() + _QUIET_S
                _log.warning("somebody without the key of this engine's ranks was refused at %s", self.address)
        if not self._link.poll(timeout_ms):
            return None
        identity, frame = self._link.recv_multipart()
        return identity, messages.decode_from_joined(frame)

    def tell(self, identity: bytes, message: messages.ToJoined) -> bool:
        """Whether there is still a connection."""
        try:
            self._link.send_multipart([identity, messages.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        """The connections too, which ends all that have joined."""
        self._link.disable_monitor()
        self._link.close(linger=0)


class Listening:
    """Implements `Joining`, for `count` ranks, at a port that is open already. given_up: set by another thread to end it."""

    def __init__(self, door: Door, key: str, *, count: int, deadline_s: float) -> None:
        self.address, self.key = door.address, key
        self.given_up, self._still_here = threading.Event(), messages.StillHere(deadline_s)
        self._door, self._count, self._allowed_s = door, count, FURTHER * deadline_s
        self._joined: list[Joined] = []
        self._ranks = "rank 1" if count == 1 else f"ranks 1 to {count}"

    def wait(self, look: Callable[[], None] = lambda: None) -> JoinedRanks:
        began_s = reached_s = time.monotonic()
        _log.info("%s may join at %s", self._ranks, self.address)
        while len(self._joined) < self._count:
            look()
            if self.given_up.is_set():
                raise EngineDied("the engine was given up while ranks joined")
            if found := self._door.receive(_LOOK_MS):
                self._take(*found)
            now_s = time.monotonic()
            if now_s - began_s > self._allowed_s:
                raise EngineDied(self._missing())
            if now_s - reached_s > _reach_s(self._still_here) or len(self._joined) == self._count:
                reached_s = now_s
                self._look_who_is_there()
        return JoinedRanks(self._door, self._by_rank(), self._still_here)

    def _take(self, identity: bytes, said: messages.FromJoined) -> None:
        if not isinstance(said, messages.Join):
            return
        self._look_who_is_there()
        why = ""
        if said.version != __version__:
            why = f"the engine has enginery {__version__}, this rank {said.version}; install the same on every host"
        elif said.rank is not None and not 1 <= said.rank <= self._count:
            why = f"the engine has {self._ranks} to give away, not {said.rank}"
        elif said.rank is not None and said.rank in self._by_rank():
            why = f"rank {said.rank} has joined already, from {self._by_rank()[said.rank]}"
        joined = Joined(identity, said)
        if why:
            self._door.tell(identity, messages.Refused(why))
            _log.warning("%s wanted to join, and was refused: %s", joined, why)
        else:
            self._joined.append(joined)
            _log.info("%s has joined; %d of %d are here", joined, len(self._joined), self._count)

    def _look_who_is_there(self) -> None:
        for joined in self._joined.copy():
            if not self._door.tell(joined.identity, self._still_here):
                self._joined.remove(joined)
                _log.warning("%s has left again before the engine began", joined)

    def _by_rank(self) -> dict[int, Joined]:
        """Those that asked for a number have it, the others the free ones, in the order in which they came."""
        found = {joined.said.rank: joined for joined in self._joined if joined.said.rank is not None}
        free = (rank for rank in range(1, self._count + 1) if rank not in found)
        return found | dict(zip(free, (joined for joined in self._joined if joined.said.rank is None), strict=False))

    def _missing(self) -> str:
        here = self._by_rank()
        missing = ", ".join(str(rank) for rank in range(1, self._count + 1) if rank not in here)
        found = "; ".join(f"rank {rank} is {joined}" for rank, joined in sorted(here.items())) or "no other has either"
        return (
            f"rank {missing} of {self._count + 1} did not join at {self.address} in {self._allowed_s:g} s, ten times "
            f"--step-deadline; {found}. Start it by engine rank --join {self.address} --rank-key-file FILE, and look whether its "
            "host reaches this one"
        )


class JoinedRanks:
    """Implements `RunningRanks`. `boot` may be called from another thread."""

    def __init__(self, door: Door, ranks: dict[int, Joined], still_here: messages.StillHere) -> None:
        self._door, self._ranks, self._still_here = door, ranks, still_here
        self._numbers = {joined.identity: rank for rank, joined in ranks.items()}
        self._frames: dict[int, bytes] = {}
        self._deaths: dict[int, Death] = {}
        self._told: set[int] = set()
        self._reached_s = 0.0
        self._is_closed = False

    def boot(self, rank: int, frame: bytes) -> None:
        self._frames[rank] = frame

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self._ranks[rank]})"

    def poll(self) -> list[Death]:
        if not self._is_closed:
            for rank in list(self._frames):
                self._door.tell(self._ranks[rank].identity, messages.BootFrame(rank=rank, frame=self._frames.pop(rank)))
            self._listen(0)
            self._reach()
        new = [death for rank, death in self._deaths.items() if rank not in self._told]
        self._told.update(death.rank for death in new)
        return new

    def dump_stacks(self) -> None:
        self._tell_all(messages.Stacks())

    def end(self, *, grace_s: float) -> None:
        end_s = time.monotonic() + grace_s
        if grace_s > 0.0:
            self._tell_all(messages.Over(grace_s=grace_s))
        while not self._is_closed and len(self._deaths) < len(self._ranks) and time.monotonic() < end_s:
            self._listen(_LOOK_MS)
            self._reach()
        if not self._is_closed:
            self._is_closed = True
            self._door.close()

    def _listen(self, timeout_ms: int) -> None:
        while found := self._door.receive(timeout_ms):
            identity, said = found
            timeout_ms = 0
            if isinstance(said, messages.Gone) and identity in self._numbers:
                rank = self._numbers[identity]
                self._deaths.setdefault(rank, said.death._replace(rank=rank))
            elif isinstance(said, messages.Join):
                self._door.tell(identity, messages.Refused("all ranks of this engine have joined already"))

    def _reach(self) -> None:
        if time.monotonic() - self._reached_s > _reach_s(self._still_here):
            self._reached_s = time.monotonic()
            self._tell_all(self._still_here)

    def _tell_all(self, message: messages.ToJoined) -> None:
        if self._is_closed:
            return
        left = {rank: joined for rank, joined in self._ranks.items() if rank not in self._deaths}
        if lost := [rank for rank, joined in left.items() if not self._door.tell(joined.identity, message)]:
            self._listen(_LOOK_MS)  # its last words may have come meanwhile
            for rank in lost:
                self._deaths.setdefault(rank, Death(rank, 1, "was lost: its connection is closed", ()))


def _reach_s(message: messages.StillHere) -> float:
    return min(_SLOWEST_REACH_S, message.silent_s / _REACHES)
