"""The fakes refuse what is real and notice damaged memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from enginery import LLM, SamplingParams
from enginery.api import AttnLayerFacts, AttnNeeds, LocalLayerId
from enginery_echo.spec import ATTENTION

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = dict(architectures=["EchoForCausalLM"], vocab_size=97, max_position_embeddings=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_fake_attention_refuses_real_models() -> None:
    layer = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=16)
    needs = AttnNeeds(device="cpu", dtype="float32", kv_dtype="float32", page_size=16, layers=(layer,))
    assert [reason.rule for reason in ATTENTION.refuse(needs)] == ["model"]


def test_the_next_token_is_the_checksum_of_all_before_it(folder: Path) -> None:
    with LLM(str(folder), load_format="dummy", dtype="float32", num_pages=8) as model:
        tokens = [3, 4, 5, *model.generate([3, 4, 5], GREEDY)[0].token_ids]
    for end in range(3, len(tokens)):
        assert tokens[end] == sum((place + 1) * token for place, token in enumerate(tokens[:end])) % 65_521 % 97


def test_damaged_memory_changes_the_answer(folder: Path) -> None:
    with LLM(str(folder), load_format="dummy", dtype="float32", num_pages=8, page_size=4) as model:
        prompt = list(range(10, 30))
        before = model.generate(prompt, GREEDY)[0].token_ids
        assert model.generate(prompt, GREEDY)[0].token_ids == before
        assert model._engine is not None
        model._engine._runner.parts.relay.backend.pool.layer(LocalLayerId(0)).k.add_(1)
        assert model.generate(prompt, GREEDY)[0].token_ids != before
