"""The backend: decoding, convolutions and graphs as in enginery-attn-delta, prefills in chunks. T tokens, HV value heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from enginery.api import Accepted, BackendContext, ForwardBatch, ForwardPlan, LayerSpec, covering_plan, hookimpl
from enginery_attn_delta.backend import DeltaAttention, convolve_rows, facts_of, recur_rows
from enginery_attn_delta.plan import DeltaPlan
from enginery_attn_fla.chunks import Chunks, can_chunk, chunk_places, run_chunks
from enginery_attn_fla.kernels import Kernels


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkedPlan(DeltaPlan):
    """chunks: the requests of `prefill`, as the chunked kernels take them."""

    chunks: Chunks | None


class ChunkedAttention:
    """Recurrent layers of every rule. Implements `enginery.api.AttnBackend` and `Advances`."""

    def __init__(self, context: BackendContext, kernels: Kernels) -> None:
        self.backend_id = context.instance
        self.states = context.states
        self.device = context.device
        self.by_token = DeltaAttention(context)
        self.kernels = kernels

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ChunkedPlan:
        """The plan of `DeltaAttention`, with what prefills need besides."""
        planned = self.by_token.plan_forward_metadata(batch, capture)
        chunks = None if planned.prefill is None else _plan_chunks(batch, self.device)
        return ChunkedPlan(**vars(planned), chunks=chunks)

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
        states, (facts, weights) = self.states.layer(layer.local_id), facts_of(layer)
        for rows in planned.leading:
            self.by_token.advance_rows(mixed, gates, layer, rows, out)
        self.by_token.keep(mixed, gates, layer, batch, planned)
        if planned.prefill is None or planned.chunks is None:
            return
        convolved = convolve_rows(mixed, layer, states, planned.prefill, out, dtype=mixed.dtype)
        if not can_chunk(facts):
            recur_rows(convolved, gates, layer, states, planned.prefill, out)
            return
        own = planned.chunks.rows
        out[own] = run_chunks(
            self.kernels,
            convolved[own],
            gates[own],
            facts,
            weights,
            chunks=planned.chunks,
            matrix=states["matrix"],
            scale=layer.scale,
        )

    @hookimpl
    def commit_state(self, plan: ForwardPlan, accepted: Accepted) -> bool:
        """See `DeltaAttention`."""
        return self.by_token.commit_state(plan, accepted)


def _plan_chunks(batch: ForwardBatch, device: torch.device) -> Chunks:
    """Of the requests behind those that decode; without those that have no tokens. One upload, from pinned memory."""
    first = batch.num_decode_requests
    q_lens, kv_lens = batch.q_lens_cpu[first:].numpy(), batch.kv_lens_cpu[first:].numpy()
    has_rows = q_lens > 0
    lengths, fresh = q_lens[has_rows], (q_lens == kv_lens)[has_rows]
    writes = batch.states.writes_cpu[first:].numpy()[has_rows]
    reads = np.where(fresh, writes, batch.states.reads_cpu[first:].numpy()[has_rows])  # a page that is there; it is cleared
    begin, first_rows = first * batch.decode_len, np.concatenate(([0], np.cumsum(lengths)))
    indices, offsets = chunk_places(lengths.astype(np.int64))
    parts = (first_rows, reads, writes, fresh, offsets, indices.reshape(-1))
    host = torch.empty(sum(len(part) for part in parts), dtype=torch.int64, pin_memory=device.type == "cuda")
    host.numpy()[:] = np.concatenate(parts)
    on_device = host.to(device, non_blocking=True).split_with_sizes([len(part) for part in parts])
    return Chunks(
        rows=slice(begin, begin + int(first_rows[-1])),
        first_rows=on_device[0],
        first_rows_cpu=torch.from_numpy(first_rows.astype(np.int64)),
        reads=on_device[1],
        writes=on_device[2],
        fresh=on_device[3].bool().view(-1, 1, 1, 1),
        indices=on_device[5].view(-1, 2),
        offsets=on_device[4],
    )
