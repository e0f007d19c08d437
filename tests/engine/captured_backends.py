"""The backends of plain torch, with decoding steps that can be captured: of softmax layers of every kind, and of recurrent ones.

What a captured plan reads is in buffers of the backend, which every captured plan shares. B requests of L rows, P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from offers import offering, op_offer, op_spec

from enginery.api import (
    Accepted,
    BackendContext,
    ExpertBiases,
    ExpertsFn,
    ExpertsShape,
    ForwardBatch,
    ForwardPlan,
    LayerSpec,
    MaskPart,
    OpSpec,
    Phase,
    PlanKey,
    Routed,
    StalePlan,
    StoredWeight,
    VerifyMask,
    covering_plan,
    hookimpl,
)
from enginery.nn.activation import gated
from enginery.nn.reference_ops import REFERENCE_SCHEMES
from enginery.nn.stored import one_expert, widen
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery_attn_linear.backend import LinearAttention
from enginery_attn_linear.plan import Checkpoints, DecodeGroup, LinearPlan, plan_group
from enginery_attn_torch.backend import TorchAttention
from enginery_attn_torch.plan import TorchPlan

MOST_POSITIONS = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedPlan(ForwardPlan):
    """pages: [B, P] int64, lengths: [B] int64, device. trees: [B, L, L] bool, device, the plan's own: which of its last keys a row
    sees; None: a chain."""

    pages: torch.Tensor
    lengths: torch.Tensor
    trees: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedPlan(ForwardPlan):
    """Of T rows. pages: [T, P] int64, positions: [T] int64, device; -1 of nobody's rows."""

    pages: torch.Tensor
    positions: torch.Tensor


class CapturedTorch(TorchAttention):
    """Attends captured batches densely, over all pages that a request may have."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.epoch, self.columns, self.device = -1, MOST_POSITIONS // context.geometry.page_size, context.device

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        self.pages = torch.zeros(max_batch_size, self.columns, dtype=torch.int64, device=self.device)
        self.lengths = torch.ones(max_batch_size, dtype=torch.int64, device=self.device)
        self.epoch += 1
        return True

    @hookimpl
    def init_mixed_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        self.row_pages = torch.zeros(max_num_tokens, self.columns, dtype=torch.int64, device=self.device)
        self.positions = torch.full((max_num_tokens,), -1, device=self.device)
        return True

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        if not capture:
            return super().plan_forward_metadata(batch, capture)
        key, count = PlanKey.of(batch, self.backend_id, epoch=self.epoch, capture=True), batch.num_requests
        if batch.phase is Phase.MIXED:
            rows = batch.num_tokens
            mixed = MixedPlan(key=key, pages=self.row_pages[:rows], positions=self.positions[:rows])
            self.refresh_graph_metadata(mixed, batch)
            return mixed
        trees = self.planner.trees(batch)
        plan = CapturedPlan(key=key, pages=self.pages[:count], lengths=self.lengths[:count], trees=trees)
        self.refresh_graph_metadata(plan, batch)
        return plan

    @hookimpl
    def verify_mask(self, plan: ForwardPlan) -> VerifyMask:
        assert isinstance(plan, CapturedPlan | TorchPlan), "it was planned here"
        assert plan.trees is not None, "it is asked of batches with trees"
        return VerifyMask(parts=(MaskPart(slice(0, len(plan.trees)), plan.trees),))

    @hookimpl
    def draft_steps_plan(self, batches: tuple[ForwardBatch, ...], capture: bool) -> tuple[ForwardPlan, ...]:
        return tuple(self.plan_forward_metadata(batch, capture) for batch in batches)

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        table = batch.page_table_cpu
        if plan.key.epoch != self.epoch:
            raise StalePlan(f"{plan.key} was captured before init_graph_state, which was called again")
        if isinstance(plan, MixedPlan):
            ends, counts = batch.kv_lens_cpu.tolist(), batch.q_lens_cpu
            positions = [place for end, count in zip(ends, counts.tolist(), strict=True) for place in range(end - count, end)]
            plan.positions.copy_(torch.tensor(positions + [-1] * (batch.num_tokens - len(positions))))
            each = table.repeat_interleave(counts.long(), 0)
            plan.pages[: len(each), : table.shape[1]].copy_(each)
            return True
        assert isinstance(plan, CapturedPlan), "it was captured"
        plan.pages[:, : table.shape[1]].copy_(table)
        plan.lengths.copy_(batch.kv_lens_cpu)
        return True

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
        if isinstance(plan, MixedPlan):
            self._attend_rows(q, layer, covering_plan(plan, batch, MixedPlan, backend=self.backend_id, epoch=self.epoch), out)
            return
        if not isinstance(plan, CapturedPlan):
            super().attend(q, k, v, layer, batch, plan, out)
            return
        plan = covering_plan(plan, batch, CapturedPlan, backend=self.backend_id, epoch=self.epoch)
        count, length, facts = batch.num_requests, batch.decode_len, layer.facts
        keys, values = (pages[plan.pages].flatten(1, 2).float() for pages in self._pages(layer))  # [B, K, heads, dim]
        grouped = q.float().view(count, length, facts.num_kv_heads, -1, q.shape[-1])
        scores = torch.einsum("bnkgd,blkd->bkgnl", grouped, keys) * layer.scale
        if facts.softcap is not None:
            scores = facts.softcap * torch.tanh(scores / facts.softcap)
        lengths = plan.lengths if batch.kv_lens is None else batch.kv_lens
        own = lengths[:, None] - 1 - torch.arange(length, device=self.device).flip(0)  # [B, L], the rows' positions
        places = torch.arange(keys.shape[1], device=self.device)
        seen = places <= own[:, :, None]
        if facts.sliding_window is not None:
            seen &= places > own[:, :, None] - facts.sliding_window
        if plan.trees is not None:
            behind = places - (lengths[:, None, None] - length)  # of the last keys, from the first on
            seen &= (behind < 0) | plan.trees.gather(2, behind.clamp(0, length - 1).expand_as(seen))
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.float().view(1, facts.num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        values = values.masked_fill(~seen.any(1)[:, :, None, None], 0.0)  # what nobody sees may be no number
        made = torch.einsum("bkgnl,blkd->bnkgd", weights, values)
        out.copy_(made.reshape(len(q), -1, made.shape[-1])[..., : facts.value_dim])

    def _attend_rows(self, q: torch.Tensor, layer: LayerSpec, plan: MixedPlan, out: torch.Tensor) -> None:
        """Each row densely over all pages that its request may have; zeros of nobody's."""
        facts, own = layer.facts, plan.positions
        keys, values = (pages[plan.pages].flatten(1, 2).float() for pages in self._pages(layer))  # [T, K, heads, dim]
        scores = torch.einsum("tkgd,tlkd->tkgl", q.float().view(len(q), facts.num_kv_heads, -1, q.shape[-1]), keys) * layer.scale
        if facts.softcap is not None:
            scores = facts.softcap * torch.tanh(scores / facts.softcap)
        places = torch.arange(keys.shape[1], device=self.device)
        seen = places <= own[:, None]
        if facts.sliding_window is not None:
            seen &= places > own[:, None] - facts.sliding_window
        scores = scores.masked_fill(~seen[:, None, None], -1e30)
        if layer.sinks is not None:
            sinks = layer.sinks.float().view(1, facts.num_kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        values = values.masked_fill(~seen[:, :, None, None], 0.0)  # what nobody sees may be no number
        out.copy_(torch.einsum("tkgl,tlkd->tkgd", weights, values).reshape(len(q), out.shape[1], -1)[..., : facts.value_dim])


class CapturedDecoding(CapturedTorch):
    """Attends mixed batches between graphs alone."""

    init_mixed_graph_state = None


class CaptureFails(CapturedTorch):
    """In the last that is captured when backends change."""

    @hookimpl
    def init_mixed_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        raise RuntimeError("no room")


class CapturedLinear(LinearAttention):
    """Each captured request has a place for a checkpoint, which is written to the scratch state where there is none."""

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        self.columns = torch.zeros(5, max_batch_size, dtype=torch.int64, device=self.device)
        self.every = torch.arange(max_batch_size, device=self.device)
        return True

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> LinearPlan:
        if not capture:
            return super().plan_forward_metadata(batch, capture)
        count = batch.num_requests
        reads, writes, fresh, pages, rows = self.columns[:, :count]
        group = DecodeGroup(
            size=count,
            length=batch.decode_len,
            reads=reads,
            writes=writes,
            fresh=fresh.view(torch.bool)[::8],  # the lowest byte of each
            checkpoints=Checkpoints(self.every[:count], pages, rows),
        )
        plan = LinearPlan(key=PlanKey.of(batch, self.backend_id, capture=True), group=group, parts=())
        self.refresh_graph_metadata(plan, batch)
        return plan

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        count, states, found = batch.num_requests, batch.states, plan_group(batch, batch.num_requests, torch.device("cpu"))
        scratch, none = torch.full((count,), self._scratch), torch.zeros(count, dtype=torch.int64)
        marks = (scratch, none) if states.checkpoints_cpu is None else (states.checkpoints_cpu, states.checkpoint_rows_cpu)
        pages = torch.where(marks[1] > 0, marks[0], scratch)
        self.columns[:, :count].copy_(torch.stack((found.reads, found.writes, found.fresh.long(), pages, marks[1].long())))
        return True

    @hookimpl
    def commit_state(self, plan: ForwardPlan, accepted: Accepted) -> bool:
        kept = self._unsettled.get(plan)
        done = super().commit_state(plan, accepted)
        if plan.key.capture and kept is not None:
            self._unsettled[plan] = kept  # for the next replay
        return done


def bind_experts(
    gate_up: torch.Tensor | StoredWeight,
    down: torch.Tensor | StoredWeight,
    shape: ExpertsShape,
    biases: ExpertBiases | None = None,
) -> ExpertsFn:
    """`OpTable.bind_experts` without waiting for a device: every expert on every row."""

    count = len(gate_up if isinstance(gate_up, torch.Tensor) else gate_up.values)
    first, second = (0, 0) if biases is None else (biases.gate_up[:, None], biases.down[:, None])  # [E, 1, columns]

    def weights(of: torch.Tensor | StoredWeight, dtype: torch.dtype) -> torch.Tensor:
        every = of if isinstance(of, torch.Tensor) else torch.stack([widen(one_expert(of, each), dtype) for each in range(count)])
        return every.transpose(1, 2)

    def hidden(x: torch.Tensor) -> torch.Tensor:
        return gated(torch.matmul(x, weights(gate_up, x.dtype)) + first, shape.activation)

    return every_expert(count, lambda x: torch.matmul(hidden(x), weights(down, x.dtype)) + second)


def bind_squared_experts(up: torch.Tensor, down: torch.Tensor) -> ExpertsFn:
    """The same of `OpTable.bind_squared_experts`."""
    return every_expert(len(up), lambda x: torch.matmul(torch.matmul(x, up.transpose(1, 2)).relu().square(), down.transpose(1, 2)))


def every_expert(count: int, answers: Callable[[torch.Tensor], torch.Tensor]) -> ExpertsFn:
    """answers: of all experts for all rows, [E, N, C]."""

    def experts(x: torch.Tensor, routed: Routed) -> torch.Tensor:
        is_own = routed.ids[:, :, None] == torch.arange(count, device=x.device)
        shares = (routed.weights[:, :, None] * is_own).sum(1).T[:, :, None]  # [E, N, 1]
        return (answers(x) * shares).sum(0).to(x.dtype)

    return experts


DENSE = {"bind_experts": bind_experts, "bind_squared_experts": bind_squared_experts}
EXPERTS = op_offer(op_spec(DENSE, name="dense", schemes=REFERENCE_SCHEMES))


def captured(registry: Registry, ops: Sequence[Offer[OpSpec]] = (EXPERTS,)) -> Registry:
    """The same with these backends, and with no other operations beside the references."""

    class Composed(Registry):
        def create_attn_backend(self, name: str, context: BackendContext) -> object:
            made = {"torch": CapturedTorch, "linear": CapturedLinear}.get(name)
            return registry.create_attn_backend(name, context) if made is None else made(context)

    composed = Composed(**{field.name: vars(registry)[field.name] for field in fields(registry)})
    return offering(composed, OpSpec, *ops)
