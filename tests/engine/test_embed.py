"""`LLM.embed` and `AsyncLLM.embed`."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch
from engine.test_llm import TINY
from transformers import AutoModel

from enginery import LLM, AsyncLLM
from enginery.errors import EnginError, RequestError
from enginery.llm.answers import Embedding

PROMPTS = ["The engine", "a", "Once upon a time there was a stubborn squirrel"]


def reference(folder: str, ids: tuple[int, ...]) -> torch.Tensor:
    """The last token's hidden state by transformers, [C] of length 1."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.nn.functional.normalize(model(torch.tensor([ids])).last_hidden_state[0, -1], dim=0)


def test_embeddings_are_the_last_hidden_states_in_the_prompts_order() -> None:
    with LLM(**TINY) as model:
        found = model.embed(PROMPTS)
        (plain,) = model.embed(PROMPTS[0], normalize=False)
        assert model.embed([list(one.prompt_token_ids) for one in found]) == found
        assert model.tokenizer is not None
        assert [list(one.prompt_token_ids) for one in found] == [
            model.tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS
        ]
        for one in found:
            expected = reference(model.facts.folder, one.prompt_token_ids)
            torch.testing.assert_close(torch.tensor(one.vector), expected, atol=2e-5, rtol=0)
    length = math.hypot(*plain.vector)
    assert length > 1.5
    assert [value / length for value in plain.vector] == pytest.approx(found[0].vector)


def test_a_prompt_that_is_embedded_may_fill_the_context() -> None:
    with LLM(**TINY) as model:
        limit = model.facts.max_model_len
        assert len(model.embed([[7] * limit])[0].prompt_token_ids) == limit
        with pytest.raises(RequestError, match=f"at most {limit:,} fit"):
            model.embed([[7] * (limit + 1)])
        assert model.embed([]) == []
        for wrong in ([[]], [None], 7):
            with pytest.raises(RequestError):
                model.embed(wrong)  # type: ignore[arg-type]
    with pytest.raises(EnginError, match="closed"):
        model.embed("x")


def test_a_checkpoint_whose_embeddings_are_pooled_otherwise_is_refused(tmp_path: Path) -> None:
    with LLM(**TINY) as model:
        for file in Path(model.facts.folder).iterdir():
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with LLM(str(tmp_path), **TINY) as model, pytest.raises(RequestError, match="asks for mean_tokens"):
        model.embed("x")


def test_many_embeddings_are_awaited_at_once() -> None:
    async def run() -> list[Embedding]:
        async with AsyncLLM(**TINY) as model:
            return await asyncio.gather(*map(model.embed, PROMPTS))

    found = asyncio.run(run())
    with LLM(**TINY) as model:
        for one, other in zip(found, model.embed(PROMPTS), strict=True):
            assert one.prompt_token_ids == other.prompt_token_ids
            assert one.vector == pytest.approx(other.vector, abs=2e-5)
