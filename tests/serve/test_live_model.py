"""The whole server over a real model with random weights, and the plugins of grammars and parsers that are installed."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

PROMPTS = ["emoji 🙂🚀👩‍👩‍👧‍👦", "你好世界 日本語", "naïve café", "plain words"]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """Of a server with the embedded model."""
    command = [
        sys.executable,
        "-m",
        "enginery",
        "serve",
        "--port",
        "0",
        "--num-pages",
        "256",
        "--num-threads",
        "1",
        "--tool-parser",
        "hermes",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as server:
        url = next(found[1] for line in server.stdout if (found := re.search(r"ready: \S+ at (http://\S+),", line)))
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
            yield made
        server.terminate()
        server.stdout.read()


def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def texts(client: openai.OpenAI, name: str, **asked: object) -> tuple[tuple[str, str], tuple[str, str]]:
    """(text, how it ended) of a whole answer and of a stream."""
    whole = client.completions.create(model=name, **asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(model=name, stream=True, **asked)]
    streamed = "".join(chunk.text for chunk in chunks)
    return (whole.text, whole.finish_reason), (streamed, chunks[-1].finish_reason)


def test_a_stream_of_random_bytes_is_the_whole_text_with_and_without_stop_strings(client):
    name, chance = model(client), random.Random(0)

    def asked(seed: int) -> dict:
        body = {"ignore_eos": True, "top_k": -1, "top_p": 1.0}
        return {"prompt": PROMPTS[seed % 4], "seed": seed, "temperature": 5.0, "max_tokens": 40, "extra_body": body}

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: texts(client, name, **asked(seed)), range(24)))
    assert all(whole == streamed for whole, streamed in found)
    assert sum(not whole[0].isascii() for whole, _ in found) > 12
    stops = []
    for (text, _), _ in found:
        place = chance.randrange(len(text) - 4)
        stops.append([text[place : place + chance.randint(1, 4)], "never there"])
    with ThreadPoolExecutor(4) as pool:
        stopped = list(pool.map(lambda seed: texts(client, name, **asked(seed), stop=stops[seed]), range(24)))
    for ((text, _), _), (stop, _), (whole, streamed) in zip(found, stops, stopped, strict=True):
        assert whole == streamed == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_schema(client, stream):
    schema = ADD["function"]["parameters"]
    asked = {
        "model": model(client),
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 3,
    }
    if stream:
        chunks = client.chat.completions.create(**asked, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = client.chat.completions.create(**asked).choices[0].message.content
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_a_call_with_valid_arguments(client, choice):
    asked = {
        "model": model(client),
        "messages": [{"role": "user", "content": "x"}],
        "tools": [ADD],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 3,
    }
    reply = client.chat.completions.create(**asked).choices[0]
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.message.tool_calls
    assert call.function.name == "add"
    jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.tool_calls[0].function.arguments == call.function.arguments


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_regex", "(unclosed"),
        ("guided_grammar", "this is no grammar"),
        ("guided_json", {"type": "nonsense"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#/nowhere"}}}),
    ],
)
def test_a_faulty_grammar_is_refused_and_never_ignored(client, field, value):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model(client), prompt="x", extra_body={field: value})
    assert refused.value.param == field
