"""Engines of several ranks whose others are threads of this process: a start takes no longer than theirs together.

What ranks exchange is compared: all have to be in the same exchange, or both raise. Tensor ranks, lanes and stages, also on devices
that are simulated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from cuda_on_host import CAPTURING, Graph, here, launched

from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import ParallelFacts
from enginery.contracts.step import StepInput, StepOutput, pack, unpack
from enginery.engine.build import BuiltParts, Place, build_parts
from enginery.engine.engine import Engine
from enginery.engine.ranks.process import follower_of
from enginery.plugin.registry import Registry
from enginery.testing.kits.ranks import Meeting
from enginery.worker.choice import Choice
from enginery.worker.device import devices_of_ranks, torch_device
from enginery.worker.paths.running_step import RunningStep
from enginery.worker.ranks import groups
from enginery.worker.ranks.gloo import Standing
from enginery.worker.ranks.groups import RankGroups, refuse_for_ranks
from enginery.worker.ranks.stages import Follower, share_tokens
from enginery.worker.runner import Runner


class Turns:
    """Of the threads of ranks one runs at a time, until it waits for another.

    Each call of torch lets go of Python's lock, so threads that may run take it from each other all the time, which takes a third
    of the processor's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> None:
        self._lock.acquire()

    def give(self) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """While this thread waits."""
        self.give()
        try:
            yield
        finally:
            self.take()


class Meetings:
    """In place of the store through which groups find each other."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._lock, self._found = threading.Lock(), dict[str, Meeting]()
        self._ways = dict[tuple[object, ...], queue.SimpleQueue[Any]]()

    def of(self, name: str, size: int) -> Meeting:
        with self._lock:
            return self._found.setdefault(name, Meeting(size))

    def way(self, *ends: object) -> queue.SimpleQueue[Any]:
        """Of what one rank of a group sends to another."""
        with self._lock:
            return self._ways.setdefault(ends, queue.SimpleQueue())

    def abort(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            for meeting in self._found.values():
                meeting.abort()
            for way in self._ways.values():
                way.put(None)


class ThreadGroup:
    """In place of `enginery.worker.ranks.gloo.Group`."""

    device = torch.device("cpu")

    def __init__(self, store: Meetings, name: str, *, rank: int, size: int, standing: Standing, host: str) -> None:
        self.rank, self.size = rank, size
        self._store, self._name, self._meeting = store, name, store.of(name, size)

    def _exchange(self, what: str, value: Any) -> list[Any]:
        with self._store.turns.given():
            found = self._meeting.exchange(self.rank, (what, value))
        assert {name for name, _ in found} == {what}
        return [each for _, each in found]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange("sum", x.clone())
        return torch.stack(parts).sum(0)

    def own_part_sum(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange("own part of the sum", x.clone())
        return torch.stack(parts).sum(0).chunk(self.size)[self.rank]

    def smallest(self, values: Sequence[int]) -> list[int]:
        return [min(each) for each in zip(*self._exchange("smallest", values), strict=True)]

    def of_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [each.clone() for each in self._exchange("of all", x.clone())]  # memory that this rank's graphs write

    def at_first(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = self._exchange("at first", x.clone())
        return [each.clone() for each in parts] if self.rank == 0 else []

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange("from first", x.clone())[0])

    def texts(self, text: str) -> list[str]:
        return self._exchange("texts", text)

    def send(self, x: torch.Tensor, rank: int) -> tuple[torch.Tensor, Sent]:
        self.way(rank).put(x.clone())
        return x, Sent()

    def way(self, rank: int) -> queue.SimpleQueue[Any]:
        return self._store.way(self._name, self.rank, rank)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        with self._store.turns.given():
            found: torch.Tensor | None = self._store.way(self._name, rank, self.rank).get(timeout=50)
        if found is None:
            raise threading.BrokenBarrierError
        assert (found.shape, found.dtype) == (tuple(shape), dtype), "what is sent is what is waited for"
        return found


class Sent:
    """In place of the work of a group of torch's."""

    def is_completed(self) -> bool:
        return True


class DeviceThreadGroup:
    """In place of `enginery.worker.ranks.nccl.DeviceGroup`, of devices that are simulated: graphs exchange anew.

    Where NCCL may wait for ever, this raises: an exchange while another rank captures, and the end before that of graphs.
    """

    def __init__(self, store: Meetings, name: str, *, rank: int, size: int, standing: Standing, device: torch.device) -> None:
        self.rank, self.size, self.device, self.turns = rank, size, device, store.turns
        self._hosts = ThreadGroup(store, f"{name} on devices", rank=rank, size=size, standing=standing, host="")
        self._graphs = weakref.WeakSet[Graph]()
        self._members = set(self._hosts._exchange("devices", device.index))

    def _launched(self, exchange: Callable[..., Any], x: torch.Tensor, *, writes: bool = False) -> Any:
        if (graph := here.capturing) is not None:
            self._graphs.add(graph)
        else:
            assert not CAPTURING & self._members, "nothing is exchanged while another rank captures"
        return launched(exchange, x, writes=writes)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._launched(lambda out: out.copy_(self._hosts.sum(out)), x, writes=True)

    def own_part_sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._launched(self._hosts.own_part_sum, x)

    def of_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._launched(self._hosts.of_all, x)

    def at_first(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._launched(self._hosts.at_first, x, writes=True)

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        return self._launched(self._hosts.from_first, x, writes=True)

    def send(self, x: torch.Tensor, rank: int) -> tuple[torch.Tensor, Sent]:
        assert here.capturing is None, "what crosses between stages is in no graph"
        self._hosts.way(rank).put(x)
        return x, Sent()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        out = torch.empty(*shape, dtype=dtype, device=self.device)
        assert here.capturing is None, "what crosses between stages is in no graph"
        return self._launched(lambda there: there.copy_(self._hosts.receive(shape, dtype, rank)), out, writes=True)

    def close(self) -> None:
        assert all(graph.is_over for graph in self._graphs), "graphs end before the groups whose exchanges they have"


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
        """The first rank's thread is the one that makes this."""
        self._others = others
        self._devices = devices_of_ranks(asked)
        on_host = torch_device(self._devices[0]).type == "cpu"
        overlap = not on_host and asked.pp == 1 if asked.overlap is None else asked.overlap
        graphs = asked.graphs and not on_host  # threads of a host tell no exchanges
        self.options = dataclasses.replace(asked, overlap=overlap, graphs=graphs, wait_for_kernels=True)
        self._registry, self.turns = registry, Turns()
        self._meetings = Meetings(self.turns)
        self._mesh = ParallelFacts(tensor_size=asked.tp, num_lanes=asked.dp_attention, num_stages=asked.pp, cuts_experts=asked.ep)
        count = self._mesh.num_ranks
        self._groups: dict[int, RankGroups] = {}
        self._errors: list[BaseException] = []
        self._steps = [queue.SimpleQueue[bytes | None]() for _ in range(1, count)]
        self.guesses: list[Guesses] = [[] for _ in range(count)]
        self._built = threading.Barrier(count, timeout=50)
        self._threads = [threading.Thread(target=self._run, args=(rank,), name=f"rank {rank}") for rank in range(1, count)]
        for thread in self._threads:
            thread.start()
        self.turns.take()

    def build(self, rank: int = 0, **given: object) -> BuiltParts:
        options = dataclasses.replace(self.options, device=self._devices[rank], **self._others if rank else {})
        return build_parts(options, self._registry, place=Place(self._mesh.of_rank(rank), self._meeting(rank)), **given)

    def _meeting(self, rank: int) -> Callable[[Choice], RankGroups]:
        def meet(choice: Choice) -> RankGroups:
            refuse_for_ranks(choice)
            self._groups[rank] = RankGroups(
                self._meetings,  # type: ignore[arg-type]
                choice.parallel.of_rank(rank),
                host="",
                standing=Standing(),
                device=choice.device,
            )
            self._groups[rank].compare(choice)
            return self._groups[rank]

        return meet

    def _run(self, rank: int) -> None:
        self.turns.take()
        try:
            if (device := torch_device(self._devices[rank])).type != "cpu":
                torch.cuda.set_device(device)
            follower = follower_of(self.build(rank), self._groups[rank])
            self.meet()
            if isinstance(follower, Follower):
                self.guesses[rank] = noted(follower._runner)
            while (frame := self._next(rank)) is not None:
                follower.run(unpack(frame))
            self._groups[rank].close()
        except BaseException as error:
            self._errors.append(error)
            self._built.abort()
            self._meetings.abort()
        finally:
            self.turns.give()

    def meet(self) -> None:
        """All are built."""
        with self.turns.given():
            self._built.wait()

    def _next(self, rank: int) -> bytes | None:
        with self.turns.given():
            return self._steps[rank - 1].get()

    def send(self, step: StepInput) -> None:
        self.check()
        for steps in self._steps:
            steps.put(pack(step))

    def share(self, running: RunningStep) -> None:
        if self.options.overlap:
            share_tokens(self._groups[0].everyone, running.step, running.marked)

    def wait(self, running: RunningStep) -> StepOutput:
        return running.wait()

    def landed(self, step: StepInput) -> None: ...

    def check(self) -> None:
        first = next((error for error in self._errors if not isinstance(error, threading.BrokenBarrierError)), None)
        if first is not None:
            raise first

    def failed(self, error: BaseException) -> None:
        self._built.abort()
        self._meetings.abort()
        self.end()
        self.check()

    def end(self) -> None:
        for steps in self._steps:
            steps.put(None)
        with self.turns.given():
            for thread in self._threads:
                thread.join()
        if 0 in self._groups:
            self._groups[0].close()


@contextlib.contextmanager
def on_threads(
    asked: EngineOptions, registry: Registry, *, forced_rates: Sequence[float] = (), **others: object
) -> Iterator[tuple[Engine, ThreadRanks]]:
    """An engine of so many ranks as are asked for. At the end all tensor ranks have made the same guesses."""
    begin = Graph.capture_begin

    def begin_beside_others(graph: Graph, *given: object, **named: object) -> None:
        begin(graph, *given, **named)  # type: ignore[arg-type]
        with ranks.turns.given():
            time.sleep(0.001)

    with (
        patch.multiple(groups, Group=ThreadGroup, DeviceGroup=DeviceThreadGroup),
        patch.object(Graph, "capture_begin", begin_beside_others),
    ):
        ranks = ThreadRanks(asked, registry, others)
        try:
            try:
                parts = ranks.build(forced_rates=forced_rates)
                ranks.meet()
                engine = Engine(parts, registry, asked, ranks=ranks)
                ranks.guesses[0] = noted(engine._runner)
            except BaseException as error:
                ranks.failed(error)
                raise
            yield engine, ranks
            engine.close()
        finally:
            ranks._meetings.abort()
            ranks.end()
    ranks.check()
    if asked.pp == 1:
        assert all(guesses == ranks.guesses[0] for guesses in ranks.guesses)
