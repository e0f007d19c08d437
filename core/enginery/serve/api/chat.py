"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginery.contracts.parsers import ArgumentsText, ContentText, ParserEvent, ReasoningText, ToolCallBegun
from enginery.contracts.request import TokenLogprob
from enginery.serve.api.choices import ChoiceDelta, ChunkLayout, Collected, collect, stream_events
from enginery.serve.api.conversation import open_conversation
from enginery.serve.api.logprobs import by_token_id, chat_logprobs
from enginery.serve.api.service import Service, large_answer, read_request
from enginery.serve.http.event_stream import EventStream, event, unless_disconnected
from enginery.serve.schemas import replies
from enginery.serve.schemas.chat import ChatRequest
from enginery.serve.schemas.completions import StreamOptions
from enginery.text.tokenizer import Tokenizer


async def chat(service: Service, http: Request) -> Response:
    """The handler of /v1/chat/completions. Raises `EnginError`, and `ClientGone` when the client hung up."""
    model = service.model()
    tokenizer = model.text.tokenizer
    asked = await read_request(http, ChatRequest)
    opened = await open_conversation(service, asked, "chatcmpl")
    heading = dataclasses.asdict(opened.heading)
    layout = _Layout(tokenizer, asked)

    def chunk(choices: list[replies.ChatChunkChoice], usage: replies.Usage | None) -> bytes:
        return event(replies.ChatChunk(**heading, choices=choices, usage=usage))

    if asked.stream:
        chunks = ChunkLayout(part=layout.part, chunk=chunk, tally=opened.tally, options=asked.stream_options or StreamOptions())
        return await EventStream.start(http, stream_events(opened.deltas, chunks))
    choices, usage = await unless_disconnected(http.receive, collect(opened.deltas, opened.jobs))

    def reply() -> replies.ChatReply:
        return replies.ChatReply(
            **heading,
            choices=[layout.whole(choice) for choice in choices],
            usage=usage,
            prompt_logprobs=by_token_id(tokenizer, choices[0].prompt_logprobs, asked=asked.prompt_logprobs),
        )

    return await large_answer(model, sum(choice.num_logprobs for choice in choices), reply)


def texts_of(events: Sequence[ParserEvent], kind: type[ContentText | ReasoningText]) -> str:
    """The texts of all events of one kind, put together."""
    return "".join(event.text for event in events if isinstance(event, kind))


def calls_of(events: Sequence[ParserEvent], *, in_chunk: bool) -> list[replies.CallPart]:
    """The calls that the events begin or go on with. Each has only what the events add to it."""
    calls: dict[int, replies.CallPart] = {}
    arguments: dict[int, list[str]] = {}
    for found in events:
        if isinstance(found, ToolCallBegun):
            function = replies.FunctionPart(name=found.name, arguments="")
            index = found.index if in_chunk else None
            calls[found.index] = replies.CallPart(index=index, id=found.id, type="function", function=function)
        elif isinstance(found, ArgumentsText):
            calls.setdefault(found.index, replies.CallPart(index=found.index, function=replies.FunctionPart()))
            arguments.setdefault(found.index, []).append(found.text)
    for index, texts in arguments.items():
        calls[index].function.arguments = "".join(texts)
    return list(calls.values())


class _Layout:
    """Writes an answer as one of OpenAI's messages, or as its chunks."""

    def __init__(self, tokenizer: Tokenizer, asked: ChatRequest) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs, self._shows_reasoning = bool(asked.logprobs), asked.shows_reasoning

    def whole(self, choice: Collected) -> replies.ChatChoice:
        """The finished message. Its content is null where there are calls only."""
        content, reasoning = texts_of(choice.events, ContentText), self._reasoning(choice.events)
        calls = calls_of(choice.events, in_chunk=False)
        message = replies.AssistantMessage(
            content=None if calls and not content else content,
            reasoning_content=reasoning or msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
        )
        logprobs = self._logprobs(choice.logprobs)
        return replies.ChatChoice(index=choice.job.index, message=message, logprobs=logprobs, finish_reason=choice.finish_reason)

    def part(self, delta: ChoiceDelta) -> replies.ChatChunkChoice | None:
        """The chunk of a delta; None if it adds nothing. The first chunk of a choice has the role."""
        words = replies.Delta(role="assistant", content="")
        if not delta.is_first:
            words = replies.Delta(
                content=texts_of(delta.events, ContentText) or None,
                reasoning_content=self._reasoning(delta.events) or None,
                tool_calls=calls_of(delta.events, in_chunk=True) or None,
            )
        if not (delta.finish_reason or (self._with_logprobs and delta.logprobs)) and words == replies.Delta():
            return None
        logprobs = None if delta.is_first else self._logprobs(delta.logprobs)
        return replies.ChatChunkChoice(index=delta.job.index, delta=words, logprobs=logprobs, finish_reason=delta.finish_reason)

    def _reasoning(self, events: Sequence[ParserEvent]) -> str:
        return texts_of(events, ReasoningText) if self._shows_reasoning else ""

    def _logprobs(self, found: Sequence[TokenLogprob]) -> replies.ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, found) if self._with_logprobs else None
