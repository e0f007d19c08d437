"""A model whose values are narrower than its keys, through the engine: MiMo-V2-Flash, interpreted, beside transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity.oracle import Oracle, randomise
from parity.test_mimo import CONFIG
from transformers import MiMoV2FlashForCausalLM

from enginery import LLM, SamplingParams

NUM_TOKENS = 4


@pytest.mark.usefixtures("interpreter")
def test_windows_and_sinks_with_narrower_values_are_transformers(tmp_path: Path) -> None:
    """Prompts in chunks and together, with windows that begin amid pages; then steps that decode."""
    CONFIG._attn_implementation = "eager"
    torch.manual_seed(0)
    model = MiMoV2FlashForCausalLM(CONFIG).eval().float()
    randomise(model)
    model.save_pretrained(tmp_path)
    oracle = Oracle(tmp_path, model)
    prompts = sorted(oracle.prompts, key=len)[1:4]
    asked = {"page_size": 16, "num_pages": 64, "max_batch_tokens": 24, "max_model_len": 256, "max_batch_requests": 8}
    with LLM(model=str(tmp_path), device="cpu", dtype="float32", attention_backend="triton", **asked) as llm:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1)
        answers = llm.generate(prompts, params, progress=False)
    assert len(prompts[-1]) > CONFIG.sliding_window
    for prompt, answer in zip(prompts, answers, strict=True):
        told = list(answer.token_ids)
        assert told == oracle.continue_greedily(prompt, NUM_TOKENS, told)
        expected = oracle.logits([*prompt, *told[:-1]])[-NUM_TOKENS:].log_softmax(-1)
        assert answer.logprobs is not None
        found = [each.logprob for each in answer.logprobs]
        assert found == pytest.approx([float(row[token]) for row, token in zip(expected, told, strict=True)], abs=1e-4)
