"""Answers in a vocabulary as Llama 2's, whose words begin with a blank, and which writes none before the first word of a text."""

from __future__ import annotations

import json

import pytest
from tokenizers_made import byte_fallback, save

TEMPLATE = "{% for m in messages %}{{ m.content }}, {% endfor %}{% if add_generation_prompt %}the{% endif %}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = save(byte_fallback(), tmp_path_factory.mktemp("sentencepiece"), chat_template=TEMPLATE)
    (path / "config.json").write_text(json.dumps({"architectures": ["Fake"]}))
    return path


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_that_is_continued_keeps_its_blank_and_an_answer_begins_without(with_server, stream):
    asked = [{"role": "user", "content": "the dog"}]
    begun = [*asked, {"role": "assistant", "content": "the fox"}]

    async def scenario(live):
        async def said(messages, **body):
            path, body = "/v1/chat/completions", {"messages": messages, **body}
            if not stream:
                return (await live.post(path, **body)).json()["choices"][0]["message"]["content"]
            choices = [choice for event in await live.events(path, **body) for choice in event["choices"]]
            return "".join(choice["delta"].get("content") or "" for choice in choices)

        assert await said(asked) == "the dog, the"
        assert await said(begun, continue_final_message=True) == " the dog, the fox"

    with_server(scenario)
