"""POST /v1/completions: prompts in, texts out, in OpenAI's legacy layout."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginery.contracts.request import FinishReason, TokenLogprob
from enginery.serve.api.choices import (
    ChoiceDelta,
    ChunkLayout,
    Collected,
    PromptLogprobs,
    Tally,
    choice_deltas,
    collect,
    stream_events,
)
from enginery.serve.api.logprobs import LegacyLayout, by_token_id
from enginery.serve.api.served_model import Job, Prompt
from enginery.serve.api.service import Heading, Service, large_answer, read_request
from enginery.serve.http.event_stream import EventStream, event, unless_disconnected
from enginery.serve.schemas.completions import CompletionRequest, StreamOptions
from enginery.serve.schemas.replies import CompletionChoice, CompletionReply, JsonObject, LegacyLogprobs, Usage
from enginery.serve.schemas.structured_outputs import asked_grammar
from enginery.text.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16


async def complete(service: Service, http: Request) -> Response:
    """The handler of /v1/completions. Raises `EnginError`, and `ClientGone` when the client hung up."""
    model = service.model()
    asked = await read_request(http, CompletionRequest)
    name = model.check_name(asked.model)
    scores = _only_scores(asked)
    if scores:  # the engine makes a token all the same
        asked = msgspec.structs.replace(asked, max_tokens=1, max_completion_tokens=None)
    params = model.params(
        asked, default_max_tokens=_DEFAULT_MAX_TOKENS, logprobs=asked.logprobs, prompt_logprobs=_prompt_logprobs(asked)
    )
    heading = Heading.new("cmpl", name)
    head = dataclasses.asdict(heading)
    prompts = await model.prompts(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    jobs = model.jobs(asked, prompts, params, heading.id, grammar=asked_grammar(asked), prompt_only=scores)
    deltas = choice_deltas(service.engine, model.text.tokenizer, jobs)
    if scores:
        deltas = _without_output(deltas)
    text_of = functools.cache(lambda index: _text_of(prompts[index], model.text.tokenizer))
    layouts = [_ChoiceLayout(job, asked, model.text.tokenizer, text_of) for job in jobs]

    def chunk(choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        return event(CompletionReply(**head, choices=choices, usage=usage))

    def part(delta: ChoiceDelta) -> CompletionChoice | None:
        return layouts[delta.job.index].part(delta)

    if asked.stream:
        chunks = ChunkLayout(part=part, chunk=chunk, tally=Tally(jobs), options=asked.stream_options or StreamOptions())
        return await EventStream.start(http, stream_events(deltas, chunks))
    choices, usage = await unless_disconnected(http.receive, collect(deltas, jobs))

    def reply() -> CompletionReply:
        found_of = {choice.job.prompt_index: choice.prompt_logprobs for choice in choices}
        told = {at: by_token_id(model.text.tokenizer, found, asked=asked.prompt_logprobs) for at, found in found_of.items()}
        wholes = [layout.whole(choice, told) for layout, choice in zip(layouts, choices, strict=True)]
        return CompletionReply(**head, choices=wholes, usage=usage)

    return await large_answer(model, sum(choice.num_logprobs for choice in choices), reply)


async def _without_output(deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[ChoiceDelta, None]:
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            reason = delta.finish_reason and FinishReason.LENGTH
            yield dataclasses.replace(delta, text="", events=(), num_tokens=0, logprobs=(), finish_reason=reason)


def _only_scores(asked: CompletionRequest) -> bool:
    """Whether only the log-probabilities of the prompt are wanted: zero tokens, and `echo` or `prompt_logprobs`."""
    given = {asked.max_tokens, asked.max_completion_tokens} - {None}
    return given == {0} and (asked.echo is True or asked.prompt_logprobs is not None)


def _prompt_logprobs(asked: CompletionRequest) -> int | None:
    """What the engine must report: the larger of what `echo` with `logprobs` and `prompt_logprobs` ask for."""
    asked_for = [count for count in (asked.prompt_logprobs, asked.logprobs if asked.echo else None) if count is not None]
    return max(asked_for, default=None)


def _text_of(prompt: Prompt, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=False) if prompt.text is None else prompt.text


class _ChoiceLayout:
    """Writes one choice, in parts or as a whole."""

    def __init__(self, job: Job, asked: CompletionRequest, tokenizer: Tokenizer, prompt_text: Callable[[int], str]) -> None:
        self._job, self._asked, self._prompt_text, self._echoed = job, asked, prompt_text, False
        skips, begins = asked.skip_special_tokens is not False, job.prompt.token_ids[-1] in tokenizer.special_ids
        self._legacy = LegacyLayout(tokenizer, skips=skips, begins=begins)

    def part(self, delta: ChoiceDelta) -> CompletionChoice | None:
        """The part that one delta adds; None for nothing. `echo` puts the prompt in front, once its log-probabilities are there."""
        echo = ""
        if self._asked.echo and not self._echoed and (self._asked.logprobs is None or not delta.is_first):
            self._echoed, echo = True, self._prompt_text(self._job.prompt_index)
        logprobs = self._lay_out(delta.prompt_logprobs, delta.logprobs)
        if not (echo or delta.text or logprobs or delta.finish_reason):
            return None
        return CompletionChoice(index=self._job.index, text=echo + delta.text, logprobs=logprobs, finish_reason=delta.finish_reason)

    def whole(self, choice: Collected, told: Mapping[int, list[JsonObject | None] | msgspec.UnsetType]) -> CompletionChoice:
        """The choice of an answer that is not streamed. told: the `prompt_logprobs` of each prompt."""
        return CompletionChoice(
            index=self._job.index,
            text=(self._prompt_text(self._job.prompt_index) if self._asked.echo else "") + choice.text,
            logprobs=self._lay_out(choice.prompt_logprobs, choice.logprobs),
            finish_reason=choice.finish_reason,
            prompt_logprobs=told[self._job.prompt_index],
        )

    def _lay_out(self, prompt: PromptLogprobs | None, own: Sequence[TokenLogprob]) -> LegacyLogprobs | None:
        if self._asked.logprobs is None:
            return None
        token_ids = [found.token_id for found in own]
        if self._asked.echo and prompt is not None:
            ids = self._job.prompt.token_ids
            text = self._prompt_text(self._job.prompt_index)
            return self._legacy.lay_out([*ids, *token_ids], [*prompt, *own], num_echoed=len(ids), text=text)
        return self._legacy.lay_out(token_ids, own) if token_ids else None
