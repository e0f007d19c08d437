"""Nothing a client sends makes a 500, takes the engine down, or is quietly ignored."""

from __future__ import annotations

import json
import re

import pytest

HUGE = 10**30


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [999999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [[1], "x"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [HUGE]}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": "a b c " * 400}, "prompt"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"prompt": [3] * 512}, "prompt"),
        ({"max_tokens": 1_000_000}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": HUGE}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 1000}}, "logit_bias"),
        ({"stop_token_ids": [999999]}, "stop_token_ids"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"n": 5_000_000}, "n"),
        ({"n": 0}, "n"),
        ({"n": 128, "prompt": ["x"] * 100}, "n"),
        ({"best_of": 10**9}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"logprobs": 10**9}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["s"] * 100_000}, "stop"),
        ({"stop": ["s"] * 17}, "stop"),
        ({"stop": "s" * 1025}, "stop"),
        ({"stop": ["s", "s" * 1025]}, "stop"),
        ({"stop_token_ids": [3] * 1025}, "stop_token_ids"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e30}, "temperature"),
        ({"temperature": HUGE}, "temperature"),
        ({"top_p": -0.5}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"seed": HUGE}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": "x" * 2000}, "cache_salt"),
        ({"store": True}, "store"),
        ({"suffix": "x"}, "suffix"),
        ({"audio": {}}, "audio"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"surprise": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"temprature": 1}, "temprature"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_field_is_refused_by_name(shared_server, body, param):
    response = shared_server("/v1/completions", ({"prompt": "x"} if "prompt" not in body and body else {}) | body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"prompt": "x", "max_tokens": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "x", "guided_json": {"maximum": 99999999999999999999}}',
        json.dumps({"prompt": "x", "x" * 100_000: 1}).encode(),
    ],
    ids=lambda value: repr(value[:30]),
)
def test_a_body_that_is_no_request_is_refused(shared_server, body):
    response = shared_server("/v1/completions", body)
    assert response.status_code == 400, response.text
    assert len(response.content) < 2000


def test_bounds_are_told_in_numbers(shared_server):
    for field, value in (("stop", ["s"] * 17), ("stop_token_ids", [3] * 1025), ("logit_bias", {str(n): 1 for n in range(1025)})):
        error = shared_server("/v1/completions", {"prompt": "x", field: value}).json()["error"]
        assert ("16" if field == "stop" else "1024") in error["message"]
    most = {"stop": ["s" * 1024] * 16, "stop_token_ids": [3] * 1024, "logit_bias": {str(number): 1 for number in range(600)}}
    assert shared_server("/v1/completions", {"prompt": "x", **most}).status_code == 200


def test_a_prompt_too_long_is_told_both_numbers(shared_server):
    error = shared_server("/v1/completions", {"prompt": [3] * 600}).json()["error"]
    assert "600" in error["message"]
    assert "512" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [3] * 512, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [3] * 600}),
        ("/v1/completions", {"prompt": "é" * 513}),
        ("/v1/completions", {"prompt": "x" * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 900}]}),
        ("/v1/responses", {"input": "x" * 900}),
        ("/v1/embeddings", {"input": "x" * 900}),
    ],
    ids=["full", "tokens", "text", "long text", "chat", "responses", "embeddings"],
)
def test_agents_see_that_a_prompt_is_too_long(shared_server, path, body):
    response = shared_server(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, "context_length_exceeded", "invalid_request_error")
    assert f"{'input' if path == '/v1/embeddings' else 'prompt'} is too long" in error["message"]


def test_too_large_an_answer_does_not_fit_but_its_prompt_does(shared_server):
    error = shared_server("/v1/completions", {"prompt": [3] * 511, "max_tokens": 2}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "too long" not in error["message"]


def test_anthropics_agents_see_that_a_prompt_is_too_long(shared_server):
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x" * 900}]}
    error = shared_server("/v1/messages", body).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "prompt is too long" in error["message"]


def test_half_characters_in_json_are_refused_or_harmless(shared_server):
    for escaped in (b'"\\udc00"', b'"\\ud83d\\ude00"'):
        assert shared_server("/v1/completions", b'{"prompt": ' + escaped + b"}").status_code in (200, 400)


def test_another_model_is_not_found(shared_server):
    response = shared_server("/v1/completions", {"prompt": "x", "model": "gpt-9"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert "fake" in response.json()["error"]["message"]


def test_a_large_body_is_refused_while_it_comes(shared_server):
    response = shared_server("/v1/completions", b'{"prompt": "' + b"x" * (9 << 20) + b'"}')
    assert response.status_code == 413
    assert "larger than 8,421,376 bytes; send less, or start the server with a larger --max-body-bytes" in response.text


def test_other_paths_and_methods_have_the_same_shape(shared_server):
    assert shared_server("/v1/nothing", {}).json()["error"]["type"] == "invalid_request_error"
    assert shared_server("/health", {}).status_code == 405


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("chat/completions", {"store": True}, "store is true, but must be false"),
        (
            "chat/completions",
            {"messages": [{"role": "robot"}]},
            "messages[0].role is 'robot', but must be 'assistant' or",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type is 'image_url', but must be 'text'",
        ),
        (
            "messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "content[0].type is 'image', but must be 'text' or",
        ),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search', but must be 'function'"),
        ("embeddings", {"input": "x", "dimensions": 8}, "dimensions is 8, but embeddings of this model have 2"),
    ],
)
def test_what_is_none_of_a_few_choices_is_told_them(shared_server, path, body, told):
    whole = {"messages": [{"role": "user", "content": "hi"}]} | body if path == "chat/completions" else body
    response = shared_server(f"/v1/{path}", whole)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


def test_a_slash_too_many_is_no_way_round_a_proxy(shared_server):
    response = shared_server("/v1/completions/", {"prompt": "hi"})
    assert response.status_code == 404  # a redirect would name this server's own scheme and take the key there
    assert "did you mean /v1/completions" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["messages", "responses", "chat/completions"])
def test_a_path_that_the_client_wrote_twice_is_told_first(shared_server, path):
    """The longer paths below it, as /v1/messages/count_tokens, were offered in its place."""
    message = shared_server(f"/v1/v1/{path}", {}).json()["error"]["message"]
    assert re.fullmatch(rf"there is no path /v1/v1/{path} here; did you mean /v1/{path}( or \S+)*\?", message)


@pytest.mark.parametrize(
    ("text", "half"),
    [(b"a\\ud83d", r"\ud83d"), (b"\\uDE00b", r"\uDE00"), (b"\\ud83d\\ud83d\\ude00", r"\ud83d"), (b"\\ud83d\\n", r"\ud83d")],
)
@pytest.mark.parametrize("end", [b'"}', b'", "max_tokens": 3}'])
def test_half_a_character_is_named(shared_server, text, half, end):
    """Where it stood near the end of the body, that was said to be truncated."""
    response = shared_server("/v1/completions", b'{"prompt": "' + text + end)
    told = f"the body is not JSON: {half} is half of a character, as where a text was cut; leave it out"
    assert (response.status_code, response.json()["error"]["message"]) == (400, told)


@pytest.mark.parametrize("body", [b'{"model": "fake", "prompt": "caf\xe9"}', b'{"model": "fake", "prompt": "\\n12\xe9"}'])
def test_the_place_of_what_is_no_utf_8_is_that_in_the_body(shared_server, body):
    """It was the place in the text, which says nothing about a body of many."""
    message = shared_server("/v1/completions", body).json()["error"]["message"]
    assert f"the body is not JSON: 'utf-8' codec can't decode byte 0xe9 in position {body.index(0xE9)}: " in message


def test_whole_characters_and_what_only_looks_like_half_of_one_are_fine(shared_server):
    assert shared_server("/v1/completions", b'{"prompt": "\\ud83d\\ude00 \\\\ud83d", "max_tokens": 1}').status_code == 200
    assert "truncated" in shared_server("/v1/completions", b'{"prompt": "\\ud83d\\ude00').json()["error"]["message"]


def test_after_all_that_a_good_request_is_answered(shared_server):
    assert shared_server("/v1/completions", {"prompt": "hello"}).json()["choices"][0]["text"] == "hello"
