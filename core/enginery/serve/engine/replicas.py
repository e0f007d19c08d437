"""The engines behind one front, each in a process of its own: an engine that ends by itself is started again, so often as allowed.

ready ── it dies ──> restarting ── it is built ──> ready        nothing gives a restart back: the count is of the front's life
                         │  none is left, or it never was ready
                         └──> dead
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Final, Protocol

from enginery.contracts.engine import BuildProgress, EngineFacts, EngineStats
from enginery.contracts.request import GenerationRequest
from enginery.errors import EngineDied, EnginError
from enginery.serve.engine import messages
from enginery.serve.engine.client import EngineClient, EngineState, Outputs
from enginery.serve.http.faults import EngineRestarts
from enginery.serve.http.metrics import RequestMeter

_log: Final = logging.getLogger(__name__)


class StartEngine(Protocol):
    """Starts the process of an engine; it is loading when this returns."""

    def __call__(self, *, meter: RequestMeter, comes_back: bool) -> Coroutine[None, None, EngineClient]:
        """meter: what requests are counted by. comes_back: whether another is started when it dies."""
        ...


class Replica:
    """One engine over its lives. client: of the present one. num_restarts: lives after the first.

    died: done when it does not come back, with why.
    """

    def __init__(self, start: StartEngine, client: EngineClient, *, restarts: int, is_back: Callable[[EngineFacts], None]) -> None:
        """restarts: how often it may be started again. is_back: called when it was."""
        self._start, self._left, self._is_back = start, restarts, is_back
        self.client = client
        self.num_restarts = 0
        self.is_stopping = False
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._keeping = asyncio.create_task(self._keep())

    @property
    def state(self) -> EngineState:
        """RESTARTING from its end until it serves again."""
        state = EngineState.DEAD if self.died.done() else self.client.state
        if state is EngineState.DEAD and not self.died.done():
            return EngineState.RESTARTING if self._comes_back else EngineState.DEAD
        return EngineState.RESTARTING if state is EngineState.LOADING and self.num_restarts else state

    @property
    def _comes_back(self) -> bool:
        """Whether its end is not the last."""
        was_ready = self.num_restarts > 0 or self.client.was_ready
        return was_ready and self._left > 0 and not self.is_stopping

    async def _keep(self) -> None:
        """Until it has died for good."""
        while True:
            why = await asyncio.shield(self.client.died)
            if not self._comes_back:
                self.died.set_result(why)
                return
            await self._restart(why)

    async def _restart(self, why: str) -> None:
        self._left -= 1
        self.num_restarts += 1
        began_s = time.monotonic()
        _log.warning("the engine is started again, %d times more at the most; it ended: %s", self._left, why)
        before = self.client
        self.client = await self._start(meter=before.meter, comes_back=self._left > 0)
        self.client.restarted_for = why
        await before.stop()
        with contextlib.suppress(EngineDied):  # `_keep` sees to it
            facts = await self.client.ready(before.manifest.digest())
            _log.warning("the engine serves again, after %.1f s", time.monotonic() - began_s)
            self._is_back(facts)

    async def stop(self) -> None:
        """End it for good. May be called twice."""
        self.is_stopping = True
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        await self.client.stop()


class Replicas:
    """Implements `EngineHandle` over engines that are alike. Made and used inside one event loop.

    is_back: called with its facts when one was started again. died: done when none of them comes back, with why.
    """

    def __init__(self, start: StartEngine, clients: Sequence[EngineClient], *, restarts: int = 0) -> None:
        self.is_back: Callable[[EngineFacts], None] = lambda facts: None
        self.replicas = [Replica(start, client, restarts=restarts, is_back=lambda facts: self.is_back(facts)) for client in clients]
        self.options, self.manifest, self.meter = clients[0].options, clients[0].manifest, clients[0].meter
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.create_task(_until_all_died(self.replicas, self.died))

    @classmethod
    async def start(cls, start: StartEngine, *, restarts: int = 0) -> Replicas:
        """Start all; they are loading when this returns."""
        meter = RequestMeter()
        return cls(start, [await start(meter=meter, comes_back=restarts > 0)], restarts=restarts)

    @property
    def clients(self) -> Iterator[EngineClient]:
        """Of the present lives."""
        return (replica.client for replica in self.replicas)

    @property
    def state(self) -> EngineState:
        """Of the one that is best off."""
        found = {replica.state for replica in self.replicas}
        return next(state for state in _BEST_FIRST if state in found)

    @property
    def stats(self) -> EngineStats:
        """How it does, as last reported."""
        return self.replicas[0].client.stats

    @property
    def loading(self) -> BuildProgress:
        """How far the start is."""
        return next((client.loading for client in self.clients if not client.was_ready), self.replicas[0].client.loading)

    async def ready(self, manifest_digest: str | None = None) -> EngineFacts:
        """Wait until all are ready. Raises `EngineDied`, with the exit code of the child's error, if one does not start."""
        return (await asyncio.gather(*(client.ready(manifest_digest) for client in self.clients)))[0]

    @contextlib.asynccontextmanager
    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Outputs]:
        """As `EngineClient.generate`. Raises `EngineRestarts` too."""
        if self.state in (EngineState.DEAD, EngineState.RESTARTING):
            raise self.death()
        async with self.replicas[0].client.generate(requests) as outputs:
            yield outputs

    async def abort(self, request_id: str) -> bool:
        """End a request in its client's place; the client is told. Returns False if there is no request of that id."""
        return any([await client.abort(request_id) for client in self.clients])

    async def order(self, message: messages.Flush | messages.Profile) -> str:
        """Have the engines do something between two steps. Returns what came of it.

        Raises `EngineDied`, `NotReady` and `EngineBusy`.
        """
        return "; ".join([await client.order(message) for client in self.clients])

    def refuse(self) -> None:
        """Take no more requests; those that run go on, and nothing is started again."""
        for replica in self.replicas:
            replica.is_stopping = replica.client.is_stopping = True

    def fail_requests(self, error: Callable[[], EnginError]) -> None:
        """End all requests, each with an error of its own."""
        for client in self.clients:
            client.fail_requests(error)

    def death(self) -> EngineDied:
        """Why no engine serves, as an error to raise: `EngineDied`, or `EngineRestarts` if one comes back."""
        for replica in self.replicas:
            if replica.state is EngineState.RESTARTING:
                client = replica.client
                return EngineRestarts(client.died.result() if client.died.done() else client.restarted_for)
        return next(client for client in self.clients if client.died.done()).death()

    async def stop(self) -> None:
        """End all processes, by force where one does not end. May be called twice."""
        self._watching.cancel()
        await asyncio.gather(*(replica.stop() for replica in self.replicas))


async def _until_all_died(replicas: Sequence[Replica], died: asyncio.Future[str]) -> None:
    """Tell that none comes back any more, and why the last one did not."""
    whys = await asyncio.gather(*(asyncio.shield(replica.died) for replica in replicas))
    died.set_result(whys[-1])


_BEST_FIRST: Final = (
    *(EngineState.STOPPING, EngineState.READY, EngineState.SILENT),
    *(EngineState.LOADING, EngineState.RESTARTING, EngineState.DEAD),
)
