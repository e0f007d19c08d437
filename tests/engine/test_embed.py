"""`LLM.embed` and `AsyncLLM.embed`."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from engine.draft_models import asking, prompt_of
from engine.small_pair import small_model
from engine.test_llm import TINY
from engine.test_speculation import Scripted, answers_of, with_drafter
from transformers import AutoModel

from enginery import LLM, AsyncLLM
from enginery.contracts.step import StepInput
from enginery.engine.engine import Engine
from enginery.errors import EnginError, RequestError
from enginery.llm.answers import Embedding
from enginery.plugin.registry import Registry
from enginery.worker.paths.path import Launched

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


@pytest.mark.parametrize("length", [2, 4, 5, 9])
def test_prompts_beside_requests_whose_guesses_are_verified_are_embedded_too(registry: Registry, length: int) -> None:
    """Those have several rows in a step. Of five and nine tokens one is left for a step of its own, as if it decoded."""
    asked = small_model(max_batch_requests=16, max_batch_tokens=16)
    decoding = [asking(f"{at}", prompt_of(text), max_tokens=50) for at, text in enumerate(PROMPTS)]
    told = answers_of(Engine.build(asked, registry), decoding)
    right = Scripted("right", {each.prompt_token_ids: told[each.request_id].tokens for each in decoding})
    drafting = dataclasses.replace(asked, drafter="scripted", draft_length="3")
    engine, launched = Engine.build(drafting, with_drafter(registry, lambda _: right)), list[tuple[int, ...]]()
    for request in decoding:
        engine.submit(request)
    while engine.meter.stats().drafts.verifications < 6:
        engine.step()
    ids = range(7, 7 + length)
    engine.submit(dataclasses.replace(asking("embed", ids, max_tokens=1), embed=True))
    launch = engine._runner.launch

    def noting(step: StepInput) -> Launched:
        launched.append((step.num_decode, step.decode_len, *step.columns().num_tokens.tolist()[3:]))
        return launch(step)

    engine._runner.launch = noting  # type: ignore[method-assign]
    vectors = [output.embedding for _ in range(length) for output in engine.step() if output.request_id == "embed"]
    chunks = {2: [(3, 4, 2)], 4: [(3, 4, 4)], 5: [(3, 4, 4), (4, 4, 1)], 9: [(3, 4, 4), (3, 4, 4), (4, 4, 1)]}
    assert launched[: len(chunks[length])] == chunks[length]
    assert vectors[0] is not None
    found = torch.nn.functional.normalize(torch.tensor(vectors[0]), dim=0)
    torch.testing.assert_close(found, reference(engine.facts.folder, tuple(ids)), atol=2e-5, rtol=0)
