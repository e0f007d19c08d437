"""What clients send that is legal and rare: fields that change nothing, parts of other layouts, whole URLs, no Host."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from enginery.serve.schemas.body_decoding import decode_request
from enginery.serve.schemas.chat import ChatRequest

USER = {"role": "user", "content": "x"}
CACHED = {"type": "ephemeral", "ttl": "5m"}


@pytest.mark.parametrize(
    "body",
    [
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"modalities": ["text"]},
        {"prediction": {"type": "content", "content": "y"}},
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "y"}]}},
        {"top_p": 0},
        {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": CACHED}]}]},
        {"messages": [{**USER, "cache_control": {"type": "ephemeral"}}]},
        {"messages": [USER, {"role": "assistant", "content": "y", "annotations": [], "refusal": None}, USER]},
        {"messages": [USER, {"role": "assistant", "content": "y", "provider_specific_fields": {"refusal": None}}, USER]},
    ],
    ids=str,
)
def test_fields_that_change_nothing_are_accepted(shared_server, body):
    plain = shared_server("/v1/chat/completions", {"messages": [USER], "max_tokens": 4})
    answer = shared_server("/v1/chat/completions", {"messages": [USER], "max_tokens": 4} | body)
    assert answer.status_code == 200, answer.text
    if "messages" not in body and "stream" not in body:
        assert answer.json()["choices"][0]["message"] == plain.json()["choices"][0]["message"]


def test_what_codex_says_of_itself_changes_nothing(shared_server):
    body = {"input": "x", "client_metadata": {"x-codex-installation-id": "1"}, "access_programs": {"cyber": "standard"}}
    answer = shared_server("/v1/responses", body | {"max_output_tokens": 4, "prompt_cache_retention": "in_memory"})
    assert answer.status_code == 200, answer.text


def test_a_tool_may_have_a_cache_control(shared_server):
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": CACHED}
    body = {"messages": [USER], "max_tokens": 4, "tools": [tool], "tool_choice": "none"}
    assert shared_server("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"modalities": ["text", "audio"]}, "modalities", "modalities[1] is 'audio', but must be 'text'"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "must be false"),
        ({"messages": [USER, {"role": "assistant", "content": "y", "annotations": [{}]}]}, "messages", "annotations"),
        (
            {"messages": [{"role": "assistant", "content": "y", "reasoning": "a", "reasoning_content": "b"}]},
            "messages",
            "reasoning and reasoning_content of a message differ",
        ),
        ({"messages": [{**USER, "reasoning": "a"}]}, "messages", "only an assistant's message has"),
        ({"top_p": -0.1}, "top_p", "must lie between"),
        ({"prediction": {"type": "content"}}, "prediction", "content"),
        ({"prediction": "y"}, "prediction", "object"),
        ({"verbosity": "loud"}, "verbosity", "must be 'high' or 'low' or 'medium'"),
        ({"messages": [{**USER, "reasoning_details": [{"text": "a"}]}]}, "messages", "only an assistant's message has"),
        ({"store": True}, "store", "store is true, but must be false; nothing is stored; leave it out, and send whole"),
    ],
    ids=str,
)
def test_what_would_change_something_is_refused(shared_server, body, param, told):
    answer = shared_server("/v1/chat/completions", {"messages": [USER], "max_tokens": 4} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")])
@pytest.mark.parametrize("content", ["y", None])
def test_reasoning_has_two_names(names, content):
    message = {"role": "assistant", "content": content, **dict.fromkeys(names, "hm")}
    asked = decode_request(json.dumps({"messages": [message]}).encode(), ChatRequest)
    assert asked.messages[0].for_template() == {"role": "assistant", "content": content, "reasoning_content": "hm"}


DETAILS = [
    {"type": "reasoning.summary", "summary": "h", "format": "x", "index": 0},
    {"type": "reasoning.text", "text": "m", "signature": None},
    {"type": "reasoning.encrypted", "data": "e30="},
]  # as OpenRouter's clients send them back


@pytest.mark.parametrize(
    ("fields", "told"), [({}, "hm"), ({"reasoning": "why"}, "why"), ({"reasoning_content": ""}, ""), ({"reasoning": None}, "hm")]
)
def test_details_of_reasoning_count_where_there_is_no_other(fields, told):
    message = {"role": "assistant", "content": "y", "reasoning_details": DETAILS} | fields
    asked = decode_request(json.dumps({"messages": [message]}).encode(), ChatRequest)
    assert asked.messages[0].for_template()["reasoning_content"] == told


def test_details_of_reasoning_that_nobody_can_read_are_left_out():
    message = {"role": "assistant", "content": "y", "reasoning_details": DETAILS[2:]}
    asked = decode_request(json.dumps({"messages": [message]}).encode(), ChatRequest)
    assert asked.messages[0].for_template() == {"role": "assistant", "content": "y"}


def test_embeddings_may_ask_for_the_model_s_own_number_of_dimensions(shared_server):
    own = shared_server("/v1/embeddings", {"input": "hello"}).json()["data"]
    size = len(own[0]["embedding"])
    assert shared_server("/v1/embeddings", {"input": "hello", "dimensions": size}).json()["data"] == own
    refused = shared_server("/v1/embeddings", {"input": "hello", "dimensions": size + 1}).json()["error"]
    assert (refused["param"], f"dimensions is {size + 1}, but" in refused["message"]) == ("dimensions", True)


@pytest.fixture
def wire(url) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=50) as raw:
        yield raw


def answer_to(wire: socket.socket, request: bytes) -> tuple[int, dict]:
    wire.sendall(request)
    answer = b"".join(iter(lambda: wire.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("origin", [b"http://example.com:80", b"HTTPS://x"])
def test_a_whole_url_is_taken_as_its_path(wire, origin):
    request = b"GET " + origin + b"/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert answer_to(wire, request) == (200, {"status": "ready"})


def test_a_request_without_a_host_is_told_so(wire):
    status, body = answer_to(wire, b"GET /health HTTP/1.1\r\n\r\n")
    assert (status, body["error"]["message"]) == (400, "this is not HTTP/1.1: Missing mandatory Host: header")
