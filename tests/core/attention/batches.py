"""Batches, a backend that only plans, and nothing else."""

from __future__ import annotations

import torch

from enginery.attention.axes import pad
from enginery.contracts.attention import AttnLayerFacts, KVGeometry, LayerSpec
from enginery.contracts.batch import FULL, STATE, ForwardBatch, Phase, StateView, View
from enginery.contracts.plan import ForwardPlan, PlanKey
from enginery.plugin.hookspecs import hookimpl


def make_batch(q_lens: list[int], *, phase: Phase = Phase.MIXED) -> ForwardBatch:
    """Requests of so many new tokens, each after three that are cached, with a page of sixteen for each."""
    total, count = sum(q_lens), len(q_lens)
    owner = torch.repeat_interleave(torch.arange(count), torch.tensor(q_lens, dtype=torch.int64))
    seats = torch.arange(count, dtype=torch.int32)
    return ForwardBatch(
        phase=phase,
        input_ids=torch.arange(100, 100 + total),
        positions=torch.cat([torch.arange(3, 3 + length) for length in q_lens]) if count else torch.zeros(0, dtype=torch.int64),
        q_lens_cpu=torch.tensor(q_lens, dtype=torch.int32),
        kv_lens_cpu=torch.tensor([length + 3 for length in q_lens], dtype=torch.int32),
        num_logits_cpu=torch.ones(count, dtype=torch.int32),
        seats_cpu=seats,
        views={
            FULL: View(slots=owner * 16 + 3, page_table_cpu=seats[:, None].repeat(1, 2)),
            STATE: StateView(reads_cpu=seats + 1, writes_cpu=seats + 2),
        },
    )


GEOMETRY = KVGeometry(
    pages={FULL: 8, STATE: 8},
    page_size=16,
    layers=(AttnLayerFacts(num_heads=1, num_kv_heads=1, head_dim=2),),
    dtype="float32",
    num_seats=8,
)


def nobody_of(num_tokens: int) -> ForwardBatch:
    """Rows of no request, as mixed steps are captured."""
    return pad(make_batch([]), num_requests=0, num_tokens=num_tokens, geometry=GEOMETRY)


class Planner:
    """Plans, and counts how often."""

    def __init__(self, backend_id: str = "planner#0", *, epoch: int = 0) -> None:
        self.backend_id = backend_id
        self.epoch = epoch
        self.num_plans = 0

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        self.num_plans += 1
        return ForwardPlan(key=PlanKey.of(batch, self.backend_id, epoch=self.epoch, capture=capture))

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
        raise AssertionError("only plans")
