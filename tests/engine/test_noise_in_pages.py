"""I10: what stands in pages that nobody has, and in scratch, changes no token."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from engine.test_kinds_at_random import CONFIGS, alone, assert_whatever_happens, small_memory
from engine.test_speculation import Scripted, with_drafter
from pairwise import EVERYTHING
from parity.engine_driver import RecordingModel, generate, options
from parity.oracle import Oracle

from enginery.contracts.batch import FULL, STATE, ForwardBatch, MemoryKind
from enginery.contracts.model import Model
from enginery.contracts.parallel import StageTensors
from enginery.contracts.request import RequestOutput
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.kv.pool import PagedKVPool
from enginery.kv.states import RecurrentStatePool
from enginery.plugin.registry import Registry

NOISY = [("qwen3_next", False), ("gemma2", True), ("kimi_linear", True), ("lfm2", False), ("qwen3_next", True), ("mamba2", True)]


def noted_pools(patch: pytest.MonkeyPatch) -> list[PagedKVPool | RecurrentStatePool]:
    """Those that are built from now on."""
    pools: list[PagedKVPool | RecurrentStatePool] = []
    for kind in (PagedKVPool, RecurrentStatePool):
        built = kind.__init__

        def noting(pool: object, *given: object, built: Callable[..., None] = built) -> None:
            built(pool, *given)
            pools.append(pool)  # type: ignore[arg-type]

        patch.setattr(kind, "__init__", noting)
    return pools


def stored_by_kind(pools: Sequence[PagedKVPool | RecurrentStatePool]) -> list[tuple[MemoryKind, tuple[torch.Tensor, ...]]]:
    """What each layer keeps: tensors of so many pages and some more."""
    stored = [
        (pool.geometry.kind_of(layer), pages)
        for pool in pools
        if isinstance(pool, PagedKVPool)
        for layer, pages in zip(pool.geometry.layers, pool._layers, strict=True)
    ]
    states = (states for pool in pools if isinstance(pool, RecurrentStatePool) for states in pool._layers if states)
    return stored + [(STATE, tuple(each.values())) for each in states]


@pytest.mark.parametrize(("name", "drafts"), NOISY if EVERYTHING else NOISY[:2])
def test_noise_in_pages_that_nobody_has_changes_nothing(
    write_oracle: Callable[..., Oracle], monkeypatch: pytest.MonkeyPatch, name: str, *, drafts: bool
) -> None:
    """Before each step all that is free of each kind, and its scratch, is overwritten; with guesses right by chance too."""
    oracle, registry, chance = write_oracle(f"random {name}", CONFIGS[name]), Registry.load(), random.Random(0)
    expected = alone(registry, oracle)
    small_memory(monkeypatch, windows=16)
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    pools = noted_pools(monkeypatch)
    asked = options(oracle, max_batch_requests=4, max_model_len=120, page_size=4, num_pages=32, max_batch_tokens=24)
    if drafts:
        scripted = Scripted("random", {prompt: list(tokens) for prompt, tokens in expected.items()})
        registry = with_drafter(registry, lambda _: scripted)
        asked = dataclasses.replace(asked, drafter="scripted", draft_length="3")
    engine = Engine.build(asked, registry)
    kv, step = engine._scheduler._kv, engine.step
    stored = stored_by_kind(pools)
    noise = {FULL: 0, **dict.fromkeys(kv.finite.allocators, 0)}

    def noisily() -> list[RequestOutput]:
        for kind, allocator in {FULL: kv.allocator, **kv.finite.allocators}.items():
            free = [*allocator._free, allocator.num_pages]  # the last is scratch
            noise[kind] += len(free) - 1
            for tensor in (tensor for own, tensors in stored if own == kind for tensor in tensors):
                tensor[free] = 1e4
        return step()

    monkeypatch.setattr(engine, "step", noisily)
    assert_whatever_happens(engine, chance, expected, turns=110)
    assert all(noise.values())
    assert {kind for kind, tensors in stored if tensors} >= set(kv.finite.allocators)


class Noting(RecordingModel):
    """Keeps the batches too."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.batches: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor | StageTensors:
        self.batches.append(batch)
        return super().forward(batch, arrived)


def test_who_begins_reads_the_page_of_zeros_which_nobody_writes_to(
    write_oracle: Callable[..., Oracle], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backends here begin from zeros without it; a plugin's may rely on what `StateView` says."""
    oracle, pools = write_oracle("random qwen3_next", CONFIGS["qwen3_next"]), noted_pools(monkeypatch)
    asked = options(oracle, page_size=4, max_batch_tokens=24)
    parts = build_parts(asked, registry)
    noting = Noting(parts.step.model)
    engine = Engine(dataclasses.replace(parts, step=parts.step._replace(model=noting)), registry, asked)
    for _ in range(2):
        generate(engine, oracle.prompts, max_tokens=3)
    zero_page, seen = parts.step.pool.geometry.zero_page, set[tuple[bool, bool]]()
    for batch in noting.batches:
        begins = batch.q_lens_cpu == batch.kv_lens_cpu
        seen |= {*zip(begins.tolist(), (batch.states.reads_cpu == zero_page).tolist(), strict=True)}
        assert zero_page not in batch.states.writes_cpu
    assert seen == {(True, True), (False, False)}
    states = [tensor for kind, tensors in stored_by_kind(pools) if kind == STATE for tensor in tensors]
    assert states
    assert not any(tensor[zero_page].any() for tensor in states)
