"""From jobs to the text of their choices: what the completions and the chat endpoint have in common."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from enginery.contracts.request import FinishReason, TokenLogprob
from enginery.errors import EnginError
from enginery.serve.engine_client import EngineClient
from enginery.serve.faults import Fault, GenerationFailed
from enginery.serve.replies import CachedTokens, Usage
from enginery.serve.schemas import StreamOptions
from enginery.serve.served_model import Job
from enginery.serve.stream import DONE
from enginery.text.detokenize import CompletionText
from enginery.text.tokenizer import Tokenizer

ChoiceT = TypeVar("ChoiceT")
PromptLogprobs = Sequence[TokenLogprob | None]


@dataclass(frozen=True, kw_only=True)
class ChoiceDelta:
    """What a step added to one choice. is_first: the request is queued, and nothing is there yet."""

    job: Job
    is_first: bool = False
    text: str = ""
    num_tokens: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0


async def choice_deltas(engine: EngineClient, tokenizer: Tokenizer, jobs: Sequence[Job]) -> AsyncGenerator[ChoiceDelta, None]:
    """A first delta for each job once all are queued, then what comes, until all have a `finish_reason`.

    Closing it aborts what runs. Raises `RequestError`, `QueueFull`, `EngineDied`, `GenerationFailed`.
    """
    states = {job.request.request_id: (job, CompletionText(tokenizer, job.request.params)) for job in jobs}
    async with engine.generate([job.request for job in jobs]) as outputs:
        for job in jobs:
            yield ChoiceDelta(job=job, is_first=True)
        async for output in outputs:
            if output.error is not None:
                raise GenerationFailed(output.error)
            job, text = states[output.request_id]
            finished = output.finish_reason is not None
            added = text.feed(output.token_ids, finished=finished, stop_token_id=output.stop_token_id)
            if added.stopped_by is not None:
                await outputs.abort(output.request_id)
            yield ChoiceDelta(
                job=job,
                text=added.text,
                num_tokens=added.num_tokens,
                logprobs=(output.logprobs or ())[: added.num_tokens],
                prompt_logprobs=output.prompt_logprobs,
                finish_reason=FinishReason.STOP if added.stopped_by is not None else output.finish_reason,
                num_cached_tokens=output.num_cached_tokens,
            )


class Tally:
    """Counts tokens over all choices."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._num_prompt = sum({job.prompt_index: len(job.prompt.token_ids) for job in jobs}.values())
        self._num_completion = 0
        self._num_cached: dict[int, int] = {}

    def add(self, delta: ChoiceDelta) -> None:
        """Count what a delta brought."""
        self._num_completion += delta.num_tokens
        place = delta.job.prompt_index
        self._num_cached[place] = max(self._num_cached.get(place, 0), delta.num_cached_tokens)

    def usage(self) -> Usage:
        """So far."""
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=self._num_completion,
            total_tokens=self._num_prompt + self._num_completion,
            prompt_tokens_details=CachedTokens(sum(self._num_cached.values())),
        )


class Collected:
    """A whole choice, put together from its deltas."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: PromptLogprobs | None = None
        self.finish_reason: FinishReason | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Append a delta."""
        self._texts.append(delta.text)
        self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._texts)


async def collect(deltas: AsyncGenerator[ChoiceDelta, None], jobs: Sequence[Job]) -> tuple[list[Collected], Usage]:
    """Wait for everything."""
    choices, tally = [Collected(job) for job in jobs], Tally(jobs)
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            choices[delta.job.index].add(delta)
            tally.add(delta)
    return choices, tally.usage()


async def stream_events(
    deltas: AsyncGenerator[ChoiceDelta, None],
    part: Callable[[ChoiceDelta], ChoiceT | None],
    *,
    chunk: Callable[[list[ChoiceT], Usage | None], bytes],
    tally: Tally,
    options: StreamOptions,
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer. part: what a delta adds to its choice, None for nothing.

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
                tally.add(delta)
                choice = part(delta)
                if choice is not None:
                    yield chunk([choice], tally.usage() if options.continuous_usage_stats else None)
    except EnginError as error:
        if not started:
            raise
        yield b"data: " + Fault.of(error).body() + b"\n\n"
    else:
        if options.include_usage:
            yield chunk([], tally.usage())
    yield DONE
