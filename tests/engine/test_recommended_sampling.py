"""A call from Python without params samples as the checkpoint's authors recommend, as the server and the commands do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from enginery import LLM, AsyncLLM, SamplingParams

PROMPT = "The engine"


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, whose generation_config.json recommends to take the likeliest token."""
    folder = tmp_path_factory.mktemp("greedy")
    with LLM(num_pages=64) as model:
        for file in Path(model.facts.folder).iterdir():
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "repetition_penalty": 1.3, "do_sample": False}))
    return folder


def test_without_params_a_call_samples_as_the_checkpoint_recommends(greedy: Path) -> None:
    recommended = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    messages = [{"role": "user", "content": PROMPT}]
    with LLM(str(greedy), num_pages=64) as model:
        assert model.get_default_sampling_params() == recommended
        wanted = model.generate(PROMPT, recommended)[0].text
        assert model.generate(PROMPT)[0].text == wanted
        assert "".join(delta.text for delta in model.stream(PROMPT)) == wanted
        assert model.chat(messages).text == model.chat(messages, recommended).text
        assert model.generate(PROMPT, SamplingParams(temperature=0))[0].text != wanted  # those given are not mixed with these

    async def alone() -> str:
        async with AsyncLLM(str(greedy), num_pages=64) as served:
            assert served.get_default_sampling_params() == recommended
            return (await served.generate(PROMPT)).text

    assert asyncio.run(alone()) == wanted


def test_without_a_tokenizer_or_its_file_the_defaults_hold(greedy: Path, tmp_path: Path) -> None:
    for file in greedy.iterdir():
        if file.name not in ("generation_config.json", "tokenizer.json"):
            (tmp_path / file.name).symlink_to(file)
    with LLM(str(tmp_path), num_pages=64) as model:
        assert model.get_default_sampling_params() == SamplingParams()
