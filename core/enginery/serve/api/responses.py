"""POST /v1/responses: OpenAI's later layout of conversations, whole or as a stream of typed events. Nothing is stored."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from enginery.contracts.request import TokenLogprob
from enginery.serve.api.answer_blocks import Block, BlockKind, Blocks, Change
from enginery.serve.api.choices import ChoiceDelta, stream_events
from enginery.serve.api.conversation import Conversation, naming_fields, open_conversation, prompt_of
from enginery.serve.api.logprobs import logprobs_of
from enginery.serve.api.service import Service, json_answer, read_request
from enginery.serve.http.event_stream import EventStream, named_event, unless_disconnected
from enginery.serve.http.faults import Fault
from enginery.serve.schemas.replies import ChatLogprob, Usage
from enginery.serve.schemas.responses import NAMES, InputTokensRequest, ResponsesRequest
from enginery.text.tokenizer import Tokenizer

_PREFIXES: Final = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}
_Logprobs = list[ChatLogprob]
_DELTAS: Final = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.CALL: "response.function_call_arguments",
}


async def respond(service: Service, http: Request) -> Response:
    """The handler of /v1/responses. Raises `EnginError`, and `ClientGone` when the client hung up."""
    asked = await read_request(http, ResponsesRequest)
    with naming_fields(NAMES):
        opened = await open_conversation(service, asked.as_chat(), "resp")
        layout = _Layout(asked, opened, service.model().text.tokenizer)
        if asked.stream:
            return await EventStream.start(http, stream_events(opened.deltas, layout))
        return json_answer(await unless_disconnected(http.receive, layout.whole(opened.deltas)))


async def count_input_tokens(service: Service, http: Request) -> Response:
    """The handler of /v1/responses/input_tokens. Raises `EnginError`."""
    asked = await read_request(http, InputTokensRequest)
    with naming_fields(NAMES):
        prompt = await prompt_of(service.model(), asked.as_chat())
    return json_answer({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


class _Layout:
    """Writes an answer as one response, or as its events."""

    def __init__(self, asked: ResponsesRequest, opened: Conversation, tokenizer: Tokenizer) -> None:
        self._asked, self._heading, self.tally = asked, opened.heading, opened.tally
        self._params, self._tokenizer = opened.jobs[0].request.params, tokenizer
        self._blocks, self._logprobs = Blocks(), list[TokenLogprob]()
        self._ids: dict[int, str] = {}
        self._status, self._why_cut, self._num_events = "completed", dict[str, str](), 0

    def event(self, kind: str, **content: object) -> bytes:
        """One event with its type and its number."""
        self._num_events += 1
        return named_event({"type": kind, "sequence_number": self._num_events - 1, **content})

    def begin(self) -> Iterator[bytes]:
        """The two events at the start, both with the response that is still empty."""
        for kind in ("response.created", "response.in_progress"):
            yield self.event(kind, response=self.response("in_progress"))

    def feed(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The events that tell what a delta adds to the items."""
        for taken in self._taken(delta):
            yield from self._told(*taken)

    def fail(self, fault: Fault) -> Iterator[bytes]:
        """The last event of a response that failed, as far as it came."""
        yield self.event("response.failed", response=self.response("failed", error=fault))

    def end(self) -> Iterator[bytes]:
        """The events at the end: of the last item, and of the whole response."""
        for change in self._blocks.finish(self._status):
            yield from self._told(*change, [])
        yield self.event(f"response.{self._status}", response=self.response(self._status, usage=self.tally.usage()))

    async def whole(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> dict[str, object]:
        """The response that is not streamed, when it has ended."""
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                self.tally.add(delta)
                list(self._taken(delta))
        list(self._blocks.finish(self._status))
        return self.response(self._status, usage=self.tally.usage())

    def _taken(self, delta: ChoiceDelta) -> Iterator[tuple[Change, Block, str, _Logprobs]]:
        """What it adds to the items, and the log-probabilities of each text."""
        if delta.finish_reason == "length":
            self._status, self._why_cut = "incomplete", {"reason": "max_output_tokens"}
        elif delta.ended_in_call:
            self._status = "incomplete"  # OpenAI's reasons have no name for a stop string, nor for a model's own end
        came = 0
        for event, count in zip(delta.events, delta.came_with, strict=True):
            self._logprobs += delta.logprobs[came:count]
            came = count
            for change, block, text in self._blocks.feed([event]):
                if change is Change.OPEN:
                    self._ids[block.index] = f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}"
                added = logprobs_of(text, self._logprobs, self._tokenizer) if change is Change.ADD and self._logprobs else []
                block.logprobs += added
                yield change, block, text, added
        self._logprobs += delta.logprobs[came:]

    def response(self, status: str, *, usage: Usage | None = None, error: Fault | None = None) -> dict[str, object]:
        """The response object, with the items that are done."""
        asked = self._asked
        return {
            "id": self._heading.id,
            "object": "response",
            "created_at": self._heading.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "model": self._heading.model,
            "status": status,
            "output": list(map(self._item, self._blocks.done)),
            "usage": None if usage is None else _usage(usage),
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": self._why_cut if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            "top_logprobs": asked.top_logprobs or 0,
            "reasoning": asked.reasoning,
            "text": asked.text or {"format": {"type": "text"}},
            "tools": asked.tools or [],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "metadata": asked.metadata or {},
            "store": False,
            "background": False,
            "truncation": "disabled",
            "previous_response_id": None,
        }

    def _told(self, change: Change, block: Block, text: str, added: _Logprobs) -> Iterator[bytes]:
        kind = _DELTAS[block.kind]
        at: dict[str, object] = {"item_id": self._ids[block.index], "output_index": block.index}
        if block.kind is not BlockKind.CALL:
            at["content_index"] = 0
        logprobs = added if change is Change.ADD else block.logprobs
        words: dict[str, object] = {"logprobs": logprobs} if block.kind is BlockKind.TEXT else {}
        match change:
            case Change.OPEN:
                yield self.event("response.output_item.added", output_index=block.index, item=self._item(block))
                if block.kind is not BlockKind.CALL:
                    yield self.event("response.content_part.added", **at, part=_part(block))
            case Change.ADD:
                yield self.event(f"{kind}.delta", **at, delta=text, **words)
            case Change.CLOSE:
                whole = {"arguments": block.text, "name": block.name} if block.kind is BlockKind.CALL else {"text": block.text}
                yield self.event(f"{kind}.done", **at, **whole, **words)
                if block.kind is not BlockKind.CALL:
                    yield self.event("response.content_part.done", **at, part=_part(block))
                yield self.event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _item(self, block: Block) -> dict[str, object]:
        item: dict[str, object] = {"id": self._ids[block.index], "status": block.status}
        parts = [] if block.status == "in_progress" else [_part(block)]
        match block.kind:
            case BlockKind.TEXT:
                return item | {"type": "message", "role": "assistant", "content": parts}
            case BlockKind.REASONING:
                return item | {"type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
            case BlockKind.CALL:
                return item | {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}


def _part(block: Block) -> dict[str, object]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": usage.completion_tokens_details,
        "total_tokens": usage.total_tokens,
    }
