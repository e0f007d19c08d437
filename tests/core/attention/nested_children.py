"""A child that answers every hook, and composites over it."""

from __future__ import annotations

from typing import Any

import torch
from core.attention.batches import Planner

from enginery.attention.layer_kinds import LayerKinds
from enginery.attention.phase_split import PhaseSplit
from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import (
    AttnLayerFacts,
)
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.plan import (
    Accepted,
    ForwardPlan,
    IndexerPart,
    IndexerPlan,
    MaskPart,
    VerifyMask,
    covering_plan,
)
from enginery.plugin.hookspecs import hookimpl

SOFTMAX = AttnLayerFacts(num_heads=2, num_kv_heads=2, head_dim=8)


class Child(Planner):
    """Answers every optional hook and remembers what it was asked with. A plan that is not its own for that batch is refused."""

    def __init__(self, backend_id: str) -> None:
        super().__init__(backend_id)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def _answer(self, hook: str, **arguments: Any) -> Any:
        self.asked.append((hook, arguments))
        return (self.backend_id, hook)

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch, chunks: tuple[object, ...], disable_ragged: bool) -> Any:
        return self._answer("init_mha_chunk_metadata", batch=batch, chunks=chunks, disable_ragged=disable_ragged)

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        return bool(self._answer("init_graph_state", max_batch_size=max_batch_size, max_num_tokens=max_num_tokens))

    @hookimpl
    def init_mixed_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        return bool(self._answer("init_mixed_graph_state", max_batch_size=max_batch_size, max_num_tokens=max_num_tokens))

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        return bool(self._answer("refresh_graph_metadata", plan=plan, batch=batch))

    @hookimpl
    def device_prologue(self, plan: ForwardPlan) -> bool:
        assert plan.key.backend == self.backend_id
        return bool(self._answer("device_prologue", plan=plan))

    @hookimpl
    def verify_mask(self, plan: ForwardPlan) -> VerifyMask:
        assert plan.key.backend == self.backend_id
        self._answer("verify_mask", plan=plan)
        return VerifyMask(parts=(MaskPart(slice(0, plan.key.num_requests), torch.zeros(plan.key.num_requests, 1, 1)),))

    @hookimpl
    def commit_state(self, plan: ForwardPlan, accepted: Accepted) -> bool:
        assert plan.key.num_requests == len(accepted.counts)
        return bool(self._answer("commit_state", plan=plan, accepted=accepted))

    @hookimpl
    def indexer_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> IndexerPlan:
        covering_plan(plan, batch, ForwardPlan, backend=self.backend_id)
        self._answer("indexer_metadata", plan=plan, batch=batch)
        rows = torch.zeros(batch.num_tokens, dtype=torch.int32)
        return IndexerPlan(parts=(IndexerPart(slice(0, batch.num_tokens), batch.page_table_cpu, rows, rows),))


def relay(backend: object) -> BackendRelay:
    return BackendRelay(backend, "a test")


def split(prefill: object, decode: object, single: object | None = None) -> BackendRelay:
    third = None if single is None else relay(single)
    return relay(PhaseSplit(prefill=relay(prefill), decode=relay(decode), single=third))


def hybrid(softmax: object, recurrent: object) -> BackendRelay:
    return relay(LayerKinds(full=relay(softmax), state=relay(recurrent)))
