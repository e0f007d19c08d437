"""Schemas of real programs over HTTP, from a server whose model writes noise: an answer validates, or the schema is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources

import httpx
import jsonschema
import noise
import pytest
from running import serving


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Of a server of its own."""
    with serving(*noise.FLAGS) as url, httpx.Client(base_url=url, timeout=40) as made:
        yield made


def schema_of(name: str) -> dict:
    return json.loads((resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / f"{name}.json").read_text())


def asked(client: httpx.Client, schema: dict, seed: int) -> dict[str, object]:
    """A request to a model that writes noise, which is drawn to what closes strings, lists and objects."""
    closing = client.post("/tokenize", json={"prompt": '"]}', "add_special_tokens": False}).json()["tokens"]
    return {
        "messages": [{"role": "user", "content": "A configuration, please."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "file", "schema": schema, "strict": True}},
        "logit_bias": {str(token): 6 for token in closing},
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": 1500,
    }


@pytest.mark.parametrize("name", ["changie", "cloudbuild", "codecov", "github-discussion", "github-issue-config"])
def test_an_answer_to_a_real_schema_validates(client: httpx.Client, name: str) -> None:
    schema = schema_of(name)
    for seed in range(3):
        response = client.post("/v1/chat/completions", json=asked(client, schema, seed))
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "stop", choice
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_a_streamed_answer_to_a_real_schema_validates(client: httpx.Client) -> None:
    schema, text = schema_of("codecov"), ""
    with client.stream("POST", "/v1/chat/completions", json=asked(client, schema, 5) | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += "".join(choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("github-workflows", '"not"'),
        ("compose-spec", '"uniqueItems"'),
        ("taskfile", "oneOf"),
        ("renovate", "at most 262,144 are compiled"),
    ],
)
def test_a_real_schema_that_cannot_be_followed_is_refused_with_the_reason(client: httpx.Client, name: str, why: str) -> None:
    response = client.post("/v1/chat/completions", json=asked(client, schema_of(name), 0))
    assert response.status_code == 400, response.text[:500]
    error = response.json()["error"]
    assert error["param"] == "response_format"
    assert why in error["message"]
