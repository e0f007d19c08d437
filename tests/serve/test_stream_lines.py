"""A stream's events, read line by line as httpx splits text: at every line end that Unicode knows. The last one where it fails."""

from __future__ import annotations

import json

import pytest

from enginery.text.detokenize import CompletionText

TEXT = "one\x85two\u2028three\u2029four\x0bfive\x0csix\x1cseven 🙂"
ASKED = {
    "/v1/completions": {"prompt": TEXT, "echo": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 100},
    "/v1/responses": {"input": TEXT},
}


def texts(event: object) -> str:
    """All that stands in it."""
    if isinstance(event, dict):
        return "".join(map(texts, event.values()))
    if isinstance(event, list):
        return "".join(map(texts, event))
    return event if isinstance(event, str) else ""


@pytest.mark.parametrize("path", ASKED)
def test_each_event_is_one_line_whatever_its_text(with_server, path):
    async def scenario(live):
        async with live.http.stream("POST", path, json=ASKED[path] | {"stream": True}) as response:
            lines = [line async for line in response.aiter_lines()]
        assert response.status_code == 200, lines
        data = [line.removeprefix("data: ") for line in lines if line and not line.startswith("event: ")]
        whole = "".join(texts(json.loads(line)) for line in data if line != "[DONE]")
        assert all(char in whole for char in "\x85\u2028\u2029🙂")

    with_server(scenario)


@pytest.mark.parametrize("path", ASKED)
def test_a_bug_in_the_middle_of_a_stream_is_its_last_event_and_in_the_log(with_server, monkeypatch, caplog, path):
    def fail(*given, **how):
        raise ZeroDivisionError("a bug")

    async def scenario(live):
        monkeypatch.setattr(CompletionText, "feed", fail)
        response = await live.post(path, **ASKED[path], stream=True)
        last = [line for line in response.text.splitlines() if line.startswith("data: {")][-1]
        assert "ZeroDivisionError, a bug of the server; the log has the traceback" in last
        assert "Traceback" in caplog.text

    with_server(scenario)
