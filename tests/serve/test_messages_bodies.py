"""What the bodies of /v1/messages are as those of chats."""

from __future__ import annotations

import json

import pytest

from enginery.serve.schemas.anthropic import MessagesRequest
from enginery.serve.schemas.body_decoding import decode_request

REDACTED = {"type": "redacted_thinking", "data": "e30="}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def user(text: str) -> dict:
    return {"max_tokens": 200, "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("blocks", "content", "reasoning"),
    [
        ([REDACTED, {"type": "text", "text": "t"}], "t", None),
        ([REDACTED | CACHED, {"type": "thinking", "thinking": "hm", "signature": "s"} | CACHED], None, "hm"),
        ([REDACTED], "", None),
    ],
    ids=["text", "thinking", "alone"],
)
def test_thinking_that_nobody_can_read_is_left_out(blocks, content, reasoning):
    body = user("q")
    body["messages"] += [{"role": "assistant", "content": blocks}, {"role": "user", "content": "and?"}]
    _, assistant, _ = decode_request(json.dumps(body).encode(), MessagesRequest).as_chat().messages
    assert (assistant.content, assistant.reasoning_content) == (content, reasoning)


def test_turns_with_calls_results_and_thinking_become_messages():
    body = b"""{"max_tokens": 5, "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "t"},
            {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "2"}]},
            {"type": "tool_result", "tool_use_id": "d", "content": "no", "is_error": true}, {"type": "text", "text": "and?"}]}
    ], "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": true}}"""
    chat = decode_request(body, MessagesRequest).as_chat()
    _, assistant, *results, last = chat.messages
    assert (assistant.content, assistant.reasoning_content) == ("t", "hm")
    assert assistant.tool_calls[0].for_template()["function"] == {"name": "add", "arguments": {"a": 1}}
    assert [(message.role, message.tool_call_id, message.content) for message in results] == [
        ("tool", "c", "2"),
        ("tool", "d", "Error: no"),
    ]
    assert (last.role, last.content) == ("user", "and?")
    assert (chat.tool_choice.function.name, chat.parallel_tool_calls) == ("add", False)


def test_a_deferred_tool_is_known_when_a_result_or_a_call_names_it():
    def call(name: str, *content: dict) -> list[dict]:
        used = {"type": "tool_use", "id": name, "name": name, "input": {}}
        result = {"type": "tool_result", "tool_use_id": name, "content": list(content)}
        return [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]

    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("find", "add", "ask")]
    for tool in tools[1:]:
        tool["defer_loading"] = True
    found = call("find", {"type": "text", "text": "two:"}, {"type": "tool_reference", "tool_name": "add"})
    known = []
    for messages in ([], found, call("ask"), [*found, *call("ask")]):
        body = user("q") | {"tools": tools}
        body["messages"] += messages
        chat = decode_request(json.dumps(body).encode(), MessagesRequest).as_chat()
        known.append([tool.function.name for tool in chat.tools])
    assert known == [["find"], ["find", "add"], ["find", "ask"], ["find", "add", "ask"]]
    assert chat.messages[2].content == "two:\nThe tool add can be called now."


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "max"),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "medium"),
        ({"thinking": {"type": "enabled"}, "output_config": {"effort": "xhigh"}}, "xhigh"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
    ],
    ids=str,
)
def test_thinking_and_effort_are_the_effort_of_reasoning(fields, effort):
    assert decode_request(json.dumps(user("x") | fields).encode(), MessagesRequest).as_chat().effort == effort


@pytest.mark.parametrize("asked", [True, False, None])
def test_guesses_are_asked_for_or_not(asked):
    assert decode_request(json.dumps(user("x") | {"speculation": asked}).encode(), MessagesRequest).as_chat().speculation is asked
