"""Log-probabilities as the endpoints write them, of tokens that are parts of characters."""

from __future__ import annotations

import json
import threading

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from enginery.contracts.request import TokenLogprob
from enginery.serve.api import choices, served_model, service
from enginery.serve.api.logprobs import LegacyLayout, chat_logprobs
from enginery.text.tokenizer import Tokenizer as Ours


@pytest.fixture
def bytes_only():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens([AddedToken("<end>", special=True)])
    return Ours(backend, named={})


def test_offsets_count_characters_that_span_tokens_and_calls(bytes_only):
    text = "a😀é!"
    ids = bytes_only.encode(text, add_special_tokens=False)
    layout = LegacyLayout(bytes_only, skips=True, begins=True)
    offsets = [place for each in ids for place in layout.lay_out([each], [None]).text_offset]
    assert offsets == [0, 1, 1, 1, 1, 2, 2, 3]


def test_bytes_of_log_probabilities_make_up_the_text(bytes_only):
    text = "a😀é!<end>"
    found = [TokenLogprob(token_id=each, logprob=-1.0, top=()) for each in bytes_only.encode(text, add_special_tokens=False)]
    assert b"".join(bytes(each.bytes) for each in chat_logprobs(bytes_only, found).content) == text.encode()


def test_a_token_is_spelt_once_for_a_whole_answer(bytes_only, monkeypatch):
    asked = []
    monkeypatch.setattr(bytes_only, "token_text", lambda token_id: asked.append(token_id) or str(token_id))
    found = chat_logprobs(bytes_only, [TokenLogprob(token_id=5, logprob=-1.0, top=((5, -1.0), (6, -2.0)))] * 100)
    assert [top.token for each in found.content for top in each.top_logprobs] == ["5", "6"] * 100
    assert asked == [5, 6]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", CHAT | {"prompt_logprobs": 2}),
        ("/v1/completions", {"prompt": "hi", "logprobs": 2}),
        ("/v1/completions", {"prompt": ["hi", "you"], "n": 3, "prompt_logprobs": 2, "echo": True}),
        ("/v1/embeddings", {"input": ["hi", "you"]}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_much_is_laid_out_apart_from_the_event_loop_and_is_the_same(with_server, monkeypatch, path, body):
    written, threads = service.json_answer, []

    def json_answer(content):
        threads.append(threading.current_thread())
        return written(content)

    async def scenario(live):
        monkeypatch.setattr(service, "json_answer", json_answer)
        answers = []
        for limit in (4096, 3):
            monkeypatch.setattr(served_model, "_INLINE_CHARS", limit)
            answers.append(json.loads((await live.post(path, **body)).content))
            answers[-1].pop("id", None)
        assert [thread is threading.main_thread() for thread in threads] == [True, False]
        assert "error" not in answers[0]
        assert answers[0] | {"created": 0} == answers[1] | {"created": 0}

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_a_prompt_of_tokens_is_made_once_for_all_its_choices(with_server, monkeypatch, stream):
    async def scenario(live):
        tokenizer, texts = live.service.model().text.tokenizer, []
        ids, whole = tokenizer.encode("a prompt", add_special_tokens=False), tokenizer.decode

        def decode(tokens, **how):
            texts.append(tokens)
            return whole(tokens, **how)

        monkeypatch.setattr(tokenizer, "decode", decode)
        response = await live.complete(ids, echo=True, logprobs=1, n=4, max_tokens=1, stream=stream)
        assert response.text.count("a prompt") == 4
        assert texts.count(tuple(ids)) == 1

    with_server(scenario)


def test_a_long_prompt_with_its_log_probabilities_is_laid_out_apart_from_the_event_loop_in_a_stream_too(with_server, monkeypatch):
    """Else all other streams wait for it. The order of the parts stays."""
    lay_out, threads = LegacyLayout.lay_out, []

    def noting(layout, token_ids, logprobs, **how):
        threads.append((len(token_ids), threading.current_thread() is threading.main_thread()))
        return lay_out(layout, token_ids, logprobs, **how)

    async def scenario(live):
        monkeypatch.setattr(LegacyLayout, "lay_out", noting)
        response = await live.complete(list(range(3, 9)), echo=True, logprobs=1, max_tokens=4, stream=True, ignore_eos=True)
        parts = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        offsets = [place for part in parts for place in part["choices"][0]["logprobs"]["text_offset"]]
        assert len(offsets) == 10
        assert offsets == sorted(offsets)

    monkeypatch.setattr(choices, "_INLINE_TOKENS", 5)
    with_server(scenario)
    assert [is_on_loop for count, is_on_loop in threads if count > 5] == [False]
    assert all(is_on_loop for count, is_on_loop in threads if count <= 5)
