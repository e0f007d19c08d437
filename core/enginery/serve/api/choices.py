"""From jobs to the text of their choices: what the endpoints that generate have in common."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from enginery.contracts.parsers import ParserEvent
from enginery.contracts.request import FinishReason, RequestOutput, TokenLogprob
from enginery.errors import EnginError, RequestError
from enginery.serve.api.answer_parsers import AnswerFormat, AnswerReader
from enginery.serve.api.served_model import Job
from enginery.serve.engine.outputs import Outputs
from enginery.serve.engine.replicas import Replicas
from enginery.serve.http.event_stream import DONE, json_event
from enginery.serve.http.faults import Fault, GenerationFailed
from enginery.serve.schemas.completions import StreamOptions
from enginery.serve.schemas.replies import CachedTokens, CompletionTokens, Usage
from enginery.text.detokenize import CompletionText
from enginery.text.tokenizer import Tokenizer

ChoiceT = TypeVar("ChoiceT")
PromptLogprobs = Sequence[TokenLogprob | None]
TOOL_CALLS: Final = "tool_calls"
_INLINE_TOKENS: Final = 500  # some 5 ms with the likeliest of each
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ChoiceDelta:
    """What a step added to one choice. is_first: the request was queued, and there is no token yet.

    events: what the parsers made of the text; one `ContentText` with all of it where nothing is parsed. came_with: of each event,
    how many of these tokens had come. ended_in_call: it stopped within a call, or before the one that was forced.
    """

    job: Job
    is_first: bool = False
    text: str = ""
    events: Sequence[ParserEvent] = ()
    came_with: Sequence[int] = ()
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stopped_by: str | None = None
    ended_in_call: bool = False
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class _Piece(NamedTuple):
    """Tokens that are turned into text at once. ends: nothing follows them. stop_token_id: the last of them, if it is one."""

    token_ids: Sequence[int]
    ends: bool = False
    stop_token_id: int | None = None


class _Choice:
    """The text of one choice as it grows."""

    def __init__(self, tokenizer: Tokenizer, job: Job, how: AnswerFormat | None) -> None:
        self._job, how = job, how or AnswerFormat(goes_on=True)
        self._text = CompletionText(tokenizer, job.request.params, after=job.prompt.token_ids[-1:] if how.goes_on else ())
        self._reader = AnswerReader(how)
        self._one_by_one = how.reasoning is not None or not how.parallel or how.tells_logprobs

    def feed(self, output: RequestOutput) -> ChoiceDelta:
        """What the output adds. A stop string, or a call, may end the choice before the engine does."""
        reader, num_tokens, num_reasoning_tokens, stopped_by = self._reader, 0, 0, None
        texts: list[str] = []
        events: list[ParserEvent] = []
        came_with: list[int] = []
        reason: str | None = output.finish_reason
        for piece in self._pieces(output):
            added = self._text.feed(piece.token_ids, finished=piece.ends, stop_token_id=piece.stop_token_id)
            num_tokens += added.num_tokens
            num_reasoning_tokens += added.num_tokens if reader.is_reasoning else 0
            texts.append(added.text)
            stopped_by = added.stopped_by
            events += reader.feed(added.text, finished=piece.ends or stopped_by is not None)
            came_with += [num_tokens] * (len(events) - len(came_with))
            if stopped_by is not None or reader.is_over:
                reason = FinishReason.STOP
                break
        drafted, accepted = output.guesses(num_tokens)
        return ChoiceDelta(
            job=self._job,
            text="".join(texts),
            events=events,
            came_with=came_with,
            num_tokens=num_tokens,
            num_reasoning_tokens=num_reasoning_tokens,
            logprobs=(output.logprobs or ())[:num_tokens],
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=TOOL_CALLS if reason == FinishReason.STOP and reader.has_called and not reader.ended_in_call else reason,
            stopped_by=stopped_by,
            ended_in_call=reader.ended_in_call,
            num_cached_tokens=output.num_cached_tokens,
            num_drafted=drafted,
            num_accepted=accepted,
        )

    def _pieces(self, output: RequestOutput) -> Iterator[_Piece]:
        """The output's tokens: one by one where it matters which of them a text or an end comes of. There is always a last."""
        first: Sequence[int] = output.token_ids[:-1] if self._one_by_one else ()
        for token_id in first:
            yield _Piece((token_id,))
        yield _Piece(output.token_ids[len(first) :], ends=output.finish_reason is not None, stop_token_id=output.stop_token_id)


async def choice_deltas(
    engine: Replicas, tokenizer: Tokenizer, jobs: Sequence[Job], how: AnswerFormat | None = None
) -> AsyncGenerator[ChoiceDelta, None]:
    """Run jobs. Gives a first delta for each job once all are queued, then more, until all have a `finish_reason`.

    Closing the generator aborts what still runs. Raises `RequestError`, `QueueFull`, `EngineDied`, `GenerationFailed`.
    """
    choices = {job.request.request_id: _Choice(tokenizer, job, how) for job in jobs}
    async with _queued(engine, jobs) as outputs:
        for job in jobs:
            yield ChoiceDelta(job=job, is_first=True)
        async for output in outputs:
            if output.error is not None:  # what the request asked for may be to blame: a grammar that grew too large on the way
                raise GenerationFailed(output.error) if output.param is None else RequestError(output.error, param=output.param)
            delta = choices[output.request_id].feed(output)
            if delta.finish_reason is not None and output.finish_reason is None:
                await outputs.abort(output.request_id)
            yield delta


@contextlib.asynccontextmanager
async def _queued(engine: Replicas, jobs: Sequence[Job]) -> AsyncIterator[Outputs]:
    """Send the requests. Where the engine refuses a grammar, the error names the field that asked for it."""
    try:
        async with engine.generate([job.request for job in jobs]) as outputs:
            yield outputs
    except RequestError as error:
        if error.param == "grammar":
            error.param = jobs[0].grammar_field
        raise


class Tally:
    """Counts the tokens of all choices of one answer."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._num_prompt = sum({job.prompt_index: len(job.prompt.token_ids) for job in jobs}.values())
        self._num_completion = 0
        self._num_reasoning = self._num_drafted = self._num_accepted = 0
        self._num_cached: dict[int, int] = {}

    def add(self, delta: ChoiceDelta) -> None:
        """Count the tokens of one delta."""
        self._num_completion += delta.num_tokens
        self._num_reasoning += delta.num_reasoning_tokens
        self._num_drafted += delta.num_drafted
        self._num_accepted += delta.num_accepted
        if not delta.is_first:  # the least: other choices find what one of them has computed
            place, count = delta.job.prompt_index, delta.num_cached_tokens
            self._num_cached[place] = min(self._num_cached.get(place, count), count)

    def usage(self) -> Usage:
        """The counts so far, in OpenAI's shape."""
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=self._num_completion,
            total_tokens=self._num_prompt + self._num_completion,
            prompt_tokens_details=CachedTokens(sum(self._num_cached.values())),
            completion_tokens_details=CompletionTokens(
                self._num_reasoning, self._num_accepted, self._num_drafted - self._num_accepted
            ),
        )


class Collected:
    """A whole choice, put together from its deltas."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._texts: list[str] = []
        self.events: list[ParserEvent] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: PromptLogprobs | None = None
        self.finish_reason: str | None = None
        self.stopped_by: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Append a delta to the choice."""
        self._texts.append(delta.text)
        self.events += delta.events
        self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stopped_by = delta.stopped_by or self.stopped_by

    @property
    def text(self) -> str:
        """The text of all deltas so far."""
        return "".join(self._texts)

    @property
    def num_logprobs(self) -> int:
        """How many there are, with the prompt's and those of likeliest tokens."""
        return sum(1 + len(found.top) for found in (*self.logprobs, *(self.prompt_logprobs or ())) if found is not None)


async def collect(deltas: AsyncGenerator[ChoiceDelta, None], jobs: Sequence[Job]) -> tuple[list[Collected], Usage]:
    """Wait until all jobs have ended. Returns their choices in the order of the jobs, and the tokens of all."""
    choices, tally = [Collected(job) for job in jobs], Tally(jobs)
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            choices[delta.job.index].add(delta)
            tally.add(delta)
    return choices, tally.usage()


class EventLayout(Protocol):
    """How an API writes a streamed answer. All methods return the bytes of events. tally: counts what was sent."""

    @property
    def tally(self) -> Tally: ...

    def begin(self) -> Iterable[bytes]:
        """The events at the start, when all requests are queued."""

    def feed(self, delta: ChoiceDelta) -> Iterable[bytes]:
        """The events that tell one delta."""

    def fail(self, fault: Fault) -> Iterable[bytes]:
        """The events at the end of an answer that failed after it began."""

    def end(self) -> Iterable[bytes]:
        """The events at the end of an answer that did not fail."""


async def stream_events(deltas: AsyncGenerator[ChoiceDelta, None], layout: EventLayout) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer.

    The first is empty and comes when all is queued: what is refused until then is raised and has its own status. What fails later
    is an event itself.
    """
    started = False
    try:
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                if not started:
                    started = True
                    yield b""
                    for event in layout.begin():
                        yield event
                layout.tally.add(delta)
                for event in await _told(delta, layout):
                    yield event
    except Exception as error:
        if not started:
            raise
        if not isinstance(error, EnginError):
            _log.error("a stream failed", exc_info=error)
            error = GenerationFailed(f"{type(error).__name__}, a bug of the server; the log has the traceback")
        last = layout.fail(Fault.of(error))
    else:
        last = layout.end()
    for event in last:
        yield event


async def _told(delta: ChoiceDelta, layout: EventLayout) -> Iterable[bytes]:
    """The events that tell one delta; those of a long prompt are made on a thread, as other streams would wait for them."""
    events = layout.feed(delta)
    return await asyncio.to_thread(list, events) if len(delta.prompt_logprobs or ()) > _INLINE_TOKENS else events


@dataclass(frozen=True, kw_only=True)
class ChunkLayout(Generic[ChoiceT]):
    """Writes an answer as OpenAI's chunks. part: what a delta adds to its choice, None for nothing. chunk: the event of parts."""

    part: Callable[[ChoiceDelta], ChoiceT | None]
    chunk: Callable[[list[ChoiceT], Usage | None], bytes]
    tally: Tally
    options: StreamOptions

    def begin(self) -> Iterable[bytes]:
        return ()

    def feed(self, delta: ChoiceDelta) -> Iterable[bytes]:
        """A chunk, if the delta adds something to its choice."""
        choice = self.part(delta)
        if choice is not None:
            yield self.chunk([choice], self.tally.usage() if self.options.continuous_usage_stats else None)

    def fail(self, fault: Fault) -> Iterable[bytes]:
        """The error in place of a chunk, and the end of the stream."""
        return json_event(fault.body()), DONE

    def end(self) -> Iterable[bytes]:
        """The chunk with the usage, if it is asked for, and the end of the stream."""
        if self.options.include_usage:
            yield self.chunk([], self.tally.usage())
        yield DONE
