"""Log-probabilities as the endpoints write them, of tokens that are parts of characters."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from enginery.contracts.request import TokenLogprob
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
