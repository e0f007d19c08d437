"""Every drafter that is a model, where requests come, are preempted and aborted amid drafts, and find prefixes in the cache."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from engine import model_heads, prediction_modules
from engine.draft_models import counts_of
from engine.heads_made import Eagle3, Module
from engine.model_heads import asking, options
from engine.random_use import RandomUse
from engine.test_frozen_keys import EPS, with_reader
from engine.test_frozen_keys import write as write_reader
from engine.test_kinds_at_random import small_memory
from engine.test_speculation import answers_of
from pairwise import spread
from parity.oracle import Oracle, shape
from transformers import LlamaConfig

from enginery.contracts.request import GenerationRequest
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

module_of, chain_of, llama_of_six = prediction_modules.module_of, prediction_modules.chain_of, model_heads.llama  # fixtures
DRAFTERS = ["chain of mimo-v2-flash", "module of qwen3-next", "eagle3", "reader", "chain of glm4-moe"]
SMALL = {"page_size": 4, "num_pages": 26, "max_batch_tokens": 24, "max_batch_requests": 10, "max_model_len": 120}


@pytest.fixture
def asked_of(
    module_of: Callable[..., Module],
    chain_of: Callable[..., Module],
    llama_of_six: Oracle,
    write_oracle: Callable[..., Oracle],
    tmp_path: Path,
) -> Callable[[str], tuple[Path, Oracle, dict[str, object]]]:
    """The target, and how its drafter is asked for."""

    def found(drafter: str) -> tuple[Path, Oracle, dict[str, object]]:
        if drafter == "eagle3":
            return llama_of_six.folder, llama_of_six, {"drafter": drafter, "draft_model": str(Eagle3().write(tmp_path / "head"))}
        if drafter == "reader":
            oracle = write_oracle("llama of four", LlamaConfig(**shape(rms_norm_eps=EPS)))
            return oracle.folder, oracle, {"drafter": drafter, "draft_model": str(write_reader(tmp_path / "reader"))}
        module = {"chain": chain_of, "module": module_of}[drafter.split()[0]](drafter.split()[-1])
        return module.folder, module.oracle, {"drafter": "mtp"}

    return found


@pytest.mark.parametrize("drafter", spread(DRAFTERS, 3))
def test_whoever_is_told_something_is_told_what_plain_decoding_tells(
    asked_of: Callable[[str], tuple[Path, Oracle, dict[str, object]]],
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
) -> None:
    chance = random.Random(4)
    folder, oracle, how = asked_of(drafter)
    prompts = [tuple(oracle.prompts[place][:30]) for place in (1, 2, 4)]
    prompts += [(*prompts[0][:20], 7, 8), prompts[1][:9]]
    alone = [asking(f"{at}", each, temperature=0.7, seed=1, max_tokens=25) for at, each in enumerate(prompts)]
    plain = answers_of(Engine.build(options(folder, prefix_cache=False), registry), alone)
    expected = {each.prompt_token_ids: plain[each.request_id].tokens for each in alone}
    small_memory(monkeypatch, windows=16)
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    monkeypatch.setattr("enginery.speculate.length.DraftLength.of", lambda self, count: chance.choice((0, 1, 2, 3, 3)))
    registry = with_reader(registry) if drafter == "reader" else registry
    engine = Engine.build(dataclasses.replace(options(folder, draft_length="3"), **SMALL, **how), registry)

    def ask(name: str) -> GenerationRequest:
        return asking(name, chance.choice(prompts), max_tokens=chance.randint(1, 25), temperature=0.7, seed=1)

    use = RandomUse(engine, chance, ask)
    for request, tokens in use.turns(60, arrivals=0.5, aborts=0.08, evict_each=30):
        assert tokens == expected[request.prompt_token_ids][: len(tokens)]
    assert engine.meter.stats().num_preempted > 0
    assert use.counts["finished"] > 10
    assert counts_of(engine).drafted > 50
    engine._scheduler.check_idle()
