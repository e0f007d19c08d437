"""The other ranks as processes, as the one that schedules and samples has them: rank 0, in the engine's own process."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
import zmq

from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import Launch
from enginery.contracts.step import StepInput, StepOutput, pack
from enginery.engine.build import Place
from enginery.engine.ranks import messages
from enginery.engine.ranks.ranks import mesh_of
from enginery.engine.ranks.watch import Watch
from enginery.engine.ranks.wires import Wires
from enginery.errors import EngineDied
from enginery.plugin.registry import Registry
from enginery.worker.choice import Choice
from enginery.worker.device import torch_device
from enginery.worker.drafts.parts import find_draft_folder
from enginery.worker.paths.running_step import RunningStep
from enginery.worker.ranks.gloo import LostRank, Standing
from enginery.worker.ranks.groups import RankGroups, refuse_for_ranks
from enginery.worker.ranks.stages import share_tokens

ON_DEVICE: Final = "step on the device"
_BEATS: Final = 10  # in a deadline
_SLOWEST_BEAT_S: Final = 0.5
_END_S: Final = 2.0
_LAST_WORDS_MS: Final = 1000  # for what was sent last to get away; a rank that is gone takes nothing
_LOOK_MS: Final = 100


class RankProcesses:
    """Implements `Ranks` by processes, which run from now on. options: as this rank is to be built with."""

    def __init__(self, asked: EngineOptions, registry: Registry, *, launch: Launch, wires: Wires, devices: Sequence[str]) -> None:
        """devices: the option `device` of each rank."""
        self.options, self._devices = _of_one_rank(asked, wires, devices[0]), devices
        self._registry, self._standing, self._wires = registry, Standing(), wires
        self._groups: RankGroups | None = None
        self._parallel = mesh_of(asked)
        self._newest = -1
        self._broke: EngineDied | None = None
        others, deadline_s = devices[1:], asked.step_deadline
        try:
            bound = [wires.bind(zmq.PAIR, str(rank)) for rank in range(1, len(others) + 1)]
            self._links, self._addresses = [link for link, _ in bound], [address for _, address in bound]
            reports, self._reports = wires.bind(zmq.PULL, "reports")
            joining = wires.joining(len(others))
            self._watch = Watch(launch, others, reports=reports, deadline_s=deadline_s, standing=self._standing, joining=joining)
        except BaseException:
            wires.close()
            raise
        self._watch.busy("its start")
        self._end = weakref.finalize(self, _end, self._watch, self._links, wires)
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))

    @property
    def place(self) -> Place:
        """Of this process among them."""
        return Place(self._parallel, self._meet)

    def built(self) -> None:
        """This rank is; wait for the others. Raises `EngineDied`."""
        self._watch.wait_for(messages.Ready)
        self._watch.busy(None)

    def send(self, step: StepInput) -> None:
        self.check()
        self._newest = step.number
        self._watch.busy(f"step {step.number}")
        frame = pack(step)
        for link in self._links:
            while not link.poll(_LOOK_MS, zmq.POLLOUT):  # it has not connected yet, or is gone
                self.check()
            link.send(frame)

    def share(self, running: RunningStep) -> None:
        assert self._groups is not None, "a step runs when all have met"
        if self.options.overlap:
            share_tokens(self._groups.everyone, running.step, running.marked)

    def wait(self, running: RunningStep) -> StepOutput:
        if running.copied is None:
            return running.wait()
        self._standing.waits = ON_DEVICE
        output = running.wait()
        self._standing.waits = ""
        self.check()  # if a rank is gone, the exchange was ended, not done
        return output

    def landed(self, step: StepInput) -> None:
        if step.number == self._newest:
            self._watch.busy(None)

    def check(self) -> None:
        if (cause := self._watch.cause or self._broke) is not None:
            raise cause.with_traceback(None)  # without the frames of earlier calls

    def failed(self, error: BaseException) -> None:
        cause = self._watch.explained(error) if isinstance(error, LostRank) else self._watch.cause or self._broke
        self._end()
        if cause is error:
            return
        if cause is not None:
            raise cause from error
        self._broke = EngineDied(f"rank 0 (process {os.getpid()}) broke: {error!r}, which ended the other ranks; build a new LLM")
        if isinstance(error, KeyboardInterrupt):
            error.add_note(str(self._broke))

    def end(self) -> None:
        for link in self._links:
            if not link.closed and link.poll(0 if self._watch.cause else _LAST_WORDS_MS, zmq.POLLOUT):  # it may be connecting yet
                link.send(messages.END)
        self._end()
        if self._groups is not None:
            self._groups.close(severed=self._watch.cause is not None)

    def _meet(self, choice: Choice) -> RankGroups:
        """Tell the others what to build, and find them. Raises `EngineDied`, and `ConfigError` where they are not alike."""
        refuse_for_ranks(choice)
        checkpoint, running = choice.checkpoint, self._watch.running
        assert running is not None, "the watch has started them"
        options = dataclasses.replace(
            _with_found_draft_model(self.options, self._registry, choice),
            num_threads=None if self._wires.address else self.options.num_threads,
            model=str(checkpoint.folder),
            revision=None,
            tokenizer=str(checkpoint.tokenizer_folder),
            tokenizer_revision=None,
            served_model_name=None,
            chat_template=None,
            record_steps=None,
            profile_steps=0,
        )
        store, meeting = self._wires.store(self._parallel.num_ranks)
        for rank in range(1, self._parallel.num_ranks):
            boot = messages.Boot(
                parallel=choice.parallel.of_rank(rank),
                options=dataclasses.replace(options, device=self._devices[rank]),
                manifest=self._registry.manifest,
                steps=self._addresses[rank - 1],
                reports=self._reports,
                key=self._wires.key,
                meeting=meeting,
                host=self._wires.host,
                beat_s=min(_SLOWEST_BEAT_S, self.options.step_deadline / _BEATS),
                log_level=logging.getLevelName(logging.getLogger().getEffectiveLevel()),
            )
            running.boot(rank, messages.encode(boot))
        self._watch.wait_for(messages.Here)
        self._groups = RankGroups(store, self._parallel, host=self._wires.host, standing=self._standing, device=choice.device)
        self._groups.compare(choice)
        return self._groups


def _of_one_rank(asked: EngineOptions, wires: Wires, device: str) -> EngineOptions:
    """The processors of the host are divided among its ranks. listen: of ranks that may be on other hosts, with their own.

    Kernels are waited for: all ranks change to other backends in the same step, if any does.
    """
    threads = max(1, (asked.num_threads or torch.get_num_threads()) // (1 if wires.address else asked.num_ranks))
    overlap = asked.pp == 1 and torch_device(device).type != "cpu" if asked.overlap is None else asked.overlap
    return dataclasses.replace(
        asked, num_threads=threads, overlap=overlap, listen=wires.address or None, device=device, wait_for_kernels=True
    )


def _with_found_draft_model(asked: EngineOptions, registry: Registry, choice: Choice) -> EngineOptions:
    """Named by its folder, if one drafts that is no part of the model's own: other hosts may find none that ships with it."""
    folder = find_draft_folder(asked, registry, choice)
    if folder is None or choice.drafter is None or choice.drafter.spec.suits is not None:
        return asked
    return dataclasses.replace(asked, drafter=choice.drafter.name, draft_model=str(folder))


def _leave_to_parent(of: weakref.ref[RankProcesses]) -> None:
    """In a process that was forked. Nothing is taken apart there: that would wait for threads which did not come along."""
    if (ranks := of()) is not None:
        ranks._end.detach()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(ranks))


def _end(watch: Watch, links: list[zmq.Socket[bytes]], wires: Wires) -> None:
    watch.end(grace_s=_END_S if watch.cause is None else 0.0)
    for link in links:
        link.close(linger=0 if watch.cause else _LAST_WORDS_MS)
    wires.close()
