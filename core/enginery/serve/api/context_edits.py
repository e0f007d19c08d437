"""Anthropic's `context_management`: what is left out of a long conversation before the model reads it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, TypeVar

import msgspec

from enginery.errors import RequestError
from enginery.serve.api.conversation import prompt_of
from enginery.serve.api.served_model import ServedModel
from enginery.serve.schemas.anthropic import (
    AnthropicMessage,
    Block,
    ClearThinking,
    ClearToolUses,
    CountTokensRequest,
    ThinkingBlock,
    ThinkingTurns,
    ToolResultBlock,
    ToolUseBlock,
    blocks_of,
)

CLEARED: Final = "[left out to save context]"
RequestT = TypeVar("RequestT", bound=CountTokensRequest)


class Edited(msgspec.Struct, frozen=True, kw_only=True):
    """What an edit did. messages: the conversation after it. count: of the calls or turns that it changed."""

    messages: list[AnthropicMessage]
    count: int


async def edit_context(model: ServedModel, asked: RequestT) -> tuple[RequestT, list[dict[str, object]]]:
    """Make the edits that a request asks for. Returns the request after them, and what they did, in Anthropic's words."""
    applied: list[dict[str, object]] = []
    for edit in (asked.context_management and asked.context_management.edits) or ():
        num_before = await num_tokens(model, asked)
        edited = _cleared_calls(asked, edit, num_before) if isinstance(edit, ClearToolUses) else _cleared_thinking(asked, edit)
        if not edited.count:
            continue
        shorter = msgspec.structs.replace(asked, messages=edited.messages)
        num_cleared = num_before - await num_tokens(model, shorter)
        least = edit.clear_at_least if isinstance(edit, ClearToolUses) else None
        if least is not None and num_cleared < least.value:
            continue
        asked = shorter
        what = "cleared_tool_uses" if isinstance(edit, ClearToolUses) else "cleared_thinking_turns"
        applied.append({"type": edit.__struct_config__.tag, what: edited.count, "cleared_input_tokens": max(0, num_cleared)})
    return asked, applied


async def num_tokens(model: ServedModel, asked: CountTokensRequest) -> int:
    """How many the prompt has that the template writes."""
    return len((await prompt_of(model, asked.as_chat())).token_ids)


def _cleared_calls(asked: CountTokensRequest, edit: ClearToolUses, num_tokens: int) -> Edited:
    """Leave the oldest results of calls out. num_tokens: of the prompt before. A result that is left out already counts no more."""
    _check_counts(edit)
    names = {block.id: block.name for block in blocks_of(asked.blocks, ToolUseBlock)}
    results = blocks_of(asked.blocks, ToolResultBlock)
    size = num_tokens if edit.trigger.type == "input_tokens" else len(results)
    if size <= edit.trigger.value:
        return Edited(messages=asked.messages, count=0)
    old = results[: max(0, len(results) - edit.keep.value)]
    kept = edit.exclude_tools or ()
    cleared = {block.tool_use_id for block in old if block.content != CLEARED and names.get(block.tool_use_id) not in kept}
    return Edited(messages=_each(asked, lambda block: _without_content(block, cleared, edit.clear_tool_inputs)), count=len(cleared))


def _check_counts(edit: ClearToolUses) -> None:
    if edit.keep.type != "tool_uses" or (edit.clear_at_least is not None and edit.clear_at_least.type != "input_tokens"):
        raise RequestError("keep counts tool_uses, and clear_at_least counts input_tokens", param="context_management")


def _without_content(block: Block, cleared: Collection[str], inputs: bool | list[str] | None) -> Block:
    """The block; without its content if its call is cleared. inputs: whether arguments go too, or of which tools."""
    match block:
        case ToolResultBlock() if block.tool_use_id in cleared:
            return msgspec.structs.replace(block, content=CLEARED)
        case ToolUseBlock() if block.id in cleared and (inputs is True or block.name in (inputs or ())):
            return msgspec.structs.replace(block, input={})
    return block


def _cleared_thinking(asked: CountTokensRequest, edit: ClearThinking) -> Edited:
    turns = [place for place, message in enumerate(asked.messages) if blocks_of(message.blocks, ThinkingBlock)]
    old = set(turns[: max(0, len(turns) - edit.keep.value)] if isinstance(edit.keep, ThinkingTurns) else ())
    messages = [
        msgspec.structs.replace(message, content=[block for block in message.blocks if not isinstance(block, ThinkingBlock)])
        if place in old
        else message
        for place, message in enumerate(asked.messages)
    ]
    return Edited(messages=messages, count=len(old))


def _each(asked: CountTokensRequest, change: Callable[[Block], Block]) -> list[AnthropicMessage]:
    """The messages of a request with `change` applied to each block."""
    return [
        message
        if isinstance(message.content, str)
        else msgspec.structs.replace(message, content=[change(block) for block in message.content])
        for message in asked.messages
    ]
