"""What tests of models that draft share: requests, engines with a drafter, and what is compared."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from engine.test_kinds_at_random import WINDOWS
from engine.test_speculation import ASKS, Told
from integrity import check_scheduler
from pairwise import EVERYTHING
from parity.engine_driver import options
from parity.oracle import EXPERT_FAMILIES, FAMILIES, Oracle
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from enginery.config.schema import EngineOptions
from enginery.contracts.drafting import DraftModelOptions
from enginery.contracts.engine import DraftCounts
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery_weights_tiny import DRAFTERS, FOLDER

TOKENS = 40 if EVERYTHING else 26


def asking(about: str, prompt: Iterable[int], **changes: object) -> GenerationRequest:
    params = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **changes}
    return GenerationRequest(request_id=about, prompt_token_ids=tuple(prompt), params=SamplingParams(**params))  # type: ignore[arg-type]


def by_itself(oracle: Oracle, **changes: object) -> EngineOptions:
    return options(oracle, **{"drafter": "standalone", "draft_model": str(oracle.folder), **changes})


def counts_of(engine: Engine) -> DraftCounts:
    return engine.meter.stats().drafts


def assert_told(found: Mapping[str, Told], expected: Mapping[str, Told]) -> None:
    assert found.keys() == expected.keys()
    for about, one in found.items():
        assert (one.tokens, one.reason) == (expected[about].tokens, expected[about].reason), about
        assert one.logprobs == pytest.approx(expected[about].logprobs, abs=1e-4), about


def assert_always_right(engine: Engine) -> None:
    counts = counts_of(engine)
    assert counts.verifications > 0
    assert counts.drafted == counts.accepted, counts


SELVES = {
    **{name: FAMILIES[name] for name in ("llama", "qwen3", "mistral", "qwen2-window", "deepseek-v2", "glm4")},
    "gemma2": WINDOWS,
    "mixtral": EXPERT_FAMILIES["mixtral"],
}


def come_and_go(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, Told]:
    """As `answers_of`, one more of them before every other step."""
    told, waiting, turn = {request.request_id: Told() for request in requests}, list(requests), 0
    while waiting or engine.has_work:
        if waiting and turn % 2 == 0:
            engine.submit(waiting.pop(0))
        turn += 1
        for output in engine.step():
            assert output.error is None
            one = told[output.request_id]
            one.tokens += output.token_ids
            one.reason = output.finish_reason
        check_scheduler(engine._scheduler)
    engine._scheduler.check_idle()
    return told


SAID = [
    "Hello",
    "What is a page?",
    "What is 47 + 38?",
    "Tell me a story about a fox named Mia.",
    "Make a JSON record of this person: Ada is 36 years old, a pilot from Redmill who likes chess.",
    "Name three colours.",
    "How do I start the server?",
    "What day comes after Tuesday?",
]


# Of the embedded model, about `SAID` in this order. With the seed of `ASKS` a draw is less than 1e-6 beside the edge of two tokens,
# so how attention rounds says which one is told: compiled kernels, or torch where there is no compiler. Here none is within 1e-3.
SAID_ASKS = {**ASKS, "logprobs": {**ASKS["logprobs"], "seed": 32}}


def prompt_of(text: str) -> tuple[int, ...]:
    """As the chat template writes it."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = f"<|begin|><|turn|>user\n{text}<|done|>\n<|turn|>assistant\n"
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def embedded(**changes: object) -> EngineOptions:
    return EngineOptions(**{"num_pages": 300, "num_threads": 1, "dtype": "float32", **changes})  # type: ignore[arg-type]


def changed_head(
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] = lambda tensors: tensors,
    **config: object,
) -> Path:
    """The embedded model's head with other tensors, and other values in its config.json."""
    shutil.copytree(DRAFTERS["eagle"], folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    save_file(dict(change(load_file(folder / "model.safetensors"))), folder / "model.safetensors")
    return folder


def branching(registry: Registry, drafter: str, siblings: int = 1) -> Registry:
    """As `-o DRAFTER.trees=true -o DRAFTER.siblings=N`."""
    asked = DraftModelOptions(trees=True, siblings=siblings)
    return dataclasses.replace(registry, options={**registry.options, drafter: asked})
