"""What the hooks cost a step: planning through the deepest nest of composites, with and without pluggy between them.

    micro-batches ( hybrid ( split ( mla ( leaf ), mla ( leaf ) ), leaf ) )

The leaves plan nothing. The cost of the hooks is the time through the relays less that of the same calls made directly; what is
left is the cutting of the batch.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from enginery.attention.latent import LatentAttention, LatentSettings
from enginery.attention.layer_kinds import LayerKinds
from enginery.attention.micro_batches import MicroBatches
from enginery.attention.phase_split import PhaseSplit
from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import AttnLayerFacts, Capabilities, KVGeometry, LatentFacts, LayerSpec
from enginery.contracts.batch import FULL, STATE, ForwardBatch, Phase, StateView, View
from enginery.contracts.latent import ChunkPlan, PrefillStrategy
from enginery.contracts.plan import ForwardPlan, PlanKey
from enginery.kv.pool import PagedKVPool
from enginery.plugin.hookspecs import hookimpl

_LAYER: Final = AttnLayerFacts(
    num_heads=1, num_kv_heads=1, head_dim=24, latent=LatentFacts(rank=16, rope_dim=8, nope_dim=16, value_dim=16)
)
_CAPABILITIES: Final = Capabilities(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({"float32"}),
    kv_dtypes=frozenset({"float32"}),
    mla=True,
    mla_ragged=True,
    lse_base="e",
)
_STEPS: Final = {"decode": (Phase.DECODE, [1] * 64), "mixed": (Phase.MIXED, [1] * 48 + [32] * 4)}


class NullLeaf:
    """Reads what planning reads, plans at no cost and attends nothing."""

    def __init__(self, number: int) -> None:
        self.backend_id = f"null#{number}"

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        _read_host(batch)
        return ForwardPlan(key=PlanKey.of(batch, self.backend_id, capture=capture))

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch, chunks: tuple[object, ...], disable_ragged: bool) -> ChunkPlan:
        _read_host(batch)
        return ChunkPlan(key=PlanKey.of(batch, self.backend_id), attend=lambda q, k, v, layer, piece, out, lse: None)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        plan: ForwardPlan,
        out: torch.Tensor,
    ) -> None:
        """Write nothing."""


def _read_host(batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
    """What the planning of a leaf reads, which has one view: a part's fields are cut when they are read."""
    (view,) = batch.views.values()
    of_view = (view.page_table_cpu,) if isinstance(view, View) else (view.reads_cpu, view.writes_cpu)
    return batch.q_lens_cpu, batch.kv_lens_cpu, *of_view


class DirectRelay(BackendRelay):
    """Calls the backend with everything: what a nest would cost if its children took all arguments and had all hooks."""

    def make_plan(self, batch: ForwardBatch, *, capture: bool) -> ForwardPlan:
        """Plan like `BackendRelay.make_plan`, without a hook and without checks."""
        return self.backend.plan_forward_metadata(batch, capture)


def deepest_nest(relay: Callable[[Any, str], BackendRelay]) -> BackendRelay:
    """Every composite that a served model can have, in each other; `relay` registers each backend."""
    geometry = KVGeometry(pages={FULL: 1}, page_size=16, layers=(_LAYER,), dtype="float32")
    pool = PagedKVPool(geometry, torch.device("cpu"))
    settings = LatentSettings(strategy=PrefillStrategy.ONE_SHOT, chunk_tokens=1024)

    def mla(number: int) -> BackendRelay:
        leaf = relay(NullLeaf(number), "bench")
        return relay(LatentAttention(leaf, capabilities=_CAPABILITIES, geometry=geometry, pool=pool, settings=settings), "bench")

    split = relay(PhaseSplit(prefill=mla(0), decode=mla(1)), "bench")
    hybrid = relay(LayerKinds(full=split, state=relay(NullLeaf(2), "bench")), "bench")
    return relay(MicroBatches(hybrid), "bench")


def measure_hooks(*, repeats: int = 2000) -> dict[str, dict[str, float]]:
    """For each kind of step: microseconds to plan it through the relays and directly, and the difference. Medians."""
    relays = {"through_hooks_us": deepest_nest(BackendRelay), "directly_us": deepest_nest(DirectRelay)}
    measured = {}
    for step, (phase, q_lens) in _STEPS.items():
        taken: dict[str, list[float]] = {name: [] for name in relays}
        gc.disable()
        for _ in range(repeats):
            for name, nest in relays.items():
                batch = _batch(phase, q_lens)
                began = time.perf_counter()
                nest.plan(batch)
                taken[name].append((time.perf_counter() - began) * 1e6)
        gc.enable()
        medians = {name: statistics.median(times) for name, times in taken.items()}
        measured[step] = {**medians, "hooks_us": medians["through_hooks_us"] - medians["directly_us"]}
    return measured


def _batch(phase: Phase, q_lens: list[int]) -> ForwardBatch:
    count, total = len(q_lens), sum(q_lens)
    seats = torch.arange(count, dtype=torch.int32)
    return ForwardBatch(
        phase=phase,
        input_ids=torch.zeros(total, dtype=torch.int64),
        positions=torch.zeros(total, dtype=torch.int64),
        q_lens_cpu=torch.tensor(q_lens, dtype=torch.int32),
        kv_lens_cpu=torch.tensor(q_lens, dtype=torch.int32) + 15,
        num_logits_cpu=torch.ones(count, dtype=torch.int32),
        seats_cpu=seats,
        views={
            FULL: View(slots=torch.zeros(total, dtype=torch.int64), page_table_cpu=torch.zeros(count, 4, dtype=torch.int32)),
            STATE: StateView(reads_cpu=seats, writes_cpu=seats),
        },
    )
