"""A model whose values are narrower than its keys, through the engine: MiMo-V2-Flash, interpreted, beside transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity.engine_driver import generate, last_logits, options
from parity.oracle import Oracle, randomise
from parity.test_mimo import CONFIG
from torch.testing import assert_close
from transformers import MiMoV2FlashForCausalLM

from enginery.api import LocalLayerId
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

NUM_TOKENS = 4


@pytest.mark.usefixtures("interpreter")
def test_windows_and_sinks_with_narrower_values_are_transformers(tmp_path: Path) -> None:
    """Prompts in chunks and together, with windows that begin amid pages; then steps that decode."""
    CONFIG._attn_implementation = "eager"
    torch.manual_seed(0)
    model = MiMoV2FlashForCausalLM(CONFIG).eval().float()
    randomise(model)
    model.save_pretrained(tmp_path)
    oracle, registry = Oracle(tmp_path, model), Registry.load()
    asked = options(oracle, attention_backend="triton", page_size=16, max_batch_tokens=24)
    keys, values = build_parts(asked, registry).step.pool.layer(LocalLayerId(1))
    assert (keys.shape[-1], values.shape[-1]) == (CONFIG.head_dim, CONFIG.v_head_dim)
    prompts = sorted(oracle.prompts, key=len)[1:4]
    assert_close(last_logits(registry, asked, prompts[-1]), oracle.logits(prompts[-1])[-1], atol=1e-4, rtol=0)
    answers = generate(Engine.build(asked, registry), prompts, max_tokens=NUM_TOKENS)
    assert answers == [
        oracle.continue_greedily(prompt, NUM_TOKENS, answer) for prompt, answer in zip(prompts, answers, strict=True)
    ]
