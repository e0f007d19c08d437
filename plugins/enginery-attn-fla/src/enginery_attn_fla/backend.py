"""The backend: as enginery-attn-delta, but for longer prefills of delta rules, in chunks. T tokens, HV value heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from enginery.api import Accepted, BackendContext, ForwardBatch, ForwardPlan, LayerSpec, covering_plan, hookimpl
from enginery_attn_delta.backend import DeltaAttention, convolve_rows, facts_of
from enginery_attn_delta.launch import Rows
from enginery_attn_delta.plan import DeltaPlan, Group, prompts_of
from enginery_attn_fla.chunks import Chunks, plan_chunks, run_chunks
from enginery_attn_fla.kernels import Kernels
from enginery_attn_fla.spec import FlaOptions

REQUESTS_OF_A_WAVE: Final = 8  # whose 32 heads of four programs each are what 132 multiprocessors run at once


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkedPlan(DeltaPlan):
    """of_prefill, of_rest: these rows as fla-core's kernels take them; None: there are none, or they run token by token."""

    of_prefill: Chunks | None
    of_rest: Chunks | None


class ChunkedAttention:
    """Recurrent layers of every rule. Implements `enginery.api.AttnBackend` and `Advances`."""

    def __init__(self, context: BackendContext, kernels: Kernels) -> None:
        self.backend_id = context.instance
        self.states = context.states
        self.device = context.device
        self.by_token = DeltaAttention(context)
        self.kernels = kernels
        self.options = context.options if isinstance(context.options, FlaOptions) else FlaOptions()

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ChunkedPlan:
        """The plan of `DeltaAttention`, with what prefills need besides."""
        planned = self.by_token.plan_forward_metadata(batch, capture)
        prefill, rest = (self._chunks_of(group) for group in prompts_of(batch))
        return ChunkedPlan(**vars(planned), of_prefill=prefill, of_rest=rest)

    def _chunks_of(self, group: Group) -> Chunks | None:
        """None where token by token takes less time: it has one wave of programs for every few requests."""
        waves = -(-len(group.lengths) // REQUESTS_OF_A_WAVE)
        return plan_chunks(group, self.device) if waves * group.lengths.max(initial=0) > self.options.by_token else None

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        """See `DeltaAttention`."""
        return self.by_token.init_graph_state(max_batch_size, max_num_tokens)

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        """See `DeltaAttention`."""
        return self.by_token.refresh_graph_metadata(plan, batch)

    def advance(
        self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: torch.Tensor
    ) -> None:
        """mixed: [T, C], gates: [T, G], out: [T, HV, V]. See `enginery.api.Advances`."""
        planned = covering_plan(plan, batch, ChunkedPlan, backend=self.backend_id)
        for rows in planned.leading:
            self.by_token.advance_rows(mixed, gates, layer, rows, out)
        self.by_token.keep(mixed, gates, layer, batch, planned)
        for part, chunks in ((planned.prefill, planned.of_prefill), (planned.rest, planned.of_rest)):
            if part is not None and chunks is not None and facts_of(layer)[0].rule == "delta":
                self._advance_chunks(mixed, gates, layer, part, chunks, out)
            elif part is not None:
                self.by_token.advance_rows(mixed, gates, layer, part, out, are_prompts=True)

    def _advance_chunks(
        self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, rows: Rows, chunks: Chunks, out: torch.Tensor
    ) -> None:
        states, (facts, weights), own = self.states.layer(layer.local_id), facts_of(layer), chunks.rows
        convolved = convolve_rows(mixed, layer, states, rows, out, dtype=mixed.dtype)
        out[own] = run_chunks(
            self.kernels,
            convolved[own],
            gates[own],
            facts,
            weights,
            chunks=chunks,
            matrix=states["matrix"],
            scale=layer.scale,
        )

    @hookimpl
    def commit_state(self, plan: ForwardPlan, accepted: Accepted) -> bool:
        """See `DeltaAttention`."""
        return self.by_token.commit_state(plan, accepted)
