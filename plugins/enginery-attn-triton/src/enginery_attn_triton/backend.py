"""The backend: plans on the host, then runs at most three kernels a layer. T tokens, H query heads, K KV heads."""

from __future__ import annotations

import dataclasses

import torch

from enginery.api import (
    BackendContext,
    ForwardBatch,
    ForwardPlan,
    KVPiece,
    LayerSpec,
    MaskPart,
    Phase,
    PlanKey,
    StalePlan,
    Unsupported,
    VerifyMask,
    covering_plan,
    hookimpl,
)
from enginery_attn_triton.launch import Memory, Scores, run_decode, run_prefill
from enginery_attn_triton.mixed import MixedState
from enginery_attn_triton.plan import GraphState, Planner, TritonPlan
from enginery_attn_triton.ragged import RaggedAttention, TritonChunkPlan
from enginery_attn_triton.tiling import Device, LayerCuts


class TritonAttention:
    """MHA, GQA and MQA over pages, with sliding window, soft cap and sinks; MLA over pages and ragged; decoding steps in graphs.

    Requests of one token at the front of a batch are decoded, whatever the phase, and so are those whose drafts are verified.
    Implements `enginery.api.AttnBackend`.
    """

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = context.instance
        self.pool = context.pool
        self.arena = context.arena
        self.geometry = context.geometry
        facts, itemsize = Device.of(context.device), context.dtype.itemsize
        layers = context.geometry.layers
        kinds = [context.geometry.kind_of(layer) for layer in layers]
        self.cuts = LayerCuts(layers, itemsize=itemsize, device=facts, kinds=kinds)
        self.planner = Planner(cuts=self.cuts, page_size=context.geometry.page_size, device=context.device, facts=facts)
        latent = next((layer for layer in layers if layer.latent is not None), None)
        self.ragged = RaggedAttention(layer=latent, itemsize=itemsize, device=context.device, facts=facts)
        self.graphs: GraphState | None = None
        self.mixed: MixedState | None = None
        self.epoch = 0

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> TritonPlan:
        """Upload tables for this batch; of a plan that is captured, say where `refresh_graph_metadata` will write them."""
        key = PlanKey.of(batch, self.backend_id, epoch=self.epoch, capture=capture)
        workspace_bytes = self.cuts.of(batch.decode_len).workspace_bytes
        parts = self.arena.take("attention of split requests", workspace_bytes, may_move=True)
        if not capture:
            return TritonPlan(key=key, tables=self.planner.tables(batch), parts=parts, trees=self._room_for_trees(batch))
        if self.mixed is not None and batch.phase is Phase.MIXED:
            tables = self.mixed.tables(batch.num_tokens, batch.decode_len)
            self.mixed.refresh(batch)
            return TritonPlan(key=key, tables=tables, parts=parts)
        if self.graphs is None:
            raise Unsupported(f"{self.backend_id} captures steps after init_graph_state, which was not called")
        tables = self.graphs.tables(batch.num_requests, length=batch.decode_len, shares=batch.kv_lens is None)
        self.graphs.refresh(batch, page_size=self.geometry.page_size)
        return TritonPlan(key=key, tables=tables, parts=parts, trees=self._room_for_trees(batch))

    @hookimpl
    def verify_mask(self, plan: ForwardPlan) -> VerifyMask:
        """In the plan."""
        assert isinstance(plan, TritonPlan)
        assert plan.trees is not None, "it is asked of batches with trees"
        return VerifyMask(parts=(MaskPart(slice(0, len(plan.trees)), plan.trees),))

    def _room_for_trees(self, batch: ForwardBatch) -> torch.Tensor | None:
        """What the rows of the batch's trees will see: [requests, N, N] bool; None if it has none."""
        if not batch.trees:
            return None
        shape = (batch.num_decode_requests, batch.decode_len, batch.decode_len)
        return torch.empty(shape, dtype=torch.bool, device=self.planner.device)

    @hookimpl
    def draft_steps_plan(self, batches: tuple[ForwardBatch, ...], capture: bool) -> tuple[TritonPlan, ...] | None:
        """One set of tables, of the last and longest: what lies behind a step's lengths weighs nothing. None: they are exact."""
        if not batches or any(batch.kv_lens is None for batch in batches):
            return None
        last = self.plan_forward_metadata(batches[-1], capture)
        keys = (PlanKey.of(batch, self.backend_id, epoch=self.epoch, capture=capture) for batch in batches[:-1])
        return (*(dataclasses.replace(last, key=key) for key in keys), last)

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch, chunks: tuple[KVPiece, ...], disable_ragged: bool) -> TritonChunkPlan:
        """Cut the rows into tiles, for each piece."""
        key = PlanKey.of(batch, self.backend_id, epoch=self.epoch)
        return self.ragged.plan(batch, chunks, own=not disable_ragged, key=key)

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        """Take the memory that captured plans point into. Plans made before point elsewhere, and are not used any more."""
        self.epoch += self.graphs is not None
        self.graphs = GraphState(
            self.cuts,
            max_batch_size=max_batch_size,
            max_rows=max_num_tokens,
            num_pages=self.geometry.num_pages,
            device=self.planner.device,
        )
        return True

    @hookimpl
    def init_mixed_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        """Take the memory that captured steps of prompts point into."""
        self.epoch += self.mixed is not None
        num_pages = self.geometry.num_pages
        self.mixed = MixedState(self.planner, max_requests=max_batch_size, max_rows=max_num_tokens, num_pages=num_pages)
        return True

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        """Upload this batch's tables to where the captured plan has them."""
        if plan.key.epoch != self.epoch:
            raise StalePlan(f"the plan for {plan.key} points to memory of before it was taken anew, which is epoch {self.epoch}")
        if self.mixed is not None and plan.key.phase is Phase.MIXED:
            self.mixed.refresh(batch)
            return True
        if self.graphs is None or plan.key.num_requests != batch.num_requests:
            raise StalePlan(f"the plan to refresh was made for {plan.key}, and the batch has {batch.num_requests} requests")
        self.graphs.refresh(batch, page_size=self.geometry.page_size)
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
        """See `enginery.api.Attends`. Keys and values are read from the pool, where the step's own are too."""
        planned = covering_plan(plan, batch, TritonPlan, backend=self.backend_id, epoch=self.epoch)
        cut, tables = self.cuts.of(batch.decode_len).layers[layer.local_id], planned.tables
        assert cut is not None, "a recurrent layer has no pages"
        keys, values = self.pool.layer(layer.local_id)
        memory = Memory(k=keys, v=values, pages=tables.pages)
        facts = layer.facts
        scores = Scores(scale=layer.scale, softcap=facts.softcap, window=facts.sliding_window, sinks=layer.sinks)
        if cut.decode in tables.decode:
            run_decode(
                q,
                memory,
                out,
                cut=cut,
                split=tables.decode[cut.decode],
                parts=planned.parts,
                scores=scores,
                lengths=batch.kv_lens,
                trees=planned.trees,
            )
        if tiles := tables.prefill.get((cut.dims, facts.sliding_window)):
            run_prefill(q, memory, out, cut=cut, tiles=tiles, parts=planned.parts, scores=scores)
