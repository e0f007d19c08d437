"""A rank's process: build its part of the model, then run the steps that it is sent. Started with its boot frame on stdin.

It ends when it is told to, when it breaks, and when its parent is gone, however that died.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback

import msgspec
import torch
import zmq

from enginery.child_process import die_with_parent, read_frame
from enginery.contracts.engine import BuildProgress
from enginery.contracts.step import unpack
from enginery.engine.build import BuiltParts, Place, build_parts, build_runner
from enginery.engine.ranks import messages
from enginery.engine.ranks.keys import RankKey
from enginery.errors import EnginError
from enginery.plugin.registry import Registry
from enginery.worker.choice import Choice
from enginery.worker.device import torch_device
from enginery.worker.ranks.gloo import LostRank, Standing, open_store
from enginery.worker.ranks.groups import RankGroups, refuse_for_ranks
from enginery.worker.ranks.stages import EarlyStage, Follower


class Rank:
    """One engine's part in this process."""

    def __init__(self, boot: messages.Boot, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._boot, self._context, self._standing = boot, context, Standing()
        self._rank = boot.parallel.rank
        self._groups: RankGroups | None = None
        self._reports = self._connect(zmq.PUSH, boot.reports)
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._beating.start()

    def run(self) -> int:
        """Build, then follow until told to end. Returns the exit code."""
        try:
            self._follow(self._build())
            assert self._groups is not None, "a rank has met the others"
            self._groups.close()
        except Exception as error:  # the boundary of the process
            is_ours, is_lost = isinstance(error, EnginError), isinstance(error, LostRank)
            message = str(error) if is_ours else "".join(traceback.format_exception_only(error)).strip()
            code = error.exit_code if isinstance(error, EnginError) else 1
            if not (is_ours or is_lost):
                traceback.print_exc()
            self._tell(messages.Failed(rank=self._rank, message=message, exit_code=code, is_ours=is_ours, is_lost=is_lost))
            return code
        finally:
            self._ended.set()
            self._beating.join()
            self._reports.close(linger=2000)
        return 0

    def _build(self) -> Follower | EarlyStage:
        boot = self._boot
        registry = Registry.replay(boot.manifest)
        if (device := torch_device(boot.options.device)).type != "cpu":
            torch.cuda.set_device(device)  # kernels are launched on the current one
        parts = build_parts(boot.options, registry, self._report, place=Place(boot.parallel, self._meet))
        assert self._groups is not None, "a rank has met the others"
        return follower_of(parts, self._groups)

    def _follow(self, follower: Follower | EarlyStage) -> None:
        steps = self._connect(zmq.PAIR, self._boot.steps)
        self._standing.phase = "idle"
        self._tell(messages.Ready(self._rank))
        while (frame := steps.recv()) != messages.END:
            self._standing.phase = "step"
            step = unpack(frame)
            follower.run(step)
            self._standing.number, self._standing.phase = step.number, "idle"
        steps.close(linger=0)

    def _meet(self, choice: Choice) -> RankGroups:
        refuse_for_ranks(choice)
        self._tell(messages.Here(self._rank))
        store = open_store(self._boot.meeting, self._boot.parallel.num_ranks)
        self._groups = RankGroups(store, self._boot.parallel, host=self._boot.host, standing=self._standing, device=choice.device)
        self._groups.compare(choice)
        return self._groups

    def _report(self, progress: BuildProgress) -> None:
        self._standing.phase = f"start: {progress.phase} {progress.done_bytes or ''}".strip()

    def _beat(self) -> None:
        link, standing, ended = self._connect(zmq.PUSH, self._boot.reports), self._standing, False
        while not ended:  # at once, as who was not heard yet is given more time
            worked_s = time.process_time() - time.thread_time()
            alive = messages.Alive(
                rank=self._rank, number=standing.number, phase=standing.phase, waits=standing.waits, worked_s=worked_s
            )
            link.send(messages.encode(alive))
            ended = self._ended.wait(self._boot.beat_s)
        link.close(linger=0)

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        link = self._context.socket(kind)
        link.set_hwm(0)
        if self._boot.key:
            RankKey(self._boot.key).secure_rank(link)
        link.connect(address)
        return link

    def _tell(self, message: messages.FromRank) -> None:
        self._reports.send(messages.encode(message))


def follower_of(parts: BuiltParts, groups: RankGroups) -> Follower | EarlyStage:
    """What runs this rank's part of each step."""
    if not groups.parallel.is_last_stage:
        return EarlyStage(parts.step, parts.captured.graphs, lane=groups.parallel.lane)
    return Follower(build_runner(parts), groups.everyone, tells_tokens=parts.choice.settings.overlap)


def main() -> int:
    """One engine after the other, as the parent boots them, until one fails."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the parent decides when this process ends
    die_with_parent()
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    boots: queue.SimpleQueue[messages.Boot] = queue.SimpleQueue()

    def read_boots() -> None:
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            boots.put(msgspec.msgpack.decode(frame, type=messages.Boot))
        os._exit(0)

    threading.Thread(target=read_boots, name="parent-watch", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    while True:
        boot = boots.get()
        logging.basicConfig(stream=sys.stderr, level=boot.log_level, format="%(message)s")
        if code := Rank(boot, context).run():
            context.term()
            return code


if __name__ == "__main__":
    sys.stdout.flush()
    status = main()
    sys.stderr.flush()
    os._exit(status)  # groups of ranks that are gone would hold the interpreter's end up
