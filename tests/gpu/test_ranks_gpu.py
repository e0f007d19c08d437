"""Ranks on GPUs: two on one GPU, which share it (`one_gpu_ranks`), NCCL of one rank, and two GPUs where there are two."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from parity.engine_driver import drain, generate, greedy, options
from parity.oracle import EXPERT_FAMILIES, FAMILIES, LATENT_EXPERT_FAMILIES, Oracle
from parity.test_gemma import GEMMAS
from parity.test_hybrids import HYBRIDS
from parity.test_mamba import FAMILIES as MAMBA

from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.errors import EngineDied
from enginery.plugin.registry import Registry
from enginery.worker.ranks.collectives import RankCollectives
from enginery.worker.ranks.gloo import Standing
from enginery.worker.ranks.nccl import DeviceGroup

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ALL_FAMILIES = FAMILIES | EXPERT_FAMILIES | LATENT_EXPERT_FAMILIES
COMPARED = ("llama", "qwen3-moe", "deepseek-v2-lite-experts")
GPU_RANKS = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu_ranks.py"
BFLOAT16_STEP = 2**-4  # between numbers from 8 to 16; a norm of random rows is rounded twice, to half of that at most
PROMPTS = (1, 5, 6)
NUM_TOKENS = 16
END_S = 5.0  # of an engine: ranks that do not end by themselves in two are killed
SMALL = {
    "device": "cuda",
    "dtype": "float32",
    "max_batch_requests": 4,
    "max_batch_tokens": 64,
    "num_pages": 256,
    "step_deadline": 20.0,
}
TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"two ranks through NCCL need two GPUs, and there are {torch.cuda.device_count()}"
)
FOUR_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 4, reason=f"four ranks through NCCL need four GPUs, and there are {torch.cuda.device_count()}"
)


def asked(oracle: Oracle, **changes: object) -> EngineOptions:
    return options(oracle, **{**SMALL, **changes})


def prompts_of(oracle: Oracle) -> list[list[int]]:
    return [oracle.prompts[index] for index in PROMPTS]


@functools.cache
def expected_tokens(oracle: Oracle) -> list[list[int]]:
    return [oracle.continue_greedily(prompt, NUM_TOKENS) for prompt in prompts_of(oracle)]


def sampled(engine: Engine, oracle: Oracle) -> list[list[int]]:
    """What three requests are told that draw their tokens from all logits."""
    told: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts_of(oracle)):
        params = SamplingParams(temperature=0.8, top_p=0.9, seed=place, max_tokens=8, ignore_eos=True)
        engine.submit(GenerationRequest(request_id=str(place), prompt_token_ids=tuple(prompt), params=params))
    while engine.has_work:
        for output in engine.step():
            told.setdefault(output.request_id, []).extend(output.token_ids)
    return [told[name] for name in sorted(told)]


def comm_of(engine: Engine) -> RankCollectives:
    """What the engine's own rank exchanges through."""
    comm = engine._runner.parts.model.comm  # type: ignore[attr-defined]
    assert isinstance(comm, RankCollectives)
    return comm


@pytest.fixture
def one_gpu() -> Iterator[Callable[[EngineOptions, Registry], Engine]]:
    """Builds engines whose ranks share the GPU."""
    one_gpu_ranks = pytest.importorskip("gpu.one_gpu_ranks")
    built: list[Engine] = []

    def build(wanted: EngineOptions, registry: Registry) -> Engine:
        built.append(Engine.build(wanted, registry, launch=one_gpu_ranks.launch))
        return built[-1]

    with one_gpu_ranks.sharing():
        yield build
        for engine in built:
            engine.close()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", COMPARED)
def test_two_ranks_on_one_gpu_tell_what_transformers_tells(
    write_oracle: Callable[..., Oracle], registry: Registry, one_gpu: Callable[..., Engine], *, family: str, graphs: bool
) -> None:
    """Greedy tokens are each rank's best, found within graphs; drawn ones are those of one rank."""
    oracle = write_oracle(family, ALL_FAMILIES[family])
    alone = sampled(Engine.build(asked(oracle, graphs=graphs), registry), oracle)
    engine = one_gpu(asked(oracle, tp=2, graphs=graphs), registry)
    assert comm_of(engine).peer_ops is not None
    assert engine._runner.sizes.graphs == ((1, 2, 4) if graphs else ())
    assert generate(engine, prompts_of(oracle), max_tokens=NUM_TOKENS) == expected_tokens(oracle)
    assert sampled(engine, oracle) == alone


def test_a_rank_that_is_killed_ends_the_engine_and_leaves_the_gpu_to_others(
    write_oracle: Callable[..., Oracle], registry: Registry, one_gpu: Callable[..., Engine]
) -> None:
    """The other rank's kernel waits for one that never comes, and is ended."""
    oracle = write_oracle("llama", FAMILIES["llama"])
    engine = one_gpu(asked(oracle, tp=2), registry)
    engine.submit(greedy("a", [1, 2, 3], max_tokens=100))
    for _ in range(5):
        engine.step()
    running = engine._ranks._watch.running  # type: ignore[attr-defined]
    os.kill(int(re.findall(r"\d+", running.name(1))[-1]), signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(EngineDied, match=r"rank 1 .* was killed by SIGKILL"):
        drain(engine, {})
    torch.cuda.synchronize()
    assert time.monotonic() - began_s < SMALL["step_deadline"]  # type: ignore[operator]


def test_nccl_of_one_rank_does_all_that_ranks_exchange_within_graphs() -> None:
    """The calls, and that graphs capture them. What crosses between ranks is for two GPUs."""
    device = torch.device("cuda", 0)
    standing = Standing()
    group = DeviceGroup(torch.distributed.HashStore(), "all", rank=0, size=1, standing=standing, device=device)
    x = torch.randn(4, 8, device=device)

    def exchange() -> list[torch.Tensor]:
        found = [group.sum(x.clone()), group.own_part_sum(x), *group.of_all(x), *group.at_first(x), group.from_first(x.clone())]
        return found + group.of_all(x.double()) + [group.from_first(torch.arange(4, device=device))]

    exchange()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = exchange()
    for seed in (1, 2):
        torch.manual_seed(seed)
        x.copy_(torch.randn(4, 8))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(each, x.to(each.dtype)) for each in found[:-1])
        assert found[-1].tolist() == [0, 1, 2, 3]
    standing.sever()


@TWO_GPUS
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", COMPARED)
def test_two_gpus_tell_what_transformers_tells(
    write_oracle: Callable[..., Oracle], registry: Registry, *, family: str, graphs: bool
) -> None:
    oracle = write_oracle(family, ALL_FAMILIES[family])
    alone = sampled(Engine.build(asked(oracle, graphs=graphs), registry), oracle)
    engine = Engine.build(asked(oracle, tp=2, graphs=graphs), registry)
    assert (comm_of(engine).peer_ops is not None) == torch.cuda.can_device_access_peer(0, 1)
    try:
        assert generate(engine, prompts_of(oracle), max_tokens=NUM_TOKENS) == expected_tokens(oracle)
        assert sampled(engine, oracle) == alone
    finally:
        engine.close()


def served(engine: Engine, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    """The tokens of each."""
    told: dict[str, list[int]] = {each.request_id: [] for each in requests}
    for each in requests:
        engine.submit(each)
    while engine.has_work:
        for output in engine.step():
            told[output.request_id].extend(output.token_ids)
    return told


@TWO_GPUS
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("drafter", "overlap"), [("lookup", True), ("lookup", False), ("eagle", True)])
def test_guesses_on_two_gpus_change_no_token(registry: Registry, *, drafter: str, overlap: bool, graphs: bool) -> None:
    """Greedy, drawn, and one that is not drafted for: the embedded model, each alone and together.

    Of steps that overlap, the one behind a first hit has run before n-grams find it: of hits this short none is left.
    """
    sizes = {"max_batch_requests": 16, "max_batch_tokens": 256, "max_model_len": 256, "num_pages": 200, "step_deadline": 20.0}
    plain = EngineOptions(device="cuda", dtype="float32", attention_backend="triton", graphs=graphs, **sizes)  # type: ignore[arg-type]
    ways: list[dict[str, object]] = [{}, {}, {"temperature": 0.7, "top_p": 0.9}, {"logprobs": 1}, {"speculation": False}]
    requests = [
        GenerationRequest(
            request_id=str(at),
            prompt_token_ids=(at, *(6, 7, 8) * (2 + 3 * at)),
            params=SamplingParams(**{"temperature": 0.0, "seed": at, "max_tokens": 32, "ignore_eos": True, **way}),  # type: ignore[arg-type]
        )
        for at, way in enumerate(ways)
    ]
    batches = [requests[:1], requests[2:3], requests]
    alone = Engine.build(plain, registry)
    expected = [served(alone, batch) for batch in batches]
    alone.close()
    guessing = dataclasses.replace(plain, tp=2, drafter=drafter, draft_length="3", overlap=overlap)
    engine = Engine.build(guessing, registry)
    try:
        assert [served(engine, batch) for batch in batches] == expected
        stats = engine.meter.stats()
        assert stats.drafts.accepted < stats.drafts.drafted
        assert stats.drafts.accepted > 0 or (drafter == "lookup" and overlap)
        assert (stats.num_graph_steps > 30) == graphs
        assert (engine._runner._draft_graphs is not None) == (graphs and drafter == "eagle")
    finally:
        engine.close()


def assert_mesh_tells_what_transformers_tells(oracle: Oracle, registry: Registry, mesh: dict[str, object]) -> None:
    engine = Engine.build(asked(oracle, **mesh), registry)
    try:
        assert generate(engine, prompts_of(oracle), max_tokens=NUM_TOKENS) == expected_tokens(oracle)
        assert engine.meter.stats().num_graph_steps >= NUM_TOKENS - 1
    finally:
        began_s = time.monotonic()
        engine.close()
    assert time.monotonic() - began_s < END_S


@TWO_GPUS
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp_attention": 2}, {"dp_attention": 2, "ep": True}, {"tp": 2, "ep": True}])
@pytest.mark.parametrize("family", ["deepseek-v2-lite-experts", "nemotron_h_moe", "qwen3_next", "gemma3"])
def test_other_meshes_of_two_gpus_tell_what_transformers_tells(
    write_oracle: Callable[..., Oracle], registry: Registry, family: str, mesh: dict[str, object]
) -> None:
    """Latents, scans, delta rules, and windows, whose model is dense."""
    if family == "gemma3":
        mesh = {name: value for name, value in mesh.items() if name != "ep"}
    oracle = write_oracle(family, (ALL_FAMILIES | MAMBA | HYBRIDS | GEMMAS)[family])
    assert_mesh_tells_what_transformers_tells(oracle, registry, mesh)


@FOUR_GPUS
@pytest.mark.parametrize(
    "mesh",
    [
        {"tp": 4},
        {"tp": 4, "ep": True},
        {"tp": 2, "pp": 2},
        {"dp_attention": 4, "ep": True},
        {"tp": 2, "dp_attention": 2, "ep": True},
    ],
)
def test_meshes_of_four_gpus_tell_what_transformers_tells(
    write_oracle: Callable[..., Oracle], registry: Registry, mesh: dict[str, object]
) -> None:
    oracle = write_oracle("deepseek-v2-lite-experts", ALL_FAMILIES["deepseek-v2-lite-experts"])
    assert_mesh_tells_what_transformers_tells(oracle, registry, mesh)


@TWO_GPUS
def test_sums_of_two_gpus_are_those_of_float64() -> None:
    """NCCL's, and the kernel's within a norm where the GPUs reach each other's memory, of 16 KB to 256 MB."""
    command = [sys.executable, str(GPU_RANKS), "--ranks", "2", "--only", "sums"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens_are_one_ranks"] == {"2": True}
    early = [row for row in report["sums"] if "inner" in row]
    assert all(row["largest difference"] < BFLOAT16_STEP and row["same bits"] for row in early), early
    sums = [row for row in report["sums"] if "bytes" in row]
    assert sums
    for way in ("NCCL", "kernel") if torch.cuda.can_device_access_peer(0, 1) else ("NCCL",):
        assert all(row[f"{way}: largest error"] < BFLOAT16_STEP for row in sums), sums
    best = [found for row in report["sums"] for name, found in row.items() if name.endswith("finds the best")]
    assert all(best), report["sums"]
