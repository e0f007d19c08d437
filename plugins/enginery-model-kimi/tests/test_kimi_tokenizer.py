"""tokenizer.json, made of a tiktoken.model: the tokens that ranks give, word by word, as Kimi's own code cuts them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import regex
from tokenizers import Tokenizer

from enginery.api import CheckpointError
from enginery_model_kimi.write_tokenizer import WORDS, write_tokenizer

TEXT = "Hello, world! don't you'Ll HTTPServer x123456 你好世界hello 日本語テキスト中文ABCdef naïve 😀 __init__\n\n\t end   "
YOU = "你".encode()
MADE = [b"el", b"ll", b"hell", b" w", b"or", b" wor", b"HTTP", b"er", YOU[:2], YOU, b"12", b"123", b"\n\n"]
RANKS = {token: rank for rank, token in enumerate([bytes([byte]) for byte in reversed(range(256))] + MADE)}
NAMED = {
    "272": {"content": "[BOS]", "special": True},
    "275": {"content": "<|im_end|>", "special": True},
    "276": {"content": "<|tool_call_begin|>", "special": False},
}


def write(folder: Path, lines: list[str] | None = None) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()] if lines is None else lines
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": NAMED, "eos_token": "<|im_end|>"}))
    return folder


def by_rank(text: str) -> list[int]:
    """As tiktoken does it: of each word, the pair of lowest rank is joined until none has one."""
    ids = []
    for word in regex.finditer(WORDS, text, regex.V1):
        data = word.group().encode()
        parts = [data] if data in RANKS else [bytes([byte]) for byte in data]
        while len(parts) > 1:
            rank, place = min((RANKS.get(parts[at] + parts[at + 1], 1 << 30), at) for at in range(len(parts) - 1))
            if rank == 1 << 30:
                break
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [RANKS[part] for part in parts]
    return ids


def test_the_tokens_are_those_of_the_ranks(tmp_path: Path) -> None:
    path = write_tokenizer(write(tmp_path))
    assert path == tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    ids = tokenizer.encode(TEXT).ids
    assert ids == by_rank(TEXT)
    assert {RANKS[token] for token in (b" wor", b"123", YOU, b"el")} <= set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT


def test_named_tokens_have_their_ids_and_are_special_where_they_say_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tokenizer(write(tmp_path))))
    assert tokenizer.encode("[BOS]or<|tool_call_begin|><|im_end|>").ids == [272, RANKS[b"or"], 276, 275]
    assert {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special} == {272, 275}


@pytest.mark.parametrize("lines", [["!!! 0"], ["IQ== 1"], ["IQ=="], None])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, lines: list[str] | None) -> None:
    write(tmp_path, lines)
    if lines is None:
        (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"1": "x"}}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json" if lines is None else r"tiktoken\.model"):
        write_tokenizer(tmp_path)


@pytest.mark.parametrize("number", ["3", "273"], ids=["that of a rank", "another's text"])
def test_a_named_token_that_cannot_have_its_id_is_told(tmp_path: Path, number: str) -> None:
    write(tmp_path)
    named = NAMED | {number: {"content": "[EOS]" if number == "3" else "[BOS]", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json calls token \d+ '\[[BE]OS\]'"):
        write_tokenizer(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be written: .*; make its folder writable"):
        write_tokenizer(tmp_path)
