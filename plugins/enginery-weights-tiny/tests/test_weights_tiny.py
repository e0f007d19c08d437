"""The embedded default is found, loads offline, and says what it is."""

from __future__ import annotations

import json

from enginery import LLM
from enginery.api import SamplingParams
from enginery_weights_tiny import register_checkpoints


def test_it_says_whether_its_weights_are_random() -> None:
    (spec,) = register_checkpoints()
    files = list(spec.folder.glob("*.safetensors"))
    assert spec.random_weights == (not files) == ("random" in spec.note)
    assert sum(file.stat().st_size for file in files) <= 16_000_000


def test_its_special_tokens_are_those_of_its_tokenizer() -> None:
    (spec,) = register_checkpoints()
    config = json.loads((spec.folder / "config.json").read_text())
    tokens = {token["content"]: token["id"] for token in json.loads((spec.folder / "tokenizer.json").read_text())["added_tokens"]}
    assert config["eos_token_id"] == [tokens["<|end|>"], tokens["<|done|>"]]
    assert config["bos_token_id"] == tokens["<|begin|>"]


def test_any_text_comes_back_and_an_answer_is_given() -> None:
    (spec,) = register_checkpoints()
    with LLM(num_pages=64) as model:
        assert model.tokenizer is not None
        text = "Grüße, 你好 🙂\n"
        ids = model.tokenizer.encode(text, add_special_tokens=True)
        assert model.tokenizer.decode(ids, skip_special_tokens=True) == text
        answer = model.generate(text, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))[0]
    assert len(answer.token_ids) == 5
    assert model.facts.note == spec.note
