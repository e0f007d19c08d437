"""On a CUDA device with FlashInfer: verifying guesses, and changing over to it while requests are answered.

It attends in bfloat16, so a token counts as the likeliest within what rounding moves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from engine.draft_models import asking, by_itself, counts_of
from engine.test_speculation import answers_of
from gpu.test_parity_gpu import ATTENTION, WIDE, WIDE_LATENT, skip_if_absent
from parity.engine_driver import options
from parity.oracle import Oracle

from enginery.contracts.request import GenerationRequest
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # FlashInfer compiles its kernels the first time

ROUNDING = 0.2  # of the logits' standard deviation; a token that is not meant is some 2.5 of them below the likeliest
NUM_TOKENS = 24
VERIFIED_BY = [
    ("llama-128", "flashinfer"),
    ("llama-128", "flashinfer and triton"),
    ("deepseek-v2-512", "flashinfer-mla"),
    ("deepseek-v2-512", "flashinfer-mla and triton"),
]


def requests_of(oracle: Oracle) -> list[GenerationRequest]:
    """Prompts of several lengths, twice what a step of these tests takes among them."""
    return [asking(f"{at}", oracle.prompts[place], max_tokens=NUM_TOKENS - at) for at, place in enumerate((0, 5, 2, 4, 6))]


def assert_likeliest(oracle: Oracle, prompt: Sequence[int], tokens: Sequence[int], *, but: int = 0) -> None:
    """but: so many of them may be others, where rounding may choose another expert, too."""
    logits = oracle.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    below = logits.max(-1).values - logits[range(len(tokens)), tokens]
    assert int((below > ROUNDING * logits.std(-1)).sum()) <= but, below


@pytest.mark.parametrize("drafter", ["standalone", "lookup"])
@pytest.mark.parametrize(("name", "attention"), VERIFIED_BY)
def test_guesses_are_verified(
    write_oracle: Callable[..., Oracle], registry: Registry, *, name: str, attention: str, drafter: str
) -> None:
    """Of a model that drafts for itself nearly all are right: its keys, and those it is verified with, are where they belong."""
    skip_if_absent(registry, attention)
    oracle = write_oracle(name, (WIDE | WIDE_LATENT)[name])
    changes = {**ATTENTION[attention], "device": "cuda", "dtype": "bfloat16", "max_batch_requests": 16, "max_batch_tokens": 24}
    if drafter == "standalone":
        asked = by_itself(oracle, **changes, draft_length="3")
    else:
        asked = options(oracle, **changes, drafter=drafter, draft_length="3")
    engine, requests = Engine.build(asked, registry), requests_of(oracle)
    for told in (answers_of(engine, requests), answers_of(engine, requests)):
        for each in requests:
            assert len(told[each.request_id].tokens) == each.params.max_tokens
            assert_likeliest(oracle, each.prompt_token_ids, told[each.request_id].tokens, but=1 if name in WIDE_LATENT else 0)
    counts = counts_of(engine)
    assert counts.drafted > 0
    assert counts.accepted > 0.8 * counts.drafted or drafter == "lookup"


def test_steps_of_both_kinds_run_in_graphs_after_a_changeover(write_oracle: Callable[..., Oracle], tmp_path: Path) -> None:
    """In a process of its own, for which nothing is compiled: requests come and go while FlashInfer is."""
    skip_if_absent(Registry.load(), "flashinfer")
    oracle = write_oracle("llama-128", WIDE["llama-128"])
    prompts = [oracle.prompts[at] for at in (0, 5, 2, 4, 6)]
    environment = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).parent / "changeover.py"), str(oracle.folder)]
    child = subprocess.run(
        command, input=json.dumps(prompts), env=environment, capture_output=True, text=True, timeout=290, check=False
    )
    assert child.returncode == 0, child.stderr
    before, *after = json.loads(child.stdout)
    assert (before["backend"], before["compiles"]) == ("triton", True)
    for told in (before, *after):
        assert not told["failure"]
        assert told["in_graphs"] > 3
        for prompt, tokens in zip(prompts, told["tokens"], strict=True):
            assert_likeliest(oracle, prompt, tokens)
    assert len(after) == 2
    assert all("flashinfer" in told["backend"] for told in after)
    assert after[0]["tokens"] == after[1]["tokens"]
