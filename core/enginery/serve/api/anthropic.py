"""POST /v1/messages and /v1/messages/count_tokens: conversations in Anthropic's layout, errors too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginery.serve.api.answer_blocks import Block, BlockKind, Blocks, Change
from enginery.serve.api.choices import ChoiceDelta, Collected, collect, stream_events
from enginery.serve.api.context_edits import edit_context, num_tokens
from enginery.serve.api.conversation import Conversation, naming_fields, open_conversation
from enginery.serve.api.service import Service, json_answer, read_request
from enginery.serve.http.event_stream import EventStream, named_event, unless_disconnected
from enginery.serve.http.faults import Fault
from enginery.serve.schemas.anthropic import NAMES, CountTokensRequest, MessagesRequest
from enginery.serve.schemas.replies import Usage

PATHS: Final = "/v1/messages"
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


async def create_message(service: Service, http: Request) -> Response:
    """The handler of /v1/messages. Raises `EnginError`, and `ClientGone` when the client hung up."""
    asked = await read_request(http, MessagesRequest)
    with naming_fields(NAMES):
        edited, applied = await edit_context(service.model(), asked)
        opened = await open_conversation(service, edited.as_chat(), "msg")
        layout = _Layout(asked, opened, applied)
        if asked.stream:
            return await EventStream.start(http, stream_events(opened.deltas, layout))
        choices, usage = await unless_disconnected(http.receive, collect(opened.deltas, opened.jobs))
    return json_answer(layout.whole(choices[0], usage))


async def count_tokens(service: Service, http: Request) -> Response:
    """The handler of /v1/messages/count_tokens. Raises `EnginError`."""
    asked, model = await read_request(http, CountTokensRequest), service.model()
    with naming_fields(NAMES):
        edited, _ = await edit_context(model, asked)
        reply: dict[str, object] = {"input_tokens": await num_tokens(model, edited)}
        if asked.context_management is not None:
            reply["context_management"] = {"original_input_tokens": await num_tokens(model, asked)}
    return json_answer(reply)


def anthropic_error(fault: Fault) -> dict[str, object]:
    """An error in Anthropic's shape. That has no field for the parameter, so its name stands in front of the message."""
    message = fault.message if fault.param is None else f"{fault.param}: {fault.message}"
    error: dict[str, object] = {"type": _ERROR_TYPES.get(fault.status, "api_error"), "message": message}
    if fault.param == "thread":
        error["details"] = {"error_code": "thread_unsupported_request"}  # upon which clients send the whole conversation
    return {"type": "error", "error": error}


class _Layout:
    """Writes an answer as one message, or as Anthropic's named events. applied: the edits that were made to its conversation."""

    def __init__(self, asked: MessagesRequest, opened: Conversation, applied: list[dict[str, object]]) -> None:
        self._opened = opened
        self._shows_thinking = asked.thinking is None or asked.thinking.is_told
        self._management = {} if asked.context_management is None else {"context_management": {"applied_edits": applied}}
        self.tally = opened.tally
        self._blocks = Blocks()
        self._last = ChoiceDelta(job=opened.jobs[0])

    def whole(self, choice: Collected, usage: Usage) -> dict[str, object]:
        """The body of an answer that is not streamed."""
        for changes in (self._blocks.feed(choice.events), self._blocks.finish()):
            list(changes)
        content = [self._content(block) for block in self._blocks.done]
        return _message(self._opened, content=content, **_end(choice), usage=_usage(usage), **self._management)

    def begin(self) -> Iterator[bytes]:
        """The event at the start: the message, still without content."""
        usage = _usage(self.tally.usage())
        nothing = _message(self._opened, content=[], stop_reason=None, stop_sequence=None, usage=usage)
        yield named_event({"type": "message_start", "message": nothing})

    def feed(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The events that tell what a delta adds to the content."""
        self._last = delta
        for change in self._blocks.feed(delta.events):
            yield from self._told(*change)

    def fail(self, fault: Fault) -> Iterator[bytes]:
        """The event of an error, which is the last one."""
        yield named_event(anthropic_error(fault))

    def end(self) -> Iterator[bytes]:
        """The events at the end: of the last block, and of the message with the reason that it ended."""
        for change in self._blocks.finish():
            yield from self._told(*change)
        usage = _usage(self.tally.usage())
        yield named_event({"type": "message_delta", "delta": _end(self._last), "usage": usage, **self._management})
        yield named_event({"type": "message_stop"})

    def _told(self, change: Change, block: Block, text: str) -> Iterator[bytes]:
        match change:
            case Change.OPEN:
                yield named_event({"type": "content_block_start", "index": block.index, "content_block": self._content(block)})
            case Change.CLOSE:
                yield named_event({"type": "content_block_stop", "index": block.index})
            case Change.ADD if block.kind is not BlockKind.REASONING or self._shows_thinking:
                delta = {
                    BlockKind.TEXT: {"type": "text_delta", "text": text},
                    BlockKind.REASONING: {"type": "thinking_delta", "thinking": text},
                    BlockKind.CALL: {"type": "input_json_delta", "partial_json": text},
                }[block.kind]
                yield named_event({"type": "content_block_delta", "index": block.index, "delta": delta})

    def _content(self, block: Block) -> dict[str, object]:
        match block.kind:
            case BlockKind.TEXT:
                return {"type": "text", "text": block.text}
            case BlockKind.REASONING:
                return {"type": "thinking", "thinking": block.text if self._shows_thinking else "", "signature": ""}
            case BlockKind.CALL:
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, object] | msgspec.Raw:
    """The arguments as they are written. Empty while they are not complete: as a stream begins, and where an answer was cut."""
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return {}
    return msgspec.Raw(arguments.encode()) if is_object else {}


def _message(opened: Conversation, **content: object) -> dict[str, object]:
    heading = opened.heading
    return {"id": heading.id, "type": "message", "role": "assistant", "model": heading.model, **content}


def _end(of: Collected | ChoiceDelta) -> dict[str, object]:
    reason = "stop_sequence" if of.stopped_by is not None else _STOP_REASONS[of.finish_reason or "stop"]
    return {"stop_reason": reason, "stop_sequence": of.stopped_by}


def _usage(usage: Usage) -> dict[str, int]:
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
