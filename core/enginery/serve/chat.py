"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginery.contracts.request import TokenLogprob
from enginery.errors import RequestError
from enginery.serve.generation import ChoiceDelta, Tally, choice_deltas, collect, stream_events
from enginery.serve.logprobs import by_token_id, chat_logprobs
from enginery.serve.replies import AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatLogprobs, ChatReply, Delta, Usage
from enginery.serve.schemas import ChatRequest, StreamOptions
from enginery.serve.service import Heading, Service, read_request
from enginery.serve.stream import EventStream, event, unless_disconnected
from enginery.text.tokenizer import Tokenizer


async def chat(service: Service, http: Request) -> Response:
    """The handler. Raises `EnginError`, and `ClientGone` when nobody waits any more."""
    model = service.model()
    asked = await read_request(http, ChatRequest)
    model.check_name(asked.model)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    prompt = await model.chat_prompt(asked)
    params = model.params(
        asked,
        default_max_tokens=max(1, model.facts.max_model_len - len(prompt.token_ids)),
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        prompt_logprobs=asked.prompt_logprobs,
    )
    heading = Heading.new("chatcmpl", model)
    jobs = model.jobs(asked, [prompt], params, heading.id)
    deltas = choice_deltas(service.engine, model.text.tokenizer, jobs)
    layout = _Layout(model.text.tokenizer, with_logprobs=bool(asked.logprobs))

    def chunk(choices: list[ChatChunkChoice], usage: Usage | None) -> bytes:
        return event(ChatChunk(**dataclasses.asdict(heading), choices=choices, usage=usage))

    if asked.stream:
        options = asked.stream_options or StreamOptions()
        return await EventStream.start(http, stream_events(deltas, layout.part, chunk=chunk, tally=Tally(jobs), options=options))
    choices, usage = await unless_disconnected(http.receive, collect(deltas, jobs))
    reported: object = msgspec.UNSET
    if asked.prompt_logprobs is not None:
        reported = by_token_id(model.text.tokenizer, choices[0].prompt_logprobs or ())
    reply = ChatReply(
        **dataclasses.asdict(heading),
        choices=[
            ChatChoice(
                index=choice.job.index,
                message=AssistantMessage(content=choice.text),
                logprobs=layout.logprobs(choice.logprobs),
                finish_reason=choice.finish_reason,
            )
            for choice in choices
        ],
        usage=usage,
        prompt_logprobs=reported,  # type: ignore[arg-type]
    )
    return Response(msgspec.json.encode(reply), media_type="application/json")


class _Layout:
    """What is common to the message and its chunks."""

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def logprobs(self, found: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, found) if self._with_logprobs else None

    def part(self, delta: ChoiceDelta) -> ChatChunkChoice | None:
        """None if there is nothing to tell. The first chunk of a choice has the role."""
        if not (delta.is_first or delta.text or delta.finish_reason or (self._with_logprobs and delta.logprobs)):
            return None
        words = Delta(role="assistant", content="") if delta.is_first else Delta(content=delta.text or None)
        logprobs = None if delta.is_first else self.logprobs(delta.logprobs)
        return ChatChunkChoice(index=delta.job.index, delta=words, logprobs=logprobs, finish_reason=delta.finish_reason)
