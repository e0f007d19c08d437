"""The engines behind one front, each in a process of its own: an engine that ends by itself is started again, so often as allowed.

ready ── it dies ──> restarting ── it is built ──> ready        nothing gives a restart back: the count is of the front's life
                         │  none is left, or it never was ready
                         └──> dead
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Final, Protocol

from enginery.contracts.engine import BuildProgress, EngineFacts, EngineStats
from enginery.contracts.request import GenerationRequest
from enginery.errors import EngineDied, EnginError
from enginery.schedule.routing import Candidate, choose
from enginery.serve.engine import messages
from enginery.serve.engine.client import EngineClient, EngineState
from enginery.serve.engine.outputs import Outputs, Sent, generate
from enginery.serve.engine.sent_prefixes import SentPrefixes, block_hashes, block_tokens
from enginery.serve.engine.totals import total
from enginery.serve.http.faults import EngineRestarts
from enginery.serve.http.metrics import RequestMeter

_AGAIN_S: Final = 1.0  # until another process is tried where the system refused one
_QUIET_S: Final = 5.0  # many heartbeats: it does something that takes long, or hangs
_log: Final = logging.getLogger(__name__)


class StartEngine(Protocol):
    """Starts the process of an engine; it is loading when this returns."""

    def __call__(self, *, meter: RequestMeter, comes_back: bool) -> Coroutine[None, None, EngineClient]:
        """meter: what requests are counted by. comes_back: whether another is started when it dies."""
        ...


class Replica:
    """One engine over its lives. name: for people. client: of the present life. num_restarts: lives after the first.

    prefixes: what the present one was sent. died: done when it does not come back, with why.
    """

    def __init__(
        self, start: StartEngine, client: EngineClient, *, name: str, restarts: int, is_back: Callable[[EngineFacts], None]
    ) -> None:
        """restarts: how often it may be started again. is_back: called when it was."""
        self._start, self._left, self._is_back = start, restarts, is_back
        self.name, self.client = name, client
        self.num_restarts = 0
        self.is_stopping = False
        self.prefixes = SentPrefixes()
        self._facts: EngineFacts | None = None
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._keeping = asyncio.create_task(self._keep())
        self._keeping.add_done_callback(self._kept)

    @property
    def state(self) -> EngineState:
        """RESTARTING from its end until it serves again."""
        state = self.client.state
        is_between = (state is EngineState.DEAD and self._comes_back) or (state is EngineState.LOADING and self.num_restarts > 0)
        return EngineState.RESTARTING if is_between else state

    @property
    def serves(self) -> bool:
        """Whether requests are sent to it, and its process runs: one that has just ended is not dead before its last words came."""
        return self.state in (EngineState.READY, EngineState.SILENT) and self.client.child.is_running

    @property
    def facts(self) -> EngineFacts | None:
        """Of the last life that was ready; None before the first."""
        self._facts = self.client.facts or self._facts
        return self._facts

    @property
    def _comes_back(self) -> bool:
        """Whether its end is not the last."""
        return self.facts is not None and self._left > 0 and not self.is_stopping

    def candidate(self, hashes: Sequence[bytes], block_size: int, planned: tuple[int, int]) -> Candidate:
        """For a prompt of such blocks. planned: requests and tokens that it gets besides."""
        meter, (num_planned, tokens_planned) = self.client.meter, planned
        return Candidate(
            serves=self.serves,
            is_silent=time.monotonic() - self.client.heard_s > _QUIET_S,
            is_full=meter.num_unstarted + num_planned >= self.client.options.max_queued_requests,
            waiting=meter.num_ahead + tokens_planned,
            cached=self.prefixes.num_known(hashes) * block_size,
            num_sent=meter.num_begun + num_planned,
        )

    async def _keep(self) -> None:
        """Until it has died for good."""
        why = await asyncio.shield(self.client.died)
        while self._comes_back:
            why = await self._live_again(why)
        self.died.set_result(why)

    async def _live_again(self, why: str) -> str:
        """One life more, of a process as the one before it, which ended for `why`. Returns why it ended, or could not begin."""
        self._left -= 1
        self.num_restarts += 1
        began_s = time.monotonic()
        _log.warning("%s is started again, %d times more at the most; it ended: %s", self.name, self._left, why)
        before, _ = self.client, self.facts
        try:
            self.client = await self._start(meter=before.meter, comes_back=self._left > 0)
        except EnginError as error:  # the system refuses a process, which may pass
            _log.warning("%s could not be started again: %s", self.name, error)
            await asyncio.sleep(_AGAIN_S)
            return str(error)
        self.client.restarted_for = why
        self.prefixes.clear()
        await before.stop()
        try:
            facts = await self.client.ready(before.manifest.digest())
        except EngineDied as error:
            if not self.client.died.done():  # it has other plugins, and so would the next
                self._left = 0
                await self.client.child.give_up(str(error))
        else:
            _log.warning("%s serves again, after %.1f s", self.name, time.monotonic() - began_s)
            self._is_back(facts)
        return await asyncio.shield(self.client.died)

    def _kept(self, keeping: asyncio.Task[None]) -> None:
        """A bug that ends what looks after it is its end too."""
        if not keeping.cancelled() and (error := keeping.exception()) is not None:
            _log.error("nothing looks after %s any more", self.name, exc_info=error)
            self.died.set_result(f"what looks after {self.name} failed with {type(error).__name__}: {error}")

    async def stop(self) -> None:
        """End it for good. May be called twice."""
        self.is_stopping = True
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        await self.client.stop()


class Replicas:
    """Implements `EngineHandle` over engines that are alike. Made and used inside one event loop.

    is_back: called with its facts when one was started again. died: done when none of them comes back, with why the last did not.
    """

    def __init__(self, starts: Sequence[StartEngine], clients: Sequence[EngineClient], *, restarts: int = 0) -> None:
        self.is_back: Callable[[EngineFacts], None] = lambda facts: None
        names = ["the engine"] if len(clients) == 1 else [f"replica {number}" for number in range(len(clients))]
        self.replicas = [
            Replica(start, client, name=name, restarts=restarts, is_back=lambda facts: self.is_back(facts))
            for start, client, name in zip(starts, clients, names, strict=True)
        ]
        self.options, self.manifest = clients[0].options, clients[0].manifest
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._dead: list[Replica] = []
        for replica in self.replicas:
            replica.died.add_done_callback(lambda _, replica=replica: self._has_died(replica))  # type: ignore[misc]

    @classmethod
    async def start(cls, *starts: StartEngine, restarts: int = 0) -> Replicas:
        """Start all; they are loading when this returns. restarts: of each."""
        clients: list[EngineClient] = []
        async with contextlib.AsyncExitStack() as started:
            for start in starts:
                clients.append(await start(meter=RequestMeter(), comes_back=restarts > 0))
                started.push_async_callback(clients[-1].stop)
            started.pop_all()  # all have: none is to be stopped here
        return cls(starts, clients, restarts=restarts)

    @property
    def clients(self) -> Iterator[EngineClient]:
        """Of the present lives."""
        return (replica.client for replica in self.replicas)

    @property
    def state(self) -> EngineState:
        """Of the one that is best off."""
        found = {replica.state for replica in self.replicas}
        return next(state for state in EngineState if state in found)

    @property
    def stats(self) -> EngineStats:
        """How all do together, as last reported."""
        return total([client.stats for client in self.clients])

    @property
    def loading(self) -> BuildProgress:
        """How far the start is."""
        return next((client.loading for client in self.clients if client.facts is None), self.replicas[0].client.loading)

    async def ready(self, manifest_digest: str | None = None) -> EngineFacts:
        """Wait until all are ready. Raises `EngineDied`, with the exit code of the child's error, if one does not start."""
        count = len(self.replicas)
        return (await asyncio.gather(*(_started(replica, manifest_digest, count=count) for replica in self.replicas)))[0]

    @contextlib.asynccontextmanager
    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Outputs]:
        """As `outputs.generate`; each goes where `routing.choose` sends it. Raises `EngineRestarts` too."""
        if self.state.is_down:
            raise self.death()
        async with generate(_routed(self.replicas, requests)) as outputs:
            yield outputs

    async def abort(self, request_id: str) -> bool:
        """End a request in its client's place; the client is told. Returns False if there is no request of that id."""
        return any([await client.abort(request_id) for client in self.clients])

    async def order(self, message: messages.Flush | messages.Profile) -> str:
        """Have the engines that serve do something between two steps. Returns what came of it.

        Raises `EngineDied`, `NotReady` and `EngineBusy`.
        """
        serving = [replica for replica in self.replicas if not replica.state.is_down]
        if not serving:
            raise self.death()
        told = await asyncio.gather(*(replica.client.order(message) for replica in serving))
        if isinstance(message, messages.Flush):
            for replica in serving:
                replica.prefixes.clear()
        if len(self.replicas) == 1:
            return told[0]
        return "; ".join(f"{replica.name}: {what}" for replica, what in zip(serving, told, strict=True))

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
        dead = [*reversed(self._dead), *self.replicas]
        ended = next((replica.client for replica in dead if replica.client.died.done()), None)
        return EngineDied(self.died.result()) if ended is None else ended.death()

    async def stop(self) -> None:
        """End all processes, by force where one does not end. May be called twice."""
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    def _has_died(self, replica: Replica) -> None:
        """Note one that does not come back."""
        why = replica.died.result()
        self._dead.append(replica)
        left = len(self.replicas) - len(self._dead)
        if not left:
            self.died.set_result(why)
        elif replica.facts is not None:  # else the start ends, and says so
            _log.error("%s has ended and is not started again, %d of %d are left: %s", replica.name, left, len(self.replicas), why)


async def _started(replica: Replica, manifest_digest: str | None, *, count: int) -> EngineFacts:
    try:
        return await replica.client.ready(manifest_digest)
    except EngineDied as death:
        if count > 1:
            death.args = (f"{replica.name} did not start, and all {count} must (--restarts is for those that served): {death}",)
        raise


def _routed(replicas: Sequence[Replica], requests: Sequence[GenerationRequest]) -> list[Sent]:
    """Where each goes. One prompt's go together: they share its keys and values."""
    if len(replicas) == 1:
        return [Sent(replicas[0].client, request) for request in requests]
    sent, routes = list[Sent](), dict[tuple[tuple[int, ...], str], tuple[int, list[bytes]]]()
    num_planned, tokens_planned = Counter[int](), Counter[int]()
    options = replicas[0].client.options
    size = block_tokens(options.page_size)
    for (_, salt), group in itertools.groupby(requests, lambda each: (id(each.prompt_token_ids), each.cache_salt)):
        alike = list(group)
        prompt = alike[0].prompt_token_ids
        if (route := routes.get((prompt, salt))) is None:
            hashes = block_hashes(prompt, salt, size=size) if options.prefix_cache else []
            planned = [(num_planned[number], tokens_planned[number]) for number in range(len(replicas))]
            candidates = [each.candidate(hashes, size, plan) for each, plan in zip(replicas, planned, strict=True)]
            route = routes[prompt, salt] = choose(len(prompt), candidates) or 0, hashes  # where none serves, the first says why
        place, hashes = route
        placed = _placed(replicas[place], alike, hashes, size)
        num_planned[place] += len(alike)
        tokens_planned[place] += sum(max(1, len(prompt) - each.num_known) for each in placed)
        sent += placed
    return sent


def _placed(replica: Replica, alike: Sequence[GenerationRequest], hashes: list[bytes], size: int) -> list[Sent]:
    """Requests of one prompt with such blocks of `size` tokens, sent here: what the first leaves in the cache the others find."""
    first = others = replica.prefixes.num_known(hashes) * size
    if (facts := replica.facts) is not None:
        replica.prefixes.add(hashes, most=facts.num_pages * facts.page_size // size)
        others = replica.prefixes.num_known(hashes) * size
    return [Sent(replica.client, request, others if index else first) for index, request in enumerate(alike)]
