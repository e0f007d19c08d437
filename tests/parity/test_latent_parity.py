"""DeepSeek-V2 equals transformers in every MLA prefill strategy, and the strategy that was asked for is the one that ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from pairwise import crossed, in_turn, pairwise
from parity.engine_driver import RecordingModel, assert_greedy, drain, generate, greedy, last_logits, options
from parity.oracle import FAMILIES, NUM_GREEDY, ROPES, Oracle, latent_shape
from parity.watch_steps import watch_steps
from transformers import DeepseekV2Config

from enginery.attention.composite import CompositePlan, Part
from enginery.attention.latent import RaggedPart
from enginery.config.schema import EngineOptions
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.latent import PrefillStrategy
from enginery.engine.build import BuiltParts, build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

UNLIMITED = 4096
CHUNK_TOKENS = 8  # keys and values made at once: several chunks for every prefix but the shortest
ABSORBED, ONE_SHOT, CHUNKED = PrefillStrategy
DEEPSEEKS = ["deepseek-v2", "deepseek-v2-lite"]


class PlanReader(RecordingModel):
    """Reads from each step's plan how its prefills are computed, and keeps the logits."""

    def __init__(self, parts: BuiltParts) -> None:
        super().__init__(parts.step.model)
        self.prefills: list[Part] = []
        watch_steps(parts, self.read)

    def read(self, batch: ForwardBatch) -> None:
        if isinstance(batch.plan, CompositePlan):
            self.prefills += [part for part in batch.plan.parts if part.batch.phase is Phase.PREFILL]

    @property
    def strategies(self) -> set[PrefillStrategy]:
        return {part.strategy if isinstance(part, RaggedPart) else ABSORBED for part in self.prefills}

    @property
    def most_chunks(self) -> int:
        """Of one prefix."""
        return max(len(part.pieces) - 1 if isinstance(part, RaggedPart) else 0 for part in self.prefills)

    @property
    def longest_prefix(self) -> int:
        return max(int((part.batch.kv_lens_cpu - part.batch.q_lens_cpu).max()) for part in self.prefills)


@pytest.fixture(params=DEEPSEEKS)
def latent_oracle(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle(request.param, FAMILIES[request.param])


@pytest.fixture(params=[ABSORBED, ONE_SHOT, CHUNKED])
def strategy(request: pytest.FixtureRequest) -> PrefillStrategy:
    return request.param


@pytest.fixture
def asked(latent_oracle: Oracle, strategy: PrefillStrategy) -> Callable[..., EngineOptions]:
    """Options that ask for the strategy."""
    chunk_tokens = 4096 if strategy is ONE_SHOT else CHUNK_TOKENS  # a one-shot prefill that does not fit is chunked
    return lambda **changes: options(latent_oracle, **{"mla_prefill": str(strategy), "mla_chunk_tokens": chunk_tokens, **changes})


def watched(asked: EngineOptions, registry: Registry) -> tuple[Engine, PlanReader]:
    parts = build_parts(asked, registry)
    reader = PlanReader(parts)
    return Engine(dataclasses.replace(parts, step=parts.step._replace(model=reader)), registry, asked), reader


def tokens_with_cache_hits(engine: Engine) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Request, how many of its tokens were in the prefix cache, and its next tokens."""
    while engine.has_work:
        for output in engine.step():
            yield output.request_id, output.num_cached_tokens, output.token_ids


@in_turn(
    ("strategy", PrefillStrategy), ("latent_oracle", DEEPSEEKS), ("page_size", [16, 1]), indirect=["latent_oracle", "strategy"]
)
def test_logits_of_a_chunked_prompt_are_within_1e_4(
    latent_oracle: Oracle, strategy: PrefillStrategy, asked: Callable[..., EngineOptions], registry: Registry, *, page_size: int
) -> None:
    engine, reader = watched(asked(page_size=page_size, max_batch_tokens=16), registry)
    prompt = latent_oracle.prompts[5]
    engine.submit(greedy("a", prompt, max_tokens=1, prompt_logprobs=0))
    drain(engine, {})
    torch.testing.assert_close(torch.cat(reader.recorded), latent_oracle.logits(prompt), atol=1e-4, rtol=0)
    assert reader.strategies == {strategy}
    assert reader.longest_prefix == 48
    assert reader.most_chunks == (48 / CHUNK_TOKENS if strategy is CHUNKED else 0)


@pairwise(
    ("latent_oracle", DEEPSEEKS),
    ("strategy", PrefillStrategy),
    ("page_size", [1, 16]),
    ("tokens_per_step", [16, UNLIMITED]),
    ("batch", [1, 7]),
    indirect=["latent_oracle", "strategy"],
)
def test_greedy_tokens_are_equal(
    latent_oracle: Oracle,
    strategy: PrefillStrategy,
    asked: Callable[..., EngineOptions],
    registry: Registry,
    *,
    page_size: int,
    tokens_per_step: int,
    batch: int,
) -> None:
    engine, reader = watched(
        asked(page_size=page_size, max_batch_tokens=tokens_per_step, max_batch_requests=min(tokens_per_step, 256)), registry
    )
    prompts = latent_oracle.prompts if batch == 7 else latent_oracle.prompts[5:6]
    assert_greedy(latent_oracle, generate(engine, prompts), prompts)
    assert reader.strategies == {strategy}
    assert reader.longest_prefix >= (32 if tokens_per_step == 16 else 0)
    assert reader.most_chunks >= (4 if strategy is CHUNKED and tokens_per_step == 16 else 0)


@in_turn(
    ("strategy", PrefillStrategy), ("latent_oracle, page_size", crossed(DEEPSEEKS, [1, 16])), indirect=["latent_oracle", "strategy"]
)
def test_prefix_cache_hits_change_no_token(
    latent_oracle: Oracle, strategy: PrefillStrategy, asked: Callable[..., EngineOptions], registry: Registry, *, page_size: int
) -> None:
    engine, reader = watched(asked(page_size=page_size), registry)
    prompt = latent_oracle.prompts[5]
    (expected,) = generate(engine, [prompt])
    assert_greedy(latent_oracle, [expected], [prompt])
    reader.prefills.clear()
    engine.submit(greedy("again", prompt))
    engine.submit(greedy("longer", prompt + expected[:20], max_tokens=NUM_GREEDY - 20))
    tokens: dict[str, tuple[int, ...]] = {"again": (), "longer": ()}
    hits: dict[str, int] = {}
    for request, num_cached, new in tokens_with_cache_hits(engine):
        tokens[request] += new
        hits[request] = num_cached
    assert hits["again"] >= 48
    assert hits["longer"] >= 64
    assert tokens == {"again": tuple(expected), "longer": tuple(expected[20:])}
    assert reader.strategies == {strategy}
    assert reader.longest_prefix >= 64
    assert reader.most_chunks >= (8 if strategy is CHUNKED else 0)


@in_turn(
    ("strategy", PrefillStrategy),
    ("latent_oracle, page_size", crossed(DEEPSEEKS[::-1], [16, 1])),
    indirect=["latent_oracle", "strategy"],
)
def test_preemption_changes_no_token(
    latent_oracle: Oracle, strategy: PrefillStrategy, asked: Callable[..., EngineOptions], registry: Registry, *, page_size: int
) -> None:
    engine, reader = watched(
        asked(page_size=page_size, num_pages=224 // page_size, max_batch_tokens=64, prefix_cache=False), registry
    )
    assert_greedy(latent_oracle, generate(engine, latent_oracle.prompts))
    prompted = sum(len(prompt) for prompt in latent_oracle.prompts)
    prefilled = sum(part.batch.num_tokens for part in reader.prefills)
    assert prefilled > prompted, "nothing was preempted and recomputed"
    assert reader.strategies == {strategy}


@in_turn(
    ("chunk_tokens, ragged", [(CHUNK_TOKENS, CHUNKED), (64, ONE_SHOT)]), ("latent_oracle", DEEPSEEKS), indirect=["latent_oracle"]
)
def test_left_to_itself_the_engine_chooses_by_size(
    latent_oracle: Oracle, registry: Registry, *, chunk_tokens: int, ragged: PrefillStrategy
) -> None:
    engine, reader = watched(options(latent_oracle, mla_chunk_tokens=chunk_tokens), registry)
    assert_greedy(latent_oracle, generate(engine, latent_oracle.prompts[5:6]), latent_oracle.prompts[5:6])
    assert reader.strategies == {ragged}  # one long prompt
    reader.prefills.clear()
    assert_greedy(latent_oracle, generate(engine, latent_oracle.prompts))
    assert reader.strategies == {ABSORBED}  # short ones, and the long one from the prefix cache


@pytest.mark.parametrize("rope", [*sorted(ROPES.keys() - {"longrope"}), "default"])
def test_every_rope_scaling_gives_equal_greedy_tokens(rope: str, registry: Registry, write_oracle: Callable[..., Oracle]) -> None:
    parameters = ROPES.get(rope, {"rope_type": "default", "rope_theta": 10000.0})
    oracle = write_oracle(
        f"latent-rope-{rope}", DeepseekV2Config(**latent_shape(q_lora_rank=None) | {"rope_parameters": parameters})
    )
    some = oracle.prompts[3:5]
    assert_greedy(oracle, generate(Engine.build(options(oracle), registry), some), some)


def test_attention_and_mlp_biases_are_read(registry: Registry, write_oracle: Callable[..., Oracle]) -> None:
    for q_rank in (None, 48):
        config = DeepseekV2Config(**latent_shape(q_lora_rank=q_rank, attention_bias=True, mlp_bias=True))
        oracle = write_oracle(f"latent-bias-{q_rank}", config)
        some = oracle.prompts[3:5]
        assert_greedy(oracle, generate(Engine.build(options(oracle), registry), some), some)


@pytest.mark.parametrize("strategy", PrefillStrategy)
def test_values_may_be_wider_than_keys(registry: Registry, write_oracle: Callable[..., Oracle], strategy: PrefillStrategy) -> None:
    oracle = write_oracle("latent-wide", DeepseekV2Config(**latent_shape(q_lora_rank=48) | {"v_head_dim": 32}))
    asked = options(oracle, mla_prefill=str(strategy), mla_chunk_tokens=CHUNK_TOKENS, max_batch_tokens=16)
    for prompt in oracle.prompts[3:5]:
        torch.testing.assert_close(last_logits(registry, asked, prompt), oracle.logits(prompt)[-1], atol=1e-4, rtol=0)


def test_half_precision_stays_close_in_every_strategy(latent_oracle: Oracle, asked: Callable[..., EngineOptions]) -> None:
    registry = Registry.load(blocked=("ops-cpu",))
    prompt = latent_oracle.prompts[5]
    expected = latent_oracle.logits(prompt)[-1]
    for dtype, allowed in (("bfloat16", 0.03), ("float16", 0.005)):
        relative = (last_logits(registry, asked(dtype=dtype, max_batch_tokens=16), prompt) - expected).norm() / expected.norm()
        assert relative < allowed
