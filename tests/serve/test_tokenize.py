"""/tokenize and /detokenize."""

from __future__ import annotations

import pytest

TEXT = "naïve 日本 👩‍👩‍👧‍👦 <|im_end|>"
MESSAGES = [{"role": "user", "content": TEXT}]


def test_a_text_becomes_tokens_and_text_again(shared_server):
    reply = shared_server("/tokenize", {"prompt": TEXT, "add_special_tokens": False}).json()
    assert reply["count"] == len(reply["tokens"])
    assert (reply["max_model_len"], reply["token_strs"]) == (512, None)
    assert shared_server("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": TEXT}


def test_special_tokens_are_added_as_for_completions(shared_server):
    plain, special = (
        shared_server("/tokenize", {"prompt": "hello", "add_special_tokens": asked}).json() for asked in (False, None)
    )
    assert special["tokens"][1:] == plain["tokens"]
    usage = shared_server("/v1/completions", {"prompt": "hello"}).json()["usage"]
    assert usage["prompt_tokens"] == special["count"]


def test_tokens_may_come_with_their_texts(shared_server):
    reply = shared_server("/tokenize", {"prompt": "hello", "return_token_strs": True}).json()
    assert reply["token_strs"] == ["<s>", "he", "llo"]


def test_messages_become_the_tokens_that_a_chat_counts(shared_server):
    reply = shared_server("/tokenize", {"messages": MESSAGES}).json()
    assert shared_server("/detokenize", {"tokens": reply["tokens"]}).json()["prompt"] == f"<user>{TEXT}<assistant>"
    assert shared_server("/v1/chat/completions", {"messages": MESSAGES}).json()["usage"]["prompt_tokens"] == reply["count"]
    shorter = shared_server("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert shorter["count"] < reply["count"]


def test_a_client_may_render_by_itself(with_server):
    async def scenario(live):
        info = (await live.http.get("/tokenizer_info")).json()
        assert info["chat_template"].startswith("{% for m in messages %}")

    with_server(scenario)


def test_no_text_is_no_token(shared_server):
    assert shared_server("/tokenize", {"prompt": "", "add_special_tokens": False}).json()["tokens"] == []
    assert shared_server("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x" * 1_000_000}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [999_999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_field_is_refused_by_name(shared_server, path, body, param):
    response = shared_server(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
