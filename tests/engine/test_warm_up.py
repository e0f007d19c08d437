"""Warming up runs every kind of step, for nobody, and no kernel that a later step needs is new."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine.test_graphs import AgainAndAgain
from pairwise import EVERYTHING, spread
from parity.engine_driver import options
from parity.oracle import EXPERT_FAMILIES, FAMILIES, Oracle
from parity.test_hybrids import HYBRIDS
from parity.test_mamba import FAMILIES as MAMBA
from transformers import KimiLinearConfig

from enginery.contracts.attention import LocalLayerId
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.ops import SamplingTensors
from enginery.contracts.parallel import ParallelFacts
from enginery.engine.build import BuiltParts, Place, build_parts, run_once
from enginery.plugin.registry import Registry
from enginery.worker.choice import Choice
from enginery.worker.paths.decode_capture import DecodeCapture, DecodeKey
from enginery.worker.paths.decode_graphs import DecodeGraphs, LogitsHead
from enginery.worker.ranks.gloo import LOOPBACK, Standing
from enginery.worker.ranks.groups import RankGroups
from enginery.worker.warm_up import dummy_batch, warm_up


def warm(parts: BuiltParts, *, longest: int) -> None:
    warm_up(parts.step, longest=longest)


def test_all_phases_run_with_and_without_cached_tokens_and_only_the_scratch_page_is_written(
    write_oracle: Callable[..., Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options(write_oracle("llama", FAMILIES["llama"]), max_batch_requests=20, attention_backend="torch")
    parts = build_parts(asked, Registry.load())
    pool, ran = parts.step.relay.backend.pool, set[tuple[Phase, int, int]]()
    forward = parts.step.model.forward

    def recorded(batch: ForwardBatch) -> torch.Tensor:
        first = batch.q_lens_cpu[0]
        assert batch.positions[: int(first)].tolist() == list(range(int(batch.kv_lens_cpu[0] - first), int(batch.kv_lens_cpu[0])))
        ran.add((batch.phase, batch.num_tokens, int(batch.kv_lens_cpu.max())))
        return forward(batch)

    monkeypatch.setattr(parts.step.model, "forward", recorded)
    warm(parts, longest=48)
    assert ran == {
        *((Phase.PREFILL, new, length) for new in (2, 4, 8, 16, 32, 48) for length in (new, 48)),
        *((Phase.DECODE, count, length) for count in (1, 2, 16, 20) for length in (1, 48)),
        *((Phase.MIXED, 4, length) for length in (2, 48)),
    }
    keys, values = pool.layer(LocalLayerId(0))
    assert not keys[:-1].any()
    assert not values[:-1].any()
    assert keys[-1].any()


def test_stages_run_the_same_steps_and_pass_on_what_these_need(write_oracle: Callable[..., Oracle]) -> None:
    """Ranks are threads, with groups as processes have them."""
    asked = options(write_oracle("llama", FAMILIES["llama"]), max_batch_tokens=32, attention_backend="torch", overlap=False)
    store, registry = torch.distributed.HashStore(), Registry.load()

    def warm_rank(rank: int) -> BuiltParts:
        place = ParallelFacts(num_stages=3).of_rank(rank)

        def meet(choice: Choice) -> RankGroups:
            return RankGroups(store, place, host=LOOPBACK, standing=Standing())

        parts = build_parts(asked, registry, place=Place(place, meet))
        run_once(parts.choice, parts.step)
        return parts  # with what it sends, until that has arrived

    with ThreadPoolExecutor(3) as pool:
        ranks = [done.result(timeout=60) for done in [pool.submit(warm_rank, rank) for rank in range(3)]]
    for parts in ranks:
        scratch = [parts.step.pool.layer(LocalLayerId(layer))[0][-1] for layer in range(len(parts.step.pool.geometry.layers))]
        assert scratch
        assert all(page.any() for page in scratch)


OF_ANY_COUNT = ("sort_pairs", "few_rows")  # of pairs, of rows


class Launches:
    """Stands in for Triton's interpreter: notes what would be compiled, and runs nothing."""

    def __init__(self) -> None:
        self.variants: set[tuple[object, ...]] = set()

    def run(self, kernel: Any, *args: Any, grid: object, warmup: bool, **settings: Any) -> None:
        """A variant is a kernel, its settings, and of each argument what the compiler specialises on."""
        anywhere = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
        facts = [*sorted(settings.items())]
        for name, each in zip(kernel.arg_names, args, strict=False):
            found = _specialised(each, by_value=kernel.__name__ not in OF_ANY_COUNT)
            facts.append(found[:1] if name in anywhere else found)
        self.variants.add((kernel.__name__, *map(str, facts)))
        if kernel.__name__ in ("best_of_blocks", "draw_cut_rows"):  # what they choose is an index later
            for each in args:
                if isinstance(each, torch.Tensor) and each.dtype is torch.int64:
                    each.zero_()


def _specialised(argument: object, *, by_value: bool) -> tuple[object, ...]:
    """by_value: not of kernels of which one variant serves every number."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return (type(argument), argument == 1, argument % 16 == 0) if isinstance(argument, int) and by_value else (type(argument),)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted where there is no CUDA device")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    noted = Launches()
    monkeypatch.setattr(
        interpreter.InterpretedFunction, "run", lambda kernel, *args, **settings: noted.run(kernel, *args, **settings)
    )
    return noted


def typical_batches(parts: BuiltParts, *, most: int, longest: int) -> Iterator[ForwardBatch]:
    """Prefills, decoding and mixed steps at random, some of whose requests begin alike, at any place in memory."""
    chance, geometry = random.Random(0), parts.step.pool.geometry
    for _ in range(150 if EVERYTHING else 60):
        phase = chance.choice([Phase.PREFILL, Phase.DECODE, Phase.MIXED])
        num_decode = 0 if phase is Phase.PREFILL else chance.choice([1, 2, 3, 17, 63, 64, most - 3])
        news = [] if phase is Phase.DECODE else [chance.choice([1, 3, 17, 100]) for _ in range(chance.randint(1, 3))]
        q_lens = [1] * num_decode + news
        most_cached = chance.choice([0, 20, longest - max(q_lens)])
        kv_lens = [new + chance.randint(most_cached // 2, most_cached) for new in q_lens]
        batch = dummy_batch(phase, q_lens=q_lens, kv_lens=kv_lens, geometry=geometry, device=torch.device("cpu"))
        batch.page_table_cpu.random_(0, geometry.num_pages)
        first, last = sorted(chance.choices(range(len(q_lens) + 1), k=2))
        batch.page_table_cpu[first:last, : chance.randint(0, longest // geometry.page_size)] = 7
        yield batch


KIMI = KimiLinearConfig(**{**HYBRIDS["kimi_linear"].to_dict(), "mlp_layer_types": ["dense"] * 4})
RECURRENT = {"kimi_dense": KIMI, "qwen3_5": HYBRIDS["qwen3_5"], "minimax": HYBRIDS["minimax"]}
RECURRENT |= {name: MAMBA[name] for name in ("jamba", "lfm2", "bamba")}


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek-v2", "mixtral", *spread(RECURRENT, 3)])
def test_after_it_no_kernel_that_a_batch_needs_is_new(family: str, launches: Launches, write_oracle: Callable[..., Oracle]) -> None:
    most, longest = 100, 512
    asked = options(
        write_oracle(family, (FAMILIES | EXPERT_FAMILIES | RECURRENT)[family]),
        dtype="bfloat16",
        attention_backend="triton",
        max_batch_requests=most,
        linear_attention_backend="delta" if family in RECURRENT else None,
    )
    parts = build_parts(asked, Registry.load())
    warm(parts, longest=longest)
    known = set(launches.variants)
    assert {"decode", "merge", "prefill"} <= {str(variant[0]) for variant in known}
    for batch in typical_batches(parts, most=most, longest=longest):
        planned = parts.step.relay.plan(batch)
        logits = parts.step.model.logits(parts.step.model.forward(planned)[: batch.num_requests])
        table = torch.rand(5, batch.num_requests)
        for values in (logits, logits.float()):
            parts.step.ops.greedy(values)
            parts.step.ops.draw_rows(values, SamplingTensors(table=table, most_kept=9, cut=False))
        assert not launches.variants - known, (batch.phase, batch.q_lens_cpu, batch.kv_lens_cpu)
    steps = DecodeCapture(parts.step, most, head=LogitsHead(parts.step, most), record=AgainAndAgain())
    graphs = DecodeGraphs.build(steps)
    assert graphs is not None
    for size in graphs.sizes:
        graphs.provide(DecodeKey(size, 1, followed=False))
    assert not launches.variants - known
