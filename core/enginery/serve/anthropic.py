"""POST /v1/messages and /v1/messages/count_tokens: conversations in Anthropic's layout, errors too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginery.errors import RequestError
from enginery.serve.anthropic_schemas import NAMES, CountTokensRequest, MessagesRequest
from enginery.serve.blocks import Block, BlockKind, Blocks, Change
from enginery.serve.conversation import Conversation, open_conversation, prompt_of
from enginery.serve.faults import Fault
from enginery.serve.generation import ChoiceDelta, Collected, collect, stream_events
from enginery.serve.replies import Usage
from enginery.serve.schemas import decode_json
from enginery.serve.service import Service, read_request
from enginery.serve.stream import EventStream, named_event, unless_disconnected

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
    """The handler. Raises `EnginError`, and `ClientGone` when nobody waits any more."""
    asked = await read_request(http, MessagesRequest)
    try:
        opened = await open_conversation(service, asked.as_chat(), "msg")
        if asked.stream:
            return await EventStream.start(http, stream_events(opened.deltas, _Layout(opened)))
        choices, usage = await unless_disconnected(http.receive, collect(opened.deltas, opened.jobs))
    except RequestError as error:
        error.param = NAMES.get(error.param or "", error.param)
        raise
    blocks = Blocks()
    for changes in (blocks.feed(choices[0].events), blocks.finish()):
        for _ in changes:
            pass
    reply = _message(opened, content=[_content(block) for block in blocks.done], **_end(choices[0]), usage=_usage(usage))
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def count_tokens(service: Service, http: Request) -> Response:
    """The handler. Raises `EnginError`."""
    asked = await read_request(http, CountTokensRequest)
    prompt = await prompt_of(service.model(), asked.as_chat())
    return Response(msgspec.json.encode({"input_tokens": len(prompt.token_ids)}), media_type="application/json")


def anthropic_error(fault: Fault) -> dict[str, Any]:
    """In Anthropic's shape, which has no field for the parameter: it stands in front."""
    message = fault.message if fault.param is None else f"{fault.param}: {fault.message}"
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(fault.status, "api_error"), "message": message}}


class _Layout:
    """Anthropic's named events."""

    def __init__(self, opened: Conversation) -> None:
        self._opened = opened
        self.tally = opened.tally
        self._blocks = Blocks()
        self._last = ChoiceDelta(job=opened.jobs[0])

    def begin(self) -> Iterator[bytes]:
        """The message without content."""
        usage = _usage(self.tally.usage())
        nothing = _message(self._opened, content=[], stop_reason=None, stop_sequence=None, usage=usage)
        yield named_event({"type": "message_start", "message": nothing})

    def feed(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """What a delta adds to the content."""
        self._last = delta
        for change in self._blocks.feed(delta.events):
            yield _told(*change)

    def fail(self, fault: Fault) -> Iterator[bytes]:
        """The error."""
        yield named_event(anthropic_error(fault))

    def end(self) -> Iterator[bytes]:
        """The end of the last block, and why the message ended."""
        for change in self._blocks.finish():
            yield _told(*change)
        yield named_event({"type": "message_delta", "delta": _end(self._last), "usage": _usage(self.tally.usage())})
        yield named_event({"type": "message_stop"})


def _told(change: Change, block: Block, text: str) -> bytes:
    match change:
        case Change.OPEN:
            return named_event({"type": "content_block_start", "index": block.index, "content_block": _content(block)})
        case Change.CLOSE:
            return named_event({"type": "content_block_stop", "index": block.index})
        case Change.ADD:
            delta = {
                BlockKind.TEXT: {"type": "text_delta", "text": text},
                BlockKind.REASONING: {"type": "thinking_delta", "thinking": text},
                BlockKind.CALL: {"type": "input_json_delta", "partial_json": text},
            }[block.kind]
            return named_event({"type": "content_block_delta", "index": block.index, "delta": delta})


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Empty while the arguments are not complete, as at the start of a stream and where an answer was cut."""
    try:
        found = decode_json(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _message(opened: Conversation, **content: Any) -> dict[str, Any]:
    heading = opened.heading
    return {"id": heading.id, "type": "message", "role": "assistant", "model": heading.model, **content}


def _end(of: Collected | ChoiceDelta) -> dict[str, Any]:
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
