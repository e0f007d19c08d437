"""What is answered is what /openapi.json says, to the last key."""

from __future__ import annotations

import copy
import json
import os
import signal

import httpx
import jsonschema
import pytest
from running import PATIENCE_S, started

from enginery.serve.app import ENDPOINTS
from enginery.serve.schemas.openapi import ANSWERS

CALL = '(think)why(done)[call add {"a": 1}] after'
ADD = {"name": "add", "parameters": {"type": "object"}}
USER = [{"role": "user", "content": CALL}]
TOOL = {"name": "add", "input_schema": {"type": "object"}}
EDITS = {"edits": [{"type": "clear_thinking_20251015"}]}
BODIES = [
    ("/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": ["x", "y"], "n": 2}),
    (
        "/v1/chat/completions",
        {"messages": USER, "tools": [{"type": "function", "function": ADD}], "logprobs": True, "top_logprobs": 1},
    ),
    ("/v1/chat/completions", {"messages": USER, "prompt_logprobs": 0, "max_tokens": 3}),
    ("/v1/responses", {"input": CALL, "tools": [ADD | {"type": "function"}], "tool_choice": "auto", "instructions": "x"}),
    ("/v1/responses", {"input": CALL, "max_output_tokens": 2, "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}}),
    ("/v1/responses/input_tokens", {"input": CALL}),
    ("/v1/messages", {"messages": USER, "max_tokens": 200, "tools": [TOOL], "context_management": EDITS}),
    ("/v1/messages", {"messages": USER, "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": USER, "context_management": EDITS}),
    ("/v1/embeddings", {"input": ["x", "y"]}),
    ("/v1/embeddings", {"input": "x", "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/tokenize", {"messages": USER}),
    ("/detokenize", {"tokens": [3]}),
]
KEYS = {"authorization": "Bearer k"}


@pytest.fixture(scope="module")
def guarded(folder):
    """URL of a server with keys, and its document."""
    with started(folder, api_keys=["k"], admin_keys=["a"]) as (_, address):
        yield address, httpx.get(f"{address}/openapi.json", headers=KEYS, timeout=PATIENCE_S).json()


def check(document: dict, path: str, response: httpx.Response) -> None:
    """Against the schema of its status, with nothing besides."""
    (operation,) = document["paths"][path].values()
    said = operation["responses"][str(response.status_code)]["content"]
    kind = response.headers["content-type"].split(";")[0]
    assert kind in said, (path, response.status_code, kind, response.text)
    if kind == "application/json":
        components = copy.deepcopy(document["components"])
        for name, schema in components["schemas"].items():
            if name != "TokenizerInfo":  # which has the special tokens by their names
                schema.setdefault("additionalProperties", "properties" not in schema)
        jsonschema.validate(response.json(), {**said[kind]["schema"], "components": components})


@pytest.mark.parametrize(("path", "body"), BODIES, ids=str)
def test_answers_errors_and_streams_are_as_documented(guarded, path, body):
    address, document = guarded

    def post(body: object, **headers: str) -> httpx.Response:
        return httpx.post(address + path, content=json.dumps(body), headers=KEYS | headers, timeout=PATIENCE_S)

    for given, status in ((body, 200), ({**body, "nothing": 1}, 400), ({**body, "model": "other"}, 404), ([], 400)):
        response = post(given)
        assert response.status_code == status, response.text
        check(document, path, response)
    wrong = post(body, authorization="Bearer other")
    assert wrong.status_code == 401
    check(document, path, wrong)
    if "stream" in ENDPOINTS[path][1].__struct_fields__ and "prompt_logprobs" not in body:
        check(document, path, post({**body, "stream": True}))


def test_every_path_is_documented_and_answers_so(guarded):
    address, document = guarded
    assert set(document["paths"]) == set(ANSWERS)
    assert set(ENDPOINTS) == {path for path, _ in BODIES}
    for path, operations in document["paths"].items():
        (method,) = operations
        assert "422" not in operations[method]["responses"]
        if path not in ENDPOINTS:
            for key in ("k", "a", "other"):
                for query in ("", "?num_steps=0&request_id=x"):
                    headers = {"authorization": f"Bearer {key}"}
                    url = f"{address}{path.replace('{model}', 'fake')}{query}"
                    check(document, path, httpx.request(method, url, headers=headers, timeout=PATIENCE_S))
    check(document, "/v1/models/{model}", httpx.get(f"{address}/v1/models/other", headers=KEYS, timeout=PATIENCE_S))


def test_probes_of_several_engines_and_of_those_that_start_are_documented(with_server, monkeypatch):
    async def scenario(live):
        document = (await live.http.get("/openapi.json")).json()

        async def look() -> list[dict]:
            replies = [await live.http.get(path) for path in ("/health", "/health/ready", "/health/progress", "/health/live")]
            for reply in replies:
                check(document, reply.request.url.path, reply)
            return [reply.json() for reply in replies[1:3]]

        assert [reply["replicas"] for reply in await look()] == [["ready", "ready"]] * 2
        monkeypatch.setenv("FAKE_LOAD_S", "600")
        for client in live.service.engine.clients:
            os.kill(client.child.pid, signal.SIGKILL)
        await live.until(lambda: live.service.state == "restarting")
        assert {"status", "phase", "done_bytes", "total_bytes"} == {*(await look())[1]}

    with_server(scenario, dp=2, restarts=1)
