"""Ids and text as transformers has them, and errors that say what to do."""

from __future__ import annotations

import json
import threading

import pytest
from tokenizers_made import CORPUS, KINDS, byte_fallback, byte_level, metaspace, save
from transformers import AutoTokenizer

from enginery.errors import CheckpointError, RequestError
from enginery.text.text_side import GenerationDefaults
from enginery.text.tokenizer import Tokenizer

TEXTS = [*CORPUS[:4], "", " leading", "a<|im_end|>b <think>c</s>", "<s>x", "\n\n", "ab\x00c"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_transformers(kind, tmp_path):
    folder = save(KINDS[kind](), tmp_path)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": False},
        {"add_eos_token": True},
        {
            "bos_token": {
                "content": "<new>",
                "lstrip": False,
                "rstrip": True,
                "normalized": False,
                "single_word": False,
                "__type": "AddedToken",
            }
        },
        {"extra_special_tokens": ["<one>", "<two>"]},
        {"added_tokens_decoder": {"402": {"content": "<late>", "special": True, "normalized": False}}},
        {"split_special_tokens": True},
        {"clean_up_tokenization_spaces": True},
    ],
    ids=str,
)
def test_tokenizer_config_means_what_it_means_to_transformers(config, tmp_path):
    for kind in KINDS:
        folder = save(KINDS[kind](), tmp_path / kind, **config)
        ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
        for text in [*TEXTS, "x <new> y", "<one><two> <late> z", "don't you 've it . Yes !"]:
            ids = theirs.encode(text)
            assert ours.encode(text, add_special_tokens=True) == ids, (kind, text)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), (kind, text)


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_level"])
@pytest.mark.parametrize(
    "config", [{}, {"legacy": True}, {"legacy": False, "add_bos_token": True}, {"add_prefix_space": False}], ids=str
)
@pytest.mark.parametrize("model_type", ["llama", "mistral", None])
def test_a_llama_checkpoint_is_read_as_transformers_does(kind, config, model_type, tmp_path):
    folder = save(KINDS[kind](), tmp_path, tokenizer_class="LlamaTokenizer", **config)
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "</s> x  y</s>z", "  two"]:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=True) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text


def test_special_tokens_map_is_read_for_old_checkpoints(tmp_path):
    folder = save(byte_level(), tmp_path)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}, "pad_token": "<pad>"}))
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.named["eos_token"] == theirs.eos_token == "<|im_end|>"
    assert ours.encode("a<pad>b", add_special_tokens=True) == theirs.encode("a<pad>b")


def test_truncation_of_the_file_is_not_applied(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    folder = save(tokenizer, tmp_path)
    assert len(Tokenizer.from_folder(folder).encode("the lazy dog " * 9, add_special_tokens=True)) not in (4, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_the_tokens_make_up_the_text(kind, tmp_path):
    tokenizer = Tokenizer.from_folder(save(KINDS[kind](), tmp_path))
    text = "Hello world, 日本語のテキスト and it's"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == text


def test_a_part_of_a_character_is_shown_as_bytes(tmp_path):
    tokenizer = Tokenizer.from_folder(save(byte_fallback(), tmp_path))
    assert tokenizer.token_text(3 + 0xE2) == "bytes:\\xe2"
    assert tokenizer.token_text(3 + 0x41) == "A"


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tiktoken.model").touch()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing.*README of the plugin .* tiktoken\.model"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": "1.0", "model": {"type": "Nonsense"}}'])
def test_a_damaged_file_is_named(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_a_damaged_configuration_is_named(tmp_path):
    save(metaspace(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json holds list"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("config", [{"added_tokens_decoder": [1]}, {"extra_special_tokens": "<x>"}], ids=str)
def test_tokens_in_another_layout_are_named_and_not_left_out(config, tmp_path):
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is .*download the file again"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_becomes_tokens_or_tokens_a_text(way, tmp_path):
    tokenizer = Tokenizer.from_folder(save(byte_level(), tmp_path))
    text = "what it is: 日本語\n" * 30_000
    ids = tokenizer.encode(text, add_special_tokens=False) * 8 if way == "decode" else []
    num_turns, done = 0, threading.Event()

    def count_turns():
        nonlocal num_turns
        while not done.wait(0.001):
            num_turns += 1

    other = threading.Thread(target=count_turns)
    other.start()
    if way == "encode":  # either way takes some 200 ms, in which a thread that is held has fewer than ten turns
        tokenizer.encode(text, add_special_tokens=True)
    else:
        assert tokenizer.decode(ids, skip_special_tokens=True) == text * 8
    done.set()
    other.join()
    assert num_turns > 20


def test_half_a_surrogate_pair_is_refused(tmp_path):
    with pytest.raises(RequestError, match="surrogate"):
        Tokenizer.from_folder(save(byte_level(), tmp_path)).encode("a\ud800b", add_special_tokens=True)


def test_generation_defaults_are_what_the_file_has(tmp_path):
    assert GenerationDefaults.from_folder(tmp_path).given() == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "do_sample": true, "top_p": null}')
    assert GenerationDefaults.from_folder(tmp_path).given() == {"temperature": 0.6, "top_k": 20}


def test_wrong_generation_defaults_are_named(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*temperature.*--generation-config none"):
        GenerationDefaults.from_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')  # no request could be served with it
    with pytest.raises(CheckpointError, match=r"json: temperature is -1.*, but must lie.*--generation-config none"):
        GenerationDefaults.from_folder(tmp_path)
