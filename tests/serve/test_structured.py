"""What an answer must be: from the fields of a body to the grammar that the engine gets."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from fake_engine import FAIL
from fake_parsers import PARSERS

from enginery.serve.http.caller import NoteCaller, caller
from enginery.serve.http.keys import KeyGuard, Keys
from enginery.serve.schemas.chat import ChatRequest
from enginery.serve.schemas.completions import CompletionRequest
from enginery.serve.schemas.responses import ResponsesRequest
from enginery.serve.schemas.structured_outputs import asked_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}

ASKED = [
    ({"response_format": {"type": "json_object"}}, "json_object:"),
    ({"response_format": NAMED}, f"json_schema:{TEXT}"),
    ({"guided_json": SCHEMA}, f"json_schema:{TEXT}"),
    ({"guided_json": TEXT}, f"json_schema:{TEXT}"),
    ({"guided_regex": "[ab]+"}, "regex:[ab]+"),
    ({"guided_choice": ["yes", "no"]}, 'choice:["yes","no"]'),
    ({"guided_grammar": 'start:"x"'}, 'grammar:start:"x"'),
    ({"structured_outputs": {"json": SCHEMA}}, f"json_schema:{TEXT}"),
    ({"structured_outputs": {"json_object": True}}, "json_object:"),
    ({"structured_outputs": {"regex": "x"}}, "regex:x"),
    ({"structured_outputs": {"choice": ["x"]}}, 'choice:["x"]'),
    ({"structured_outputs": {"grammar": "x"}}, "grammar:x"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_engine_gets_the_grammar(with_server, path):
    async def scenario(live):
        own = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        for body, _ in ASKED:
            assert (await live.post(path, **own, **body, n=2)).status_code == 200
        assert live.said("grammar") == [grammar for _, grammar in ASKED for _ in range(2)]

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "BAD"}, "guided_regex"),
        ({"structured_outputs": {"regex": "BAD"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"BAD": 1}}}}, "response_format"),
    ],
    ids=str,
)
def test_a_grammar_that_the_engine_refuses_is_a_400_that_names_the_field(shared_server, body, param, stream):
    response = shared_server("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": stream} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": NAMED["json_schema"]}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "x"}, "guided_regex"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "x" * 300_000}, "guided_json"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"surprise": 1}}, "structured_outputs"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_field_is_refused_by_name(shared_server, body, param):
    response = shared_server("/v1/completions", {"prompt": "x"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"type": "json_schema"}, "response_format of the type json_schema has no json_schema"),
        ({"type": "text", "json_schema": NAMED["json_schema"]}, "response_format of the type text takes no json_schema"),
    ],
    ids=["missing", "too many"],
)
def test_a_format_and_its_schema_that_do_not_go_together_are_told_which_is_wrong(shared_server, body, why):
    response = shared_server("/v1/completions", {"prompt": "x", "response_format": body})
    assert (response.status_code, response.json()["error"]["message"]) == (400, why)


def test_an_answer_that_follows_a_grammar_does_not_begin_inside_of_reasoning(with_server):
    async def scenario(live):
        free = (await live.chat("x (think)")).json()["choices"][0]["message"]
        assert free["reasoning_content"].startswith("<user>x ")
        bound = (await live.chat("x (think)", response_format={"type": "json_object"})).json()["choices"][0]["message"]
        assert bound["content"].startswith("<user>x ")

    with_server(scenario, parsers=PARSERS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "guided_regex": "BUSY"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "guided_regex": "BUSY"}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"BUSY": 1}}}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_grammar_that_nobody_has_time_for_is_a_503_and_may_be_sent_again(shared_server, path, body, stream):
    response = shared_server(path, body | {"stream": stream})
    assert response.status_code == 503, response.text
    assert response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("unavailable_error", "overloaded")


def test_the_engine_learns_who_asks_and_nobody_chooses_who_that_is(with_server):
    async def scenario(live):
        for headers in ({}, {"authorization": "Bearer a"}, {"x-api-key": "b", "x-forwarded-for": "1.2.3.4"}):
            assert (await live.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200
        assert set(live.said("client")) == {"127.0.0.1"}

    with_server(scenario)


async def who(host, keys, headers):
    """The caller as an application behind keys sees it."""
    seen = []

    async def app(scope, receive, send):
        seen.append(caller())

    guarded = NoteCaller(app)
    if keys:
        guarded = KeyGuard(guarded, Keys(keys))
    scope = {"type": "http", "path": "/v1/models", "headers": headers, "client": (host, 5)}
    await guarded(scope, None, None)
    assert caller() == ""
    return seen[0]


@pytest.mark.parametrize(
    ("host", "header", "expected"),
    [
        ("1.2.3.4", "Bearer one", "1.2.3.4 0"),
        ("1.2.3.4", "Bearer two", "1.2.3.4 1"),
        ("2001:db8:1:2:3::4", "Bearer one", "2001:db8:1:2::/64 0"),
        ("::ffff:1.2.3.4", "Bearer one", "::ffff:1.2.3.4 0"),
        ("fe80::1%eth0", "Bearer one", "fe80::/64 0"),
        ("a socket", "Bearer one", "a socket 0"),
    ],
)
def test_a_client_is_its_address_and_its_key(host, header, expected):
    headers = [(b"authorization", header.encode())]
    assert asyncio.run(who(host, ["one", "two"], headers)) == expected
    assert asyncio.run(who(host, [], headers)) == expected[:-2]


def test_a_grammar_that_grows_too_large_on_the_way_is_a_400_that_names_the_field(with_server):
    async def scenario(live):
        failed = await live.complete("hello", seed=FAIL, guided_regex="x")
        assert (failed.status_code, failed.json()["error"]["param"]) == (400, "guided_regex")
        assert (await live.complete("hello", seed=FAIL)).status_code == 500

    with_server(scenario)


@pytest.mark.parametrize(("strict", "lenient"), [(False, True), (True, False), (None, False)])
def test_a_schema_need_not_be_strict_if_it_says_so(strict, lenient):
    """In each layout that has such a field."""
    named = {"name": "n", "schema": SCHEMA} | ({} if strict is None else {"strict": strict})
    message = {"messages": [{"role": "user", "content": "x"}]}
    asked = [
        msgspec.convert({**message, "response_format": {"type": "json_schema", "json_schema": named}}, ChatRequest),
        msgspec.convert({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": named}}, CompletionRequest),
        msgspec.convert({"input": "x", "text": {"format": {"type": "json_schema", **named}}}, ResponsesRequest).as_chat(),
    ]
    for each in asked:
        found = asked_grammar(each)
        assert found is not None
        assert (found.grammar.source, found.grammar.lenient) == (TEXT, lenient)
