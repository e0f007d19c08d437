"""Answers in a vocabulary as Llama 2's, whose words begin with a blank, and which writes none before the first word of a text."""

from __future__ import annotations

import json

import pytest
import tokenizers
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["the fox", "the  fox 日本 naïve", "<s>the fox</s>the", "fox", [1, 299, 4], [299, 264, 2]])
def test_offsets_of_echoed_tokens_are_where_their_characters_begin(with_server, folder, prompt, stream):
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    async def scenario(live):
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2, "add_special_tokens": False, "ignore_eos": True}
        if stream:
            choices = [event["choices"][0] for event in await live.events("/v1/completions", **body)]
        else:
            choices = (await live.post("/v1/completions", **body)).json()["choices"]
        text = "".join(choice["text"] for choice in choices)
        offsets = [offset for choice in choices if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]
        if isinstance(prompt, str):
            expected = [begin for begin, _ in library.encode(prompt, add_special_tokens=False).offsets]
            ids = library.encode(prompt, add_special_tokens=False).ids
        else:
            expected = [len(library.decode(prompt[:count], skip_special_tokens=False)) for count in range(len(prompt))]
            ids = prompt
        told = prompt if isinstance(prompt, str) else library.decode(prompt, skip_special_tokens=False)
        own = library.decode([*ids[-1:], ids[0]]).removeprefix(library.decode(ids[-1:]))
        assert text.startswith(told + own)
        assert offsets == [*expected, len(told), len(told + own)]

    with_server(scenario)
