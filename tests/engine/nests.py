"""Backends in composites over one small memory, and the steps they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from enginery.attention.latent import LatentAttention, LatentSettings
from enginery.attention.layer_kinds import LayerKinds
from enginery.attention.micro_batches import MicroBatches
from enginery.attention.phase_split import PhaseSplit
from enginery.attention.relay import BackendRelay
from enginery.attention.watch import Watch
from enginery.contracts.attention import (
    AttnLayerFacts,
    BackendContext,
    Capabilities,
    GlobalLayerId,
    KVGeometry,
    LatentFacts,
    LatentWeights,
    LayerSpec,
    LocalLayerId,
)
from enginery.contracts.batch import FULL, STATE, ForwardBatch, Phase, StateView, View
from enginery.contracts.latent import PrefillStrategy
from enginery.contracts.memory import RecurrentFacts, RecurrentWeights
from enginery.kv.arena import DeviceArena
from enginery.kv.pool import PagedKVPool
from enginery.kv.states import RecurrentStatePool
from enginery.plugin.registry import Registry

CPU = torch.device("cpu")
PAGE_SIZE = 4
HEADS = 4
GROUPED = AttnLayerFacts(num_heads=HEADS, num_kv_heads=2, head_dim=8)
LATENT = AttnLayerFacts(
    num_heads=HEADS, num_kv_heads=1, head_dim=24, latent=LatentFacts(rank=16, rope_dim=8, nope_dim=12, value_dim=10)
)
RULE = RecurrentFacts(rule="linear", decay="head", key_heads=2, value_heads=HEADS, key_dim=8, value_dim=6)
RECURRENT = AttnLayerFacts(num_heads=2, num_kv_heads=2, head_dim=8, recurrent=RULE)
STEPS = {
    "decode": (Phase.DECODE, [(9, 1), (1, 1), (17, 1)]),
    "prefill": (Phase.PREFILL, [(0, 5), (8, 7), (0, 1)]),
    "mixed": (Phase.MIXED, [(9, 1), (3, 1), (12, 6), (0, 9)]),
    "one": (Phase.DECODE, [(6, 1)]),
}


@dataclass
class Memory:
    """Pools with a random past; two of the same seed are equal."""

    softmax: AttnLayerFacts
    strategy: PrefillStrategy | None = None
    registry: Registry = field(default_factory=Registry.load)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.geometry = KVGeometry(
            pages={FULL: 64, STATE: 8}, page_size=PAGE_SIZE, layers=(self.softmax, RECURRENT), dtype="float32", num_seats=8
        )
        self.pool = PagedKVPool(self.geometry, CPU)
        self.states = RecurrentStatePool(self.geometry, CPU)
        for values in (*self.pool.layer(LocalLayerId(0)), *self.states.layer(LocalLayerId(1)).values()):
            values.copy_(torch.randn(values.shape, generator=generator))
        latent = self.softmax.latent
        kv_b = None if latent is None else torch.randn(HEADS, latent.nope_dim + latent.value_dim, latent.rank, generator=generator)
        self.layers = [
            LayerSpec(
                global_id=GlobalLayerId(7 + index),
                local_id=LocalLayerId(index),
                facts=facts,
                scale=0.3,
                latent=None if kv_b is None or index else LatentWeights(kv_b=kv_b),
                recurrent=RecurrentWeights(a_log=torch.zeros(HEADS)) if facts.recurrent is not None else None,
            )
            for index, facts in enumerate(self.geometry.layers)
        ]

    def leaf(self, name: str = "torch", number: int = 0) -> BackendRelay:
        context = BackendContext(
            instance=f"{name}#{number}",
            geometry=self.geometry,
            pool=self.pool,
            states=self.states,
            device=CPU,
            dtype=torch.float32,
            arena=DeviceArena(CPU),
        )
        return BackendRelay(self.registry.create_attn_backend(name, context), name, watch=Watch())

    def mla(self, child: BackendRelay) -> BackendRelay:
        capabilities = Capabilities(
            devices=frozenset(), dtypes=frozenset(), kv_dtypes=frozenset(), mla=True, mla_ragged=True, lse_base="e"
        )
        chunk_tokens = 64 if self.strategy is PrefillStrategy.ONE_SHOT else 8
        settings = LatentSettings(strategy=self.strategy, chunk_tokens=chunk_tokens)
        return over(LatentAttention(child, capabilities=capabilities, geometry=self.geometry, pool=self.pool, settings=settings))

    def wrap(self, kind: str, child: Callable[[], BackendRelay]) -> BackendRelay:
        """A composite of that kind over what `child` makes."""
        wrappers: dict[str, Callable[[], BackendRelay]] = {
            "split": lambda: over(PhaseSplit(prefill=child(), decode=child())),
            "hybrid": lambda: over(LayerKinds(full=child(), state=self.leaf("linear"))),
            "micro": lambda: over(MicroBatches(child())),
            "mla": lambda: self.mla(child()),
        }
        return wrappers[kind]()

    def batch(self, phase: Phase, lengths: list[tuple[int, int]]) -> ForwardBatch:
        """Requests of (cached, new) tokens, each on pages of its own, far apart."""
        q_lens = torch.tensor([new for _, new in lengths], dtype=torch.int32)
        kv_lens = torch.tensor([cached + new for cached, new in lengths], dtype=torch.int32)
        pages = torch.stack([torch.arange(row, 64, 8, dtype=torch.int32) for row in range(len(lengths))])
        positions = torch.cat([torch.arange(cached, cached + new) for cached, new in lengths])
        owner = torch.repeat_interleave(q_lens.long())
        seats = torch.arange(len(lengths), dtype=torch.int32)
        return ForwardBatch(
            phase=phase,
            input_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=positions,
            q_lens_cpu=q_lens,
            kv_lens_cpu=kv_lens,
            num_logits_cpu=torch.ones_like(q_lens),
            seats_cpu=seats,
            views={
                FULL: View(
                    slots=pages[owner, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE, page_table_cpu=pages
                ),
                STATE: StateView(reads_cpu=7 - seats, writes_cpu=seats),
            },
        )

    def attend(self, relay: BackendRelay, batch: ForwardBatch, layer: LayerSpec) -> torch.Tensor:
        """Write random keys and values of the step, and attend; of a recurrent layer, advance: [T, H, V]."""
        generator = torch.Generator().manual_seed(6)
        facts, count = layer.facts, batch.num_tokens
        assert batch.plan is not None
        if facts.recurrent is not None:
            mixed = torch.randn(count, facts.recurrent.mixed_width, generator=generator)
            out = torch.full((count, HEADS, facts.value_dim), 7.0)
            relay.advance(mixed, torch.randn(count, HEADS, generator=generator), layer, batch, batch.plan, out)
            return out
        q_dim, v_dim = facts.head_dim, facts.value_dim
        if facts.latent is not None:
            q_dim, v_dim = facts.latent.nope_dim + facts.latent.rope_dim, facts.latent.value_dim
        q = torch.randn(count, HEADS, q_dim, generator=generator)
        k = torch.randn(count, facts.num_kv_heads, facts.head_dim, generator=generator)
        v = torch.randn(count, facts.num_kv_heads, facts.value_dim, generator=generator)
        self.pool.write(layer.local_id, k, v, batch.slots_for(layer))
        out = torch.full((count, HEADS, v_dim), 7.0)
        relay.attend(q, k, v, layer, batch, batch.plan, out)
        return out


def over(backend: object) -> BackendRelay:
    return BackendRelay(backend, "a test", watch=Watch())


def run(memory: Memory, relay: BackendRelay, step: str, layer: int) -> torch.Tensor:
    """One step of `STEPS` through one layer."""
    batch = relay.plan(memory.batch(*STEPS[step]))
    return memory.attend(relay, batch, memory.layers[layer])
