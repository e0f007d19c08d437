"""/v1/chat/completions over the fake engine."""

from __future__ import annotations

import pytest


def test_a_message_is_answered(with_server):
    async def scenario(live):
        reply = (await live.chat("hi 😀")).json()
        assert reply["object"] == "chat.completion"
        (choice,) = reply["choices"]
        assert choice["message"] == {"role": "assistant", "content": "<user>hi 😀<assistant>", "refusal": None}
        assert choice["finish_reason"] == "stop"

    with_server(scenario)


def test_text_parts_are_put_together(with_server):
    async def scenario(live):
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts, "name": None}]
        reply = (await live.post("/v1/chat/completions", messages=messages)).json()
        assert reply["choices"][0]["message"]["content"] == "<system>s<user>one\ntwo<assistant>"

    with_server(scenario)


def test_an_answer_may_fill_the_context(with_server):
    async def scenario(live):
        reply = (await live.chat("hi", ignore_eos=True)).json()
        assert reply["usage"]["total_tokens"] == 512
        assert reply["choices"][0]["finish_reason"] == "length"
        short = (await live.chat("hi", ignore_eos=True, max_completion_tokens=3)).json()
        assert short["usage"]["completion_tokens"] == 3

    with_server(scenario)


def test_a_stream_says_the_same_as_a_whole_answer(with_server):
    async def scenario(live):
        body = {"messages": [{"role": "user", "content": "日本 👩‍👩‍👧‍👦"}], "n": 2, "logprobs": True, "top_logprobs": 1}
        whole = (await live.post("/v1/chat/completions", **body)).json()
        events = await live.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
        assert events[-1]["usage"] == whole["usage"]
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        for index in range(2):
            own = [choice for event in events for choice in event["choices"] if choice["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(choice["delta"].get("content", "") for choice in own)
            assert text == whole["choices"][index]["message"]["content"]
            assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
            content = [token for choice in own if choice["logprobs"] for token in choice["logprobs"]["content"]]
            assert content == whole["choices"][index]["logprobs"]["content"]

    with_server(scenario)


def test_logprobs_have_the_bytes_of_each_token(with_server):
    async def scenario(live):
        reply = (await live.chat("日本", logprobs=True, top_logprobs=2)).json()
        content = reply["choices"][0]["logprobs"]["content"]
        raw = bytes(byte for token in content[1:-1] for byte in token["bytes"])
        assert b"user>\xe6\x97\xa5\xe6\x9c\xac" in raw
        assert all(len(token["top_logprobs"]) == 2 for token in content)
        assert content[1]["token"] == "u"

    with_server(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": ["x"]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 9000}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
    ],
    ids=str,
)
def test_a_wrong_conversation_is_refused_by_field(shared_server, body, param):
    response = shared_server("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_plain_response_format_is_fine(shared_server):
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "text"}, "tools": None, "store": False}
    assert shared_server("/v1/chat/completions", body).status_code == 200
