"""Models with several kinds of memory, used at random: nothing of it changes a token, and no page is lost."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from engine.random_use import RandomUse
from engine.rank_pair import KeptRanks, running
from pairwise import EVERYTHING
from parity.engine_driver import drain, greedy, options
from parity.oracle import Oracle, shape
from parity.test_gpt_oss import CONFIG as GPT_OSS
from parity.test_hybrids import HYBRIDS
from parity.test_mamba import FAMILIES as MAMBA
from transformers import Gemma2Config

from enginery.contracts.batch import STATE, WINDOW
from enginery.contracts.request import GenerationRequest
from enginery.contracts.step import StepInput
from enginery.engine import build
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.memory_plan import MemoryPlan

WINDOWS = Gemma2Config(**shape(head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2))
CONFIGS = {
    "gemma2": WINDOWS,
    "gpt-oss": GPT_OSS,
    "kimi_linear": HYBRIDS["kimi_linear"],
    "minimax": HYBRIDS["minimax"],
    "qwen3_next": HYBRIDS["qwen3_next"],
    **{name: MAMBA[name] for name in ("mamba2", "falcon_h1", "lfm2", "jamba")},
}
Answers = dict[tuple[int, ...], list[int]]  # by prompt
LONGEST = 40 if EVERYTHING else 24  # tokens of an answer


def small_memory(patch: pytest.MonkeyPatch, *, windows: int, states: int = 5) -> None:
    """No more of each kind than so many, or than the largest request needs."""
    original = build.plan_memory

    def plan(*args: object, **kwargs: object) -> MemoryPlan:
        found = original(*args, **kwargs)  # type: ignore[arg-type]
        return dataclasses.replace(found, window_pages=min(found.window_pages, windows), state_pages=min(found.state_pages, states))

    patch.setattr(build, "plan_memory", plan)


def prompts_of(oracle: Oracle) -> list[list[int]]:
    """Some begin alike, some are one another's continuation."""
    long, short = oracle.prompts[5], oracle.prompts[1]
    cuts = [(len(long), 0), (40, 11), (40, 3), (33, 5), (17, 9), (16, 0), (0, len(short))]
    return [[*long[:first], *short[:then]] for first, then in cuts]


def alone(registry: Registry, oracle: Oracle) -> Answers:
    """What each prompt gets from an engine that keeps nothing, whole and one after the other."""
    engine = Engine.build(options(oracle, prefix_cache=False, overlap=False), registry)
    answers = {}
    for prompt in prompts_of(oracle):
        engine.submit(greedy("alone", prompt, max_tokens=LONGEST))
        answers[tuple(prompt)] = drain(engine, {})["alone"]
    return answers


def assert_whatever_happens(engine: Engine, chance: random.Random, expected: Answers, *, turns: int) -> None:
    """Each request is told what it is told alone, whoever else comes, is aborted or makes it wait, and whatever is evicted."""

    def ask(name: str) -> GenerationRequest:
        prompt = chance.choice(list(expected))
        return greedy(name, list(prompt), max_tokens=chance.randint(1, LONGEST))

    use = RandomUse(engine, chance, ask)
    told = use.turns(turns, arrivals=0.3, aborts=0.06, evict_each=30)
    finished = 0
    for request, tokens in told:
        assert tokens == expected[request.prompt_token_ids][: len(tokens)], "of an aborted one as far as it came"
        finished += len(tokens) == request.params.max_tokens
    stats = engine.meter.stats()
    assert finished >= use.counts["finished"] > 10
    assert stats.num_preempted > 0
    assert {WINDOW, STATE} & set(stats.pages)
    assert all(pages.free + pages.cached == pages.total for pages in stats.pages.values())
    engine._scheduler.check_idle()


CASES = [*((name, index % 2) for index, name in enumerate(CONFIGS)), ("gemma2", 1), ("qwen3_next", 1)]
SOME = [("gemma2", 0), ("gpt-oss", 1), ("kimi_linear", 0), ("mamba2", 1), ("lfm2", 1)]


@pytest.mark.parametrize(("name", "seed"), CASES if EVERYTHING else SOME)
def test_whatever_happens_to_the_others_each_gets_the_tokens_it_gets_alone(
    write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    oracle, chance = write_oracle(f"random {name}", CONFIGS[name]), random.Random(seed)
    expected = alone(registry, oracle)
    small_memory(monkeypatch, windows=(16, 9)[seed])
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    changes = {"page_size": (4, 16)[seed], "num_pages": (32, 9)[seed], "max_batch_tokens": (24, 64)[seed], "overlap": not seed}
    engine = Engine.build(options(oracle, max_batch_requests=4, max_model_len=120, **changes), registry)
    assert_whatever_happens(engine, chance, expected, turns=110 if EVERYTHING else 70)


STAGED = [("gemma2", 1), ("falcon_h1", 0), ("gpt-oss", 0), ("qwen3_next", 1), ("jamba", 0)]


@pytest.mark.parametrize(("name", "seed"), STAGED if EVERYTHING else STAGED[:2])
def test_with_as_many_steps_on_their_way_as_stages_too(
    write_oracle: Callable[..., Oracle],
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    kept: KeptRanks,
    name: str,
    seed: int,
) -> None:
    """Two processes. A stage may be told to write to a page before it has read it for a step on its way: it does so in order."""
    oracle, chance = write_oracle(f"random {name}", CONFIGS[name]), random.Random(seed)
    expected = alone(registry, oracle)
    small_memory(monkeypatch, windows=(16, 9)[seed])
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    changes = {"page_size": (4, 16)[seed], "num_pages": (32, 9)[seed], "max_batch_tokens": (24, 64)[seed]}
    asked = options(oracle, max_batch_requests=4, max_model_len=120, pp=2, num_threads=1, step_deadline=20.0, **changes)
    with running(asked, registry, kept) as engine:
        most, send = [0], engine._ranks.send

        def noted(step: StepInput) -> None:
            most.append(len(engine._sent))
            send(step)

        monkeypatch.setattr(engine._ranks, "send", noted)
        assert_whatever_happens(engine, chance, expected, turns=160 if EVERYTHING else 100)
    assert max(most) == 2
