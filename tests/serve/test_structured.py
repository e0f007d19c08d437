"""What an answer must be: from the fields of a body to the grammar that the engine gets."""

from __future__ import annotations

import json

import pytest
from fake_parsers import PARSERS

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


def test_an_answer_that_follows_a_grammar_does_not_begin_inside_of_reasoning(with_server):
    async def scenario(live):
        free = (await live.chat("x (think)")).json()["choices"][0]["message"]
        assert free["reasoning_content"].startswith("<user>x ")
        bound = (await live.chat("x (think)", response_format={"type": "json_object"})).json()["choices"][0]["message"]
        assert bound["content"].startswith("<user>x ")

    with_server(scenario, parsers=PARSERS)
