"""A backend whose decoding steps can be captured, and two that break that rule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from core.testing.good_backend import SPEC, GoodBackend

from enginery.api import Capabilities, ForwardBatch, ForwardPlan, Phase, PlanKey, covering_plan, hookimpl

CAN = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({"float32", "bfloat16"}),
    kv_dtypes=frozenset({"float32", "bfloat16"}),
    head_dims=frozenset({16, 64}),
    graphs=True,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedPlan(ForwardPlan):
    """pages: [B, P], lengths: [B], device: parts of the backend's buffers, which every captured plan shares.

    trees: [B, N, N] bool, device, the plan's own: which of its last keys each row sees; None: a chain.
    """

    pages: torch.Tensor
    lengths: torch.Tensor
    trees: torch.Tensor | None = None


class GraphBackend(GoodBackend):
    """Attends captured batches densely: every request over as many pages as the longest may have, `most_pages` if that is set."""

    most_pages: int | None = None

    init_mha_chunk_metadata = None
    commit_state = None  # it has softmax layers alone

    def __init__(self, context) -> None:
        super().__init__(context)
        self.max_pages = self.most_pages or context.geometry.num_pages
        self.pages = None
        self.lengths = None

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        self.pages = torch.zeros(max_batch_size, self.max_pages, dtype=torch.int64, device=self.device)
        self.lengths = torch.ones(max_batch_size, dtype=torch.int64, device=self.device)
        return True

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        if not capture and batch.kv_lens is None:
            return super().plan_forward_metadata(batch)
        count, pages, lengths = batch.num_requests, self.pages, self.lengths
        if not capture:
            pages, lengths = torch.zeros(count, self.max_pages, dtype=torch.int64), torch.ones(count, dtype=torch.int64)
        key = PlanKey.of(batch, self.backend_id, capture=capture)
        trees = self.room_for_trees(batch) if batch.trees else None
        plan = CapturedPlan(key=key, pages=pages[:count], lengths=lengths[:count], trees=trees)
        self.fill(plan, batch)
        return plan

    @hookimpl
    def draft_steps_plan(self, batches: tuple[ForwardBatch, ...], capture: bool) -> tuple[ForwardPlan, ...]:
        return tuple(self.plan_forward_metadata(batch, capture) for batch in batches)

    def fill(self, plan, batch) -> None:
        plan.pages[:, : batch.page_table_cpu.shape[1]].copy_(batch.page_table_cpu)
        plan.lengths.copy_(batch.kv_lens_cpu)

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        self.fill(plan, batch)
        return True

    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        if not isinstance(plan, CapturedPlan):
            super().attend(q, k, v, layer, batch, plan, out)
            return
        plan = covering_plan(plan, batch, CapturedPlan, backend=self.backend_id)
        count, length, heads = batch.num_requests, batch.decode_len, layer.facts.num_kv_heads
        keys, values = (pages[plan.pages].flatten(1, 2).float() for pages in self.pool.layer(layer.local_id))
        grouped = q.float().view(count, length, heads, -1, q.shape[-1])
        scores = torch.einsum("bnkgd,blkd->bnkgl", grouped, keys) * layer.scale
        lengths = plan.lengths if batch.kv_lens is None else batch.kv_lens
        ends = lengths[:, None] - torch.arange(length, device=self.device).flip(0)  # [B, rows of a request]
        places = torch.arange(keys.shape[1], device=self.device)
        seen = places < ends[:, :, None]
        if plan.trees is not None:
            behind = places - (lengths[:, None, None] - length)  # of the last keys, from the first on
            own = plan.trees.gather(2, behind.clamp(0, length - 1).expand_as(seen))
            seen &= (behind < 0) | own
        values = values.masked_fill(~seen.any(1)[:, :, None, None], 0.0)  # rows that pad may have written NaN where nobody looks
        weights = scores.masked_fill(~seen[:, :, None, None], float("-inf")).softmax(-1)
        out.copy_(torch.einsum("bnkgl,blkd->bnkgd", weights, values).reshape(out.shape))


class OfChains(GraphBackend):
    """Claims no trees of drafts."""

    verify_mask = None


class NeverRefreshes(GraphBackend):
    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        return True


class KeepsOldPages(GraphBackend):
    def fill(self, plan, batch) -> None:
        plan.lengths.copy_(batch.kv_lens_cpu)


class SyncsInAttend(GraphBackend):
    def seen(self, rows, keys, window):
        assert keys[-1].item() >= 0
        return super().seen(rows, keys, window)


class SyncsInPlanning(GraphBackend):
    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        assert batch.num_tokens == 0 or int(batch.positions.max()) >= 0
        return super().plan_forward_metadata(batch, capture)


class StaysNobodys(GraphBackend):
    """What it captures of mixed steps has no request for good."""

    @hookimpl
    def init_mixed_graph_state(self) -> bool:
        return True

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        return batch.phase is Phase.MIXED or super().refresh_graph_metadata(plan, batch)

    def attend(self, q, k, v, layer, batch, plan, out) -> None:
        if batch.phase is Phase.MIXED and isinstance(plan, CapturedPlan):
            out.zero_()
        else:
            super().attend(q, k, v, layer, batch, plan, out)


OFFERED = dataclasses.replace(SPEC, name="graphs", capabilities=CAN)
GRAPHS, NEVER_REFRESHES, KEEPS_OLD_PAGES, SYNCS_IN_ATTEND, SYNCS_IN_PLANNING, STAYS_NOBODYS = (
    (OFFERED, each) for each in (OfChains, NeverRefreshes, KeepsOldPages, SyncsInAttend, SyncsInPlanning, StaysNobodys)
)
