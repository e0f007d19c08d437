"""Groups of requests on their way: sent together, to one engine or several, and what comes of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from enginery.contracts.request import FinishReason, GenerationRequest, RequestOutput
from enginery.errors import EnginError, Overloaded, PluginError, QueueFull, RequestError
from enginery.serve.engine import messages
from enginery.serve.http.access import note_requests
from enginery.serve.http.faults import Aborted, ShuttingDown
from enginery.serve.http.metrics import REJECTED, RequestMeter

if TYPE_CHECKING:
    from enginery.serve.engine.client import EngineClient


class Sent(NamedTuple):
    """A request, and the engine that runs it. num_known: tokens of its prompt that this engine is thought to have cached."""

    client: EngineClient
    request: GenerationRequest
    num_known: int = 0


class Outputs:
    """What comes of a group of requests that were sent together, to one engine or several; iterate until all have finished.

    What came of a request since its last output was taken is one output, so that a busy front says more at once, not later.
    error: what ends those that have not finished. left_as: how the metrics count these.
    """

    def __init__(self, sent: Sequence[Sent]) -> None:
        self._clients = {each.request.request_id: each.client for each in sent}
        self.open = set(self._clients)
        self.times = {each.request.request_id: each.client.meter.begin(each.request, num_known=each.num_known) for each in sent}
        self.answers: asyncio.Queue[messages.Queued | EnginError] = asyncio.Queue()
        self._untaken: dict[str, RequestOutput] = {}
        self.error: EnginError | None = None
        self.left_as = "abort"
        self._came = asyncio.Event()

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output of any of the requests. Raises `EngineDied` and `Aborted`."""
        while self.open:
            if not self._untaken:
                if self.error is not None:
                    raise self.error
                self._came.clear()
                await self._came.wait()
                continue
            output = self._untaken.pop(next(iter(self._untaken)))
            if output.request_id in self.open:
                if output.finish_reason is not None or output.error is not None:
                    self.open.discard(output.request_id)
                return output
        raise StopAsyncIteration

    def put(self, output: RequestOutput, now_s: float, meter: RequestMeter) -> None:
        """Take in one output of the engine. now_s: when it came, by the monotonic clock. meter: of its engine."""
        meter.add(self.times[output.request_id], output, now_s)
        before = self._untaken.get(output.request_id)
        self._untaken[output.request_id] = output if before is None else _joined(before, output)
        self._came.set()

    def answer(self, said: messages.Queued | messages.Rejected) -> None:
        """Take in the engine's answer to one submit."""
        if isinstance(said, messages.Queued):
            self.answers.put_nowait(said)
            return
        self.left_as = REJECTED  # with one all are
        self.open.discard(said.request_id)
        self._clients[said.request_id].meter.end(self.times[said.request_id], REJECTED)
        self.answers.put_nowait(_rejection(said))

    def fail(self, error: EnginError) -> None:
        """Raise the error where somebody waits for outputs, after those that have come."""
        self.error, self.left_as = error, "abort" if isinstance(error, Aborted) else "error"
        self._came.set()
        self.answers.put_nowait(error)

    async def abort(self, request_id: str, reason: str = FinishReason.STOP) -> None:
        """Abort one request; no more outputs come of it. reason: as the metrics count it."""
        if request_id in self.open:
            self.open.discard(request_id)
            client = self._clients[request_id]
            client.meter.end(self.times[request_id], reason)
            await client.send(messages.Abort(request_id))

    async def accepted(self) -> None:
        """Wait for the answer to one submit. Raises what it was rejected with."""
        answer = await self.answers.get()
        if isinstance(answer, EnginError):
            raise answer


@contextlib.asynccontextmanager
async def generate(sent: Sequence[Sent]) -> AsyncIterator[Outputs]:
    """Send requests to their engines. Inside the context all are queued. On leaving it, those that have not finished are aborted.

    Raises `RequestError`, `QueueFull` if one is rejected (then none runs), `EngineDied` and `ShuttingDown`.
    """
    for client in {each.client for each in sent}:
        _check(client)
    group = Outputs(sent)
    note_requests(group.times.values())
    for client, request, _ in sent:
        client.groups[request.request_id] = group
    try:
        for (client, _), alike in itertools.groupby(sent, lambda each: (each.client, id(each.request.prompt_token_ids))):
            await client.send(messages.Submit.of([each.request for each in alike]))
        for _ in sent:
            await group.accepted()
        yield group
    finally:
        for client, request, _ in sent:
            client.groups.pop(request.request_id, None)
        for request_id in tuple(group.open):
            await group.abort(request_id, group.left_as)


def _check(client: EngineClient) -> None:
    """Raises `EngineDied` and `ShuttingDown` where it takes no requests. Its work, if it had none, begins now."""
    if client.died.done():
        raise client.death()
    if client.is_stopping:
        raise ShuttingDown
    if not client.groups:
        client.progress.moved()


def _rejection(said: messages.Rejected) -> EnginError:
    if said.is_fault:
        return PluginError(said.message)
    kind = QueueFull if said.is_queue_full else Overloaded if said.is_overload else RequestError
    return kind(said.message, param=said.param)


def _joined(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Two outputs of a request, one after the other, as one."""
    return msgspec.structs.replace(
        then,
        token_ids=first.token_ids + then.token_ids,
        logprobs=then.logprobs if first.logprobs is None else first.logprobs + (then.logprobs or ()),
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        num_drafted=first.num_drafted + then.num_drafted,
        num_accepted=first.num_accepted + then.num_accepted,
        queued_s=first.queued_s,
        embedding=first.embedding,
    )
