"""Conversations for templates that leave calls out: they stand within the content, as the model writes them."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any, Final

from enginery.api import writes_tools

Told = list[dict[str, Any]]
_TAKES_TOOLS_WITHIN: Final = re.compile(r"message(?:\.tools|\[['\"]tools['\"]\])")  # a message
_json: Final = partial(json.dumps, ensure_ascii=False)


def tell_phi(source: str, tools: Told, messages: Told) -> tuple[Told, Told] | None:
    """Phi 4-mini's template takes tools within the system's message."""
    if writes_tools(source) or not _TAKES_TOOLS_WITHIN.search(source):
        return None
    told = [
        _with_calls(message, '{{"name": "{}", "arguments": {}}}', ", ", "<|tool_call|>[{}]<|/tool_call|>") for message in messages
    ]
    begins = bool(told) and told[0]["role"] in ("system", "developer")
    offered = _json([tool["function"] for tool in tools])
    first = {"role": "system", "content": "", **(told[0] if begins else {}), "tools": offered}
    return tools, [first, *told[begins:]] if tools else told


def tell_minimax_text(source: str, tools: Told, messages: Told) -> tuple[Told, Told] | None:
    """MiniMax-Text-01's template takes results as messages of the role function, each with the function's name."""
    if "function_response" not in source or "tool_calls" in source:
        return None
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls}
    told = [_with_calls(message, "<function_call>```typescript\nfunctions.{}({})\n```") for message in messages]
    return tools, [_as_function(message, names) for message in told]


def _as_function(message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    if message["role"] != "tool":
        return message
    return message | {"role": "function", "name": message.get("name") or names.get(message.get("tool_call_id", ""), "")}


def _with_calls(message: dict[str, Any], form: str, between: str = "", around: str = "{}") -> dict[str, Any]:
    """form: of one call, from its name and its arguments, which may be no JSON."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    given = [(each or "{}") if isinstance(each := function["arguments"], str | None) else _json(each) for function in functions]
    calls = between.join(form.format(each["name"], text) for each, text in zip(functions, given, strict=True))
    return message | ({"content": f"{message['content'] or ''}{around.format(calls)}"} if calls else {})


TOLD_BY: Final = {"phi4-mini": tell_phi, "minimax-text": tell_minimax_text}
