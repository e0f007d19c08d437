"""Every drafter that is a model, where attention is composed of several backends or reads narrow numbers: no token differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from engine import model_heads, prediction_modules
from engine.draft_models import SAID, assert_told, counts_of, prompt_of
from engine.heads_made import Eagle3, Module
from engine.model_heads import asking, options
from engine.small_pair import small_model
from engine.test_frozen_keys import EPS, with_reader, write
from engine.test_speculation import answers_of
from parity.oracle import Oracle, shape
from transformers import LlamaConfig

from enginery.config.schema import EngineOptions
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

llama, module_of, chain_of = model_heads.llama, prediction_modules.module_of, prediction_modules.chain_of  # fixtures
SPLIT = {"prefill_attention_backend": "torch", "decode_attention_backend": "torch"}
HOW: dict[str, dict[str, object]] = {"micro-batches": {"micro_batches": True}, "split": SPLIT, "fp8": {"kv_dtype": "fp8"}}
HOW["all, with overlap"] = {"micro_batches": True, **SPLIT, "kv_dtype": "fp8", "overlap": True}
DRAFTERS = ["eagle", "standalone", "eagle3", "reader", "mtp", "chain of mtp", "mtp of a hybrid"]


@pytest.fixture
def asked_of(
    llama: Oracle,
    module_of: Callable[..., Module],
    chain_of: Callable[..., Module],
    write_oracle: Callable[..., Oracle],
    tmp_path: Path,
) -> Callable[..., tuple[EngineOptions, list[list[int]]]]:
    """Options with that drafter, and prompts."""

    def found(drafter: str, **changes: object) -> tuple[EngineOptions, list[list[int]]]:
        changes |= {"draft_length": "2", "num_pages": 600, "page_size": 4}
        if drafter in ("eagle", "standalone"):
            return small_model(drafter=drafter, max_batch_tokens=24, **changes), [list(prompt_of(said)) for said in SAID[1:5]]
        if drafter == "eagle3":
            head = {"drafter": "eagle3", "draft_model": str(Eagle3().write(tmp_path / "head"))}
            return options(llama.folder, **head, **changes), llama.prompts[1:5]
        if drafter == "reader":
            four = write_oracle("llama of four", LlamaConfig(**shape(rms_norm_eps=EPS)))
            return options(four.folder, drafter=drafter, draft_model=str(write(tmp_path / "reader")), **changes), four.prompts[1:5]
        module = chain_of("mimo-v2-flash") if "chain" in drafter else module_of("qwen3-next" if "hybrid" in drafter else "glm4-moe")
        return options(module.folder, drafter="mtp", **changes), module.oracle.prompts[1:5]

    return found


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_each_is_told_what_plain_decoding_tells(
    asked_of: Callable[..., tuple[EngineOptions, list[list[int]]]], registry: Registry, drafter: str, how: str
) -> None:
    """Greedy and seeded, in chunks, and some together."""
    asked, prompts = asked_of(drafter, **HOW[how])
    registry = with_reader(registry) if drafter == "reader" else registry
    requests = [
        asking(f"{at}", prompt[: 30 + at], temperature=0.8 * (at % 2), seed=at, max_tokens=14 + at)
        for at, prompt in enumerate(prompts)
    ]
    plain = dataclasses.replace(asked, drafter="off", draft_model=None, draft_length="auto")
    expected = answers_of(Engine.build(plain, registry), requests)
    parts = build_parts(asked, registry)
    composed = parts.step.relay.backend_id
    assert ("micro(" in composed, "split(" in composed) == ("micro_batches" in HOW[how], SPLIT.keys() <= HOW[how].keys())
    engine = Engine(parts, registry, asked)
    assert_told(answers_of(engine, requests), expected)
    counts = counts_of(engine)
    assert counts.drafted > 20
    assert counts.accepted > 10 or drafter not in ("eagle", "standalone"), "weights of the others are random"
