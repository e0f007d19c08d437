"""On a CUDA device: verified drafts change no token, whatever attends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine.test_speculation import ASKS, assert_equal_answers
from parity.engine_driver import options
from parity.oracle import FAMILIES, Oracle

from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.plugin.registry import Registry

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # Triton compiles its kernels the first time


@pytest.mark.parametrize("kind", ["right", "random"])
@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek-v2"])
def test_verified_drafts_change_no_token(write_oracle: Callable[..., Oracle], *, name: str, attention: str, kind: str) -> None:
    oracle = write_oracle(name, FAMILIES[name])
    requests = [
        GenerationRequest(
            request_id=about,
            prompt_token_ids=tuple([3 + index, *oracle.prompts[index % 6]][: 20 + 7 * index]),
            params=SamplingParams(**{"max_tokens": 30 - index, "ignore_eos": True, **asked}),
        )
        for index, (about, asked) in enumerate(ASKS.items())
    ]
    asked = options(oracle, device="cuda", dtype="float32", attention_backend=attention, max_batch_requests=16)
    assert_equal_answers(Registry.load(), asked, requests, kind)
