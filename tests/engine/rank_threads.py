"""Engines of several tensor ranks whose others are threads of this process: a start takes no longer than theirs together.

What ranks exchange is compared: all have to be in the same exchange, or both raise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import ParallelFacts
from enginery.contracts.step import StepInput, StepOutput, pack, unpack
from enginery.engine.build import BuiltParts, Place, build_parts, build_runner
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.testing.kits.ranks import Meeting
from enginery.worker.choice import Choice
from enginery.worker.paths.running_step import RunningStep
from enginery.worker.ranks import groups
from enginery.worker.ranks.gloo import Standing
from enginery.worker.ranks.groups import RankGroups, refuse_for_ranks
from enginery.worker.ranks.stages import Follower, share_tokens
from enginery.worker.runner import Runner


class Meetings:
    """In place of the store through which groups find each other."""

    def __init__(self) -> None:
        self._lock, self._found = threading.Lock(), dict[str, Meeting]()

    def of(self, name: str, size: int) -> Meeting:
        with self._lock:
            return self._found.setdefault(name, Meeting(size))

    def abort(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            for meeting in self._found.values():
                meeting.abort()


class ThreadGroup:
    """In place of `enginery.worker.ranks.gloo.Group`."""

    device = torch.device("cpu")

    def __init__(self, store: Meetings, name: str, *, rank: int, size: int, standing: Standing, host: str) -> None:
        self.rank, self.size = rank, size
        self._meeting = store.of(name, size)

    def _exchange(self, what: str, value: Any) -> list[Any]:
        found = self._meeting.exchange(self.rank, (what, value))
        assert {name for name, _ in found} == {what}
        return [each for _, each in found]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange("sum", x.clone())
        return torch.stack(parts).sum(0)

    def smallest(self, values: Sequence[int]) -> list[int]:
        return [min(each) for each in zip(*self._exchange("smallest", values), strict=True)]

    def of_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._exchange("of all", x.clone())

    def at_first(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = self._exchange("at first", x.clone())
        return parts if self.rank == 0 else []

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange("from first", x.clone())[0])

    def texts(self, text: str) -> list[str]:
        return self._exchange("texts", text)


Guesses = list[list[list[int]]]


def noted(runner: Runner) -> Guesses:
    """What the draft model guesses behind each step from now on."""
    found: Guesses = []
    draft = runner.draft

    def noting(*args: Any) -> Any:
        guesses = draft(*args)
        if guesses is not None:
            found.append(guesses.tokens.tolist())
        return guesses

    runner.draft = noting  # type: ignore[method-assign]
    return found


class ThreadRanks:
    """Implements `Ranks`. guesses: of each rank. others: options that all but the first have of their own."""

    def __init__(self, asked: EngineOptions, registry: Registry, others: Mapping[str, Any]) -> None:
        self._others = others
        self.options = dataclasses.replace(asked, overlap=bool(asked.overlap), graphs=False)  # threads tell no exchanges
        self._registry, self._meetings = registry, Meetings()
        self._mesh = ParallelFacts(tensor_size=asked.tp)
        self._groups: dict[int, RankGroups] = {}
        self._errors: list[BaseException] = []
        self._steps = [queue.SimpleQueue[bytes | None]() for _ in range(1, asked.tp)]
        self.guesses: list[Guesses] = [[] for _ in range(asked.tp)]
        self._threads = [threading.Thread(target=self._run, args=(rank,), name=f"rank {rank}") for rank in range(1, asked.tp)]
        for thread in self._threads:
            thread.start()

    def build(self, rank: int = 0) -> BuiltParts:
        options = dataclasses.replace(self.options, **self._others) if rank else self.options
        return build_parts(options, self._registry, place=Place(self._mesh.of_rank(rank), self._meeting(rank)))

    def _meeting(self, rank: int) -> Callable[[Choice], RankGroups]:
        def meet(choice: Choice) -> RankGroups:
            refuse_for_ranks(choice)
            self._groups[rank] = RankGroups(self._meetings, self._mesh.of_rank(rank), host="", standing=Standing())  # type: ignore[arg-type]
            self._groups[rank].compare(choice)
            return self._groups[rank]

        return meet

    def _run(self, rank: int) -> None:
        try:
            runner = build_runner(self.build(rank))
            self.guesses[rank] = noted(runner)
            follower = Follower(runner, self._groups[rank].tensor, tells_tokens=bool(self.options.overlap))
            while (frame := self._steps[rank - 1].get()) is not None:
                follower.run(unpack(frame))
        except BaseException as error:
            self._errors.append(error)
            self._meetings.abort()

    def send(self, step: StepInput) -> None:
        self.check()
        for steps in self._steps:
            steps.put(pack(step))

    def share(self, running: RunningStep) -> None:
        if self.options.overlap:
            share_tokens(self._groups[0].tensor, running.step, running.sampled)

    def wait(self, running: RunningStep) -> StepOutput:
        return running.wait()

    def landed(self, step: StepInput) -> None: ...

    def check(self) -> None:
        first = next((error for error in self._errors if not isinstance(error, threading.BrokenBarrierError)), None)
        if first is not None:
            raise first

    def failed(self, error: BaseException) -> None:
        self._meetings.abort()
        self.end()
        self.check()

    def end(self) -> None:
        for steps in self._steps:
            steps.put(None)
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def on_threads(asked: EngineOptions, registry: Registry, **others: object) -> Iterator[tuple[Engine, ThreadRanks]]:
    """An engine of so many ranks as are asked for. At the end all ranks have made the same guesses."""
    plain = groups.Group
    groups.Group = ThreadGroup  # type: ignore[assignment,misc]
    ranks = ThreadRanks(asked, registry, others)
    try:
        try:
            engine = Engine(ranks.build(), registry, asked, ranks=ranks)
            ranks.guesses[0] = noted(engine._runner)
        except BaseException as error:
            ranks.failed(error)
            raise
        yield engine, ranks
        engine.close()
    finally:
        groups.Group = plain  # type: ignore[misc]
        ranks._meetings.abort()
        ranks.end()
    ranks.check()
    assert all(guesses == ranks.guesses[0] for guesses in ranks.guesses)
