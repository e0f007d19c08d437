"""Watches the other ranks of an engine, on a thread of its own: who has died, who hangs (`patience`), and who was first.

    rank 1 .. N  -- alive, several times a second -->  watch  -- the first cause -->  the thread that runs the engine

One that fails takes the others with it: they would wait in an exchange for ever. Once they are killed, so does none here.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from enginery.contracts.parallel import Death, Launch, LaunchPlan, RunningRanks
from enginery.engine.ranks import messages
from enginery.engine.ranks.joined import Listening
from enginery.engine.ranks.local import COMMAND, LocalRanks
from enginery.engine.ranks.patience import Patience
from enginery.errors import EngineDied, EnginError
from enginery.worker.ranks.gloo import Standing

Link = zmq.Socket[bytes]
_LOOK_S: Final = 0.05
_LAST_WORDS_S: Final = 0.5  # until what a dying rank said has come
_PAUSE_S: Final = 2.0  # this process did not run meanwhile: nobody could be heard


class Watch:
    """Starts the ranks and ends them. running: those processes, once they are started. cause: why they ended; None: they run."""

    def __init__(
        self, launch: Launch, on: Sequence[str], *, reports: Link, deadline_s: float, standing: Standing, joining: Listening | None
    ) -> None:
        """reports: where ranks tell how they are; closed at the end. standing: what the engine's own rank does.

        on: the device of each. joining: how ranks of other hosts come; None: none do.
        """
        self._launch, self._on, self._reports, self._joining, self._standing = launch, tuple(on), reports, joining, standing
        self._patience = Patience(len(on), deadline_s=deadline_s, standing=standing, now_s=time.monotonic())
        self._said: dict[type[messages.FromRank], set[int]] = {messages.Here: set(), messages.Ready: set()}
        self._failed: list[messages.Failed] = []
        self._changed = threading.Condition()
        self.cause: EnginError | None = None
        self._busy: tuple[str, float] | None = None
        self._grace_s: float | None = None
        self.running: RunningRanks | None = None
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()
        try:
            self._until(lambda: self.running is not None)
        except BaseException:
            if joining is not None:
                joining.given_up.set()
            self.end(grace_s=0.0)
            raise

    def busy(self, what: str | None) -> None:
        """What all ranks do together from now on; None: nothing."""
        self._busy = None if what is None else (what, time.monotonic())

    def wait_for(self, kind: type[messages.FromRank]) -> None:
        """Until all ranks have said it. Raises `EngineDied` when one fails before."""
        self._until(lambda: len(self._said[kind]) == len(self._on))

    def explained(self, error: EnginError) -> EnginError:
        with self._changed:
            self._changed.wait_for(lambda: self.cause is not None, timeout=10 * _LAST_WORDS_S)
            return self.cause or error

    def end(self, *, grace_s: float) -> None:
        """End all ranks: by force after so long. May be called twice."""
        self._grace_s = grace_s
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.cause is not None or condition())
        if self.cause is not None:
            raise self.cause

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            plan = LaunchPlan(num_others=len(self._on), command=COMMAND, start=LocalRanks, joining=self._joining, devices=self._on)
            running = self._launch(plan)
            self._patience.pause(time.monotonic() - began_s)
            with self._changed:
                self.running = running
                self._changed.notify_all()
            self._watch(running, self._reports)
            running.end(grace_s=self._grace_s or 0.0)
        except EnginError as error:
            self._fail(error)
        except Exception as error:  # the boundary of the thread
            self._fail(EngineDied(f"the ranks could not be watched: {type(error).__name__}: {error}"))
            raise
        finally:
            self._reports.close(linger=0)

    def _watch(self, running: RunningRanks, link: Link) -> None:
        looked_s = time.monotonic()
        while self._grace_s is None and self.cause is None:
            self._listen(link, _LOOK_S)
            now_s = time.monotonic()
            if now_s - looked_s > _PAUSE_S:
                self._patience.pause(now_s - looked_s)
            looked_s = now_s
            if deaths := running.poll():
                self._listen(link, _LAST_WORDS_S, until_silent=False)
                self._fail(self._epitaph(deaths + running.poll(), running))
            elif hung := self._patience.broken(self._busy, now_s, running.name):
                print(f"{hung}; the stacks of all ranks follow", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
                running.dump_stacks()
                time.sleep(_LAST_WORDS_S)
                self._fail(EngineDied(hung))

    def _listen(self, link: Link, seconds: float, *, until_silent: bool = True) -> None:
        """Take in what comes within so many seconds, or as long as there is something."""
        end_s = time.monotonic() + seconds
        while link.poll(max(0, int(1000 * (end_s - time.monotonic())))):
            message = messages.decode_from_rank(link.recv())
            match message:
                case messages.Alive():
                    self._patience.take(message, time.monotonic())
                case messages.Failed():
                    self._failed.append(message)
                case _:
                    with self._changed:
                        self._said[type(message)].add(message.rank)
                        self._changed.notify_all()
            if until_silent:
                end_s = 0.0

    def _epitaph(self, deaths: Sequence[Death], running: RunningRanks) -> EnginError:
        """Of the first rank that broke by itself. One that ends because another is gone says so."""
        failed = {said.rank: said for said in self._failed}
        first = next((said for said in self._failed if not said.is_lost), None)
        if first is not None:
            cause = EngineDied(f"{running.name(first.rank)} {'failed' if first.is_ours else 'broke'}: {first.message}")
            cause.exit_code = first.exit_code
            return cause
        death = next((death for death in deaths if death.rank not in failed), deaths[0])
        for line in death.last_lines:
            print(f"rank {death.rank}: {line}", file=sys.stderr, flush=True)
        lost = f": {failed[death.rank].message.splitlines()[0]}" if death.rank in failed else ""
        return EngineDied(f"{running.name(death.rank)} {death.how}, in {self._patience.doing(death.rank)}{lost}")

    def _fail(self, cause: EnginError) -> None:
        """The cause first: to end ranks takes as long as their executor likes. Who is told it waits for that in `end`."""
        with self._changed:
            self.cause = self.cause or cause
            self._changed.notify_all()
        try:
            if self.running is not None:
                self.running.end(grace_s=0.0)
        finally:
            self._standing.sever()
