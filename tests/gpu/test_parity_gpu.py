"""On a CUDA device: exact greedy tokens in float32, small relative errors in bfloat16, whatever attends.

In bfloat16 rounding may choose another expert for a token where two are nearly equal, and that token's logits are then those of
another sum. So of mixtures of experts the median of the errors over the steps of one answer is bounded: a wrong kernel or weight is
wrong at every step. That the right experts are chosen is shown in float32, where tokens must be equal.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import pytest
import torch
from parity.engine_driver import drain, generate, greedy, last_logits, options
from parity.oracle import (
    EXPERT_FAMILIES,
    FAMILIES,
    LATENT_EXPERT_FAMILIES,
    Oracle,
    expert_shape,
    grouped_expert_shape,
    latent_shape,
    shape,
)
from parity.test_latent_parity import watched
from parity.test_llama_relatives import RELATIVES
from transformers import DeepseekV2Config, LlamaConfig, MixtralConfig, Phi3Config, Qwen3Config, Qwen3MoeConfig

from enginery.config.schema import EngineOptions
from enginery.contracts.attention import AttnBackendSpec
from enginery.contracts.latent import PrefillStrategy
from enginery.contracts.step import SamplingInput, StepInput
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.testing.readback import no_reads
from enginery.worker.paths.decode_graphs import LogitsHead
from enginery.worker.paths.path import Launched
from enginery.worker.paths.running_step import RunningStep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # Triton compiles its kernels the first time

ATTENTION = {
    "torch": {"attention_backend": "torch"},
    "triton": {"attention_backend": "triton"},
    "flashinfer": {"attention_backend": "flashinfer"},
    "flashinfer-mla": {"attention_backend": "flashinfer-mla"},
    "flashinfer and triton": {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "triton"},
    "flashinfer-mla and triton": {"attention_backend": "auto", "wait_for_kernels": True},  # which decodes one request
}
DENSE = FAMILIES | RELATIVES | {"phi3-96": Phi3Config(**shape(head_dim=96))}  # Phi 3 mini's heads, no power of two
WIDE = {  # heads as large as FlashInfer takes
    "llama-128": LlamaConfig(**shape(head_dim=128, num_attention_heads=8)),
    "qwen3-64": Qwen3Config(**shape(head_dim=64)),
}
WIDE_EXPERTS = {
    "mixtral-128": MixtralConfig(**shape(num_local_experts=8, head_dim=128) | expert_shape()),
    "qwen3-moe-128": Qwen3MoeConfig(**shape(num_experts=8, head_dim=128, norm_topk_prob=True) | expert_shape()),
}
LATENT_DIMS = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)  # DeepSeek-V2's own
WIDE_LATENT = {
    "deepseek-v2-512": DeepseekV2Config(
        **latent_shape(q_lora_rank=None)
        | grouped_expert_shape(topk_method="greedy", n_group=1, topk_group=1)
        | LATENT_DIMS
        | dict(num_attention_heads=16, num_key_value_heads=16)
    ),
}
THROUGH_GRAPHS = [
    *((name, attention) for name in WIDE for attention in ("triton", "flashinfer", "flashinfer and triton")),
    *((name, attention) for name in WIDE_EXPERTS for attention in ("triton", "flashinfer")),
    *((name, attention) for name in WIDE_LATENT for attention in ("triton", "flashinfer-mla", "flashinfer-mla and triton")),
]
BFLOAT16_ERROR = 0.03
ASKS: list[dict[str, object]] = [
    {"max_tokens": 8},
    {"max_tokens": 8, "temperature": 0.7, "top_p": 0.9},
    {"max_tokens": 8, "logprobs": 2, "prompt_logprobs": 1},
    {"max_tokens": 8, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_tokens": 4, "logit_bias": {7: 1.0}},
]


PROMPTS = (1, 5, 6)
NUM_TOKENS = 16  # transformers takes ten seconds of eight processes for all prompts and 64 of them; tests/parity has those


@pytest.fixture(params=sorted(DENSE))
def oracle(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle(request.param, DENSE[request.param])


@functools.cache
def expected_tokens(oracle: Oracle) -> list[list[int]]:
    return [oracle.continue_greedily(oracle.prompts[index], NUM_TOKENS) for index in PROMPTS]


def generated(engine: Engine, oracle: Oracle) -> list[list[int]]:
    return generate(engine, [oracle.prompts[index] for index in PROMPTS], max_tokens=NUM_TOKENS)


def asked(oracle: Oracle, attention: str, **changes: object) -> EngineOptions:
    return options(oracle, **{"device": "cuda", "max_batch_requests": 16, **ATTENTION[attention], **changes})


def skip_if_absent(registry: Registry, attention: str) -> None:
    """What is installed must not refuse."""
    names = set(attention.split(" and "))
    if absent := names - {offer.name for offer in registry.offers(AttnBackendSpec)}:
        pytest.skip(f"not installed here: {', '.join(absent)}")
    if "flashinfer" in attention and find_spec("flashinfer") is None:
        pytest.skip("not installed here: the library flashinfer")


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 4096), (16, 16)])
def test_greedy_tokens_are_equal_in_float32(
    oracle: Oracle, registry: Registry, *, attention: str, page_size: int, chunk: int
) -> None:
    wanted = asked(oracle, attention, dtype="float32", page_size=page_size, max_batch_tokens=chunk)
    assert generated(Engine.build(wanted, registry), oracle) == expected_tokens(oracle)


@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_bfloat16_stays_close(oracle: Oracle, registry: Registry, *, attention: str) -> None:
    prompt = oracle.prompts[4]
    actual = last_logits(registry, asked(oracle, attention, dtype="bfloat16"), prompt)
    assert relative_error(actual, oracle.logits(prompt)[-1]) < BFLOAT16_ERROR


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("family", sorted(EXPERT_FAMILIES))
def test_greedy_tokens_of_experts_are_equal_in_float32(
    write_oracle: Callable[..., Oracle], registry: Registry, *, family: str, attention: str
) -> None:
    oracle = write_oracle(family, EXPERT_FAMILIES[family])
    engine = Engine.build(asked(oracle, attention, dtype="float32", max_batch_tokens=16), registry)
    assert any(setting == "ops" and value.startswith("triton:") for setting, value, _ in engine.facts.decisions)
    assert generated(engine, oracle) == expected_tokens(oracle)


@pytest.mark.parametrize("strategy", PrefillStrategy)
@pytest.mark.parametrize("family", sorted(LATENT_EXPERT_FAMILIES))
def test_every_latent_prefill_strategy_gives_equal_tokens_in_float32(
    write_oracle: Callable[..., Oracle], registry: Registry, *, family: str, strategy: PrefillStrategy
) -> None:
    oracle = write_oracle(family, LATENT_EXPERT_FAMILIES[family])
    chunk_tokens = 4096 if strategy is PrefillStrategy.ONE_SHOT else 8
    changes = {"mla_prefill": str(strategy), "mla_chunk_tokens": chunk_tokens, "max_batch_tokens": 16, "dtype": "float32"}
    changes["graphs"] = strategy is not PrefillStrategy.ABSORBED  # which graphs have within
    engine, reader = watched(asked(oracle, "triton", **changes), registry)
    assert generated(engine, oracle) == expected_tokens(oracle)
    assert reader.strategies == {strategy}
    assert reader.longest_prefix >= 32
    assert reader.most_chunks >= (4 if strategy is PrefillStrategy.CHUNKED else 0)


@pytest.mark.parametrize("family", ["deepseek-v2-lite-experts", "glm4-moe"])
def test_steps_of_experts_read_nothing_back_and_are_captured(
    write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """What is captured has no place for a read; `no_reads` is around the calls of attention between pieces."""
    oracle = write_oracle(family, EXPERT_FAMILIES[family])
    wanted = asked(oracle, "triton", dtype="bfloat16", max_batch_tokens=16, overlap=False)
    parts = build_parts(wanted, registry)
    engine = Engine(parts, registry, wanted)
    assert len(generate(engine, oracle.prompts, max_tokens=8)) == len(oracle.prompts)  # captures all sizes that come
    attend, launch, steps = parts.step.socket.relay.attend, engine._runner.launch, list[tuple[bool, bool]]()

    def watched_attend(*given: object) -> None:
        with no_reads(torch.device("cuda")):
            attend(*given)

    def noted(step: StepInput) -> Launched:
        launched = launch(step)
        steps.append((step.num_decode < step.num_items, launched.forwarded.in_graphs))
        return launched

    monkeypatch.setattr(parts.step.socket.relay, "attend", watched_attend)
    monkeypatch.setattr(engine._runner, "launch", noted)
    generate(engine, [prompt[::-1] for prompt in oracle.prompts], max_tokens=8)
    assert set(steps) == {(True, True), (False, True)}


@pytest.mark.parametrize("asks", ASKS, ids=",".join)
@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
def test_launching_a_step_waits_for_nothing(
    write_oracle: Callable[..., Oracle],
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    asks: dict[str, object],
) -> None:
    """Neither for a value nor for a copy, whatever the requests ask for, in steps with graphs and in longer ones without."""
    skip_if_absent(registry, attention)
    oracle = write_oracle("llama-128", WIDE["llama-128"])
    wanted = asked(oracle, attention, dtype="bfloat16", max_batch_tokens=2048, overlap=True)
    engine = Engine.build(wanted, registry)
    prompts = [[(7 * place + 31 * row) % 251 for place in range(392)] for row in range(4)]  # together more than graphs are for
    assert len(generate(engine, prompts, **asks)) == 4
    launch, sample, steps = engine._runner.launch, engine._runner.sample, list[tuple[bool, bool]]()

    def watched_launch(step: StepInput) -> Launched:
        with no_reads(torch.device("cuda")):
            launched = launch(step)
        steps.append((step.num_decode < step.num_items, launched.forwarded.in_graphs))
        return launched

    def watched_sample(launched: Launched, sampling: SamplingInput | None, cuts: Mapping[int, int]) -> RunningStep:
        with no_reads(torch.device("cuda")):
            return sample(launched, sampling, cuts)

    monkeypatch.setattr(engine._runner, "launch", watched_launch)
    monkeypatch.setattr(engine._runner, "sample", watched_sample)
    generate(engine, [prompt[::-1] for prompt in prompts], **asks)
    assert {(True, False), (False, True)} <= set(steps)


@pytest.mark.parametrize(("name", "attention"), THROUGH_GRAPHS)
def test_bfloat16_stays_close_through_graphs_and_chunks(
    write_oracle: Callable[..., Oracle], registry: Registry, *, name: str, attention: str
) -> None:
    skip_if_absent(registry, attention)
    oracle = write_oracle(name, (WIDE | WIDE_EXPERTS | WIDE_LATENT)[name])
    engine = Engine.build(asked(oracle, attention, dtype="bfloat16", max_batch_tokens=16, overlap=False), registry)
    assert engine.facts.attn_backend == attention.replace(" and ", "+")
    prompt = oracle.prompts[4]
    engine.submit(greedy("a", prompt, max_tokens=24))
    tokens, errors, graphs = list[int](), list[float](), engine._runner.graphs
    assert graphs is not None
    head = graphs.steps.head
    assert isinstance(head, LogitsHead)
    while engine.has_work:
        before = len(tokens)
        tokens += [token for output in engine.step() for token in output.token_ids]
        if before and len(tokens) > before:  # a decoding step: its logits are still there
            expected = oracle.logits([*prompt, *tokens[:-1]])[-1]
            errors.append(relative_error(head.logits[0].float().cpu(), expected))
    assert len(errors) == 23
    assert (max(errors) if name in WIDE else statistics.median(errors)) < BFLOAT16_ERROR, errors


def test_fp8_memory_stays_near(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    skip_if_absent(registry, "flashinfer")
    oracle = write_oracle("llama-128", WIDE["llama-128"])
    prompt = oracle.prompts[4]
    actual = last_logits(registry, asked(oracle, "flashinfer", dtype="bfloat16", kv_dtype="fp8"), prompt)
    assert relative_error(actual, oracle.logits(prompt)[-1]) < 0.12


def test_a_shared_prefix_changes_no_token(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    """Long enough to be read once for all requests of a decoding step."""
    oracle = write_oracle("llama", FAMILIES["llama"])
    prefix = [8 + (7 * index) % 200 for index in range(400)]
    prompts = [[*prefix, 8 + row, 9 + row] for row in range(9)]
    wanted = asked(oracle, "triton", dtype="float32")
    engine = Engine.build(wanted, registry)
    together = generate(engine, prompts, max_tokens=16)
    alone = []
    for prompt in prompts:
        engine.submit(greedy("alone", prompt, max_tokens=16))
        alone.append(drain(engine, {})["alone"])
    assert together == alone == [oracle.continue_greedily(prompt, 16) for prompt in prompts]


def test_sampling_on_the_gpu_equals_sampling_on_the_cpu() -> None:
    from core.worker.test_sampling import row, sample

    torch.manual_seed(0)
    table = torch.randn(64, 1000)
    kinds = ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0}, {"logit_bias": {5: 3.0}, "temperature": 0.5})
    rows = [row(seed=index, **kinds[index % len(kinds)]) for index in range(64)]
    assert sample(table.cuda(), rows, frozenset()).tolist() == sample(table, rows, frozenset()).tolist()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
