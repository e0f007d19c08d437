"""The backend: plans on the host, then attends group by group and request by request.

T tokens, H query heads, K KV heads, G = H / K, D head dim, V value dim.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from enginery.api import (
    BackendContext,
    ForwardBatch,
    ForwardPlan,
    KVPiece,
    LayerSpec,
    MaskPart,
    PlanKey,
    VerifyMask,
    covering_plan,
    hookimpl,
)
from enginery_attn_torch.kernels import explicit, fused
from enginery_attn_torch.plan import DecodeGroup, Planner, RequestPart, TorchPlan, visible
from enginery_attn_torch.ragged import RaggedAttention, TorchChunkPlan


class TorchAttention:
    """MHA, GQA and MQA over pages, with sliding window, soft cap and sinks; MLA over pages and ragged.

    Implements `enginery.api.AttnBackend`.
    """

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = context.instance
        self.pool = context.pool
        windows = tuple({layer.sliding_window for layer in context.geometry.layers})
        self.planner = Planner(page_size=context.geometry.page_size, windows=windows, device=context.device)
        self.ragged = RaggedAttention(device=context.device)

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> TorchPlan:
        """Decide what each request reads. Several decoding requests become one padded group; see `TorchPlan`."""
        q_lens = batch.q_lens_cpu.tolist()
        num_decode = batch.num_decode_requests if batch.decode_len == 1 else 0
        grouped = num_decode if num_decode > 1 or batch.kv_lens is not None else 0
        starts = itertools.accumulate(q_lens, initial=0)
        trees = self.planner.trees(batch)
        parts = [
            self.planner.part(batch, row, start=start, tree=None if trees is None or row >= len(trees) else trees[row])
            for row, (start, q_len) in enumerate(zip(starts, q_lens, strict=False))
            if row >= grouped and q_len
        ]
        key = PlanKey.of(batch, self.backend_id, capture=capture)
        return TorchPlan(key=key, group=self.planner.group(batch, grouped) if grouped else None, parts=tuple(parts), trees=trees)

    @hookimpl
    def verify_mask(self, plan: ForwardPlan) -> VerifyMask:
        """In the plan."""
        assert isinstance(plan, TorchPlan)
        assert plan.trees is not None, "it is asked of batches with trees"
        return VerifyMask(parts=(MaskPart(slice(0, len(plan.trees)), plan.trees),))

    @hookimpl
    def draft_steps_plan(self, batches: tuple[ForwardBatch, ...], capture: bool) -> tuple[TorchPlan, ...]:
        """Each alone: what is behind the lengths that the device alone knows is masked when they are attended."""
        return tuple(self.plan_forward_metadata(batch, capture) for batch in batches)

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch, chunks: tuple[KVPiece, ...], disable_ragged: bool) -> TorchChunkPlan:
        """Decide which rows see which of the keys that will be given."""
        return self.ragged.plan(batch, chunks, own=not disable_ragged, key=PlanKey.of(batch, self.backend_id))

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
        planned = covering_plan(plan, batch, TorchPlan, backend=self.backend_id)
        if planned.group is not None:
            self._attend_group(q, planned.group, layer, out, kv_lens=batch.kv_lens)
        for part in planned.parts:
            self._attend_part(q, part, layer, out)

    def _attend_group(
        self, q: torch.Tensor, group: DecodeGroup, layer: LayerSpec, out: torch.Tensor, *, kv_lens: torch.Tensor | None
    ) -> None:
        size, kv_heads, dim = group.size, layer.facts.num_kv_heads, layer.facts.head_dim
        window = layer.facts.sliding_window
        if kv_lens is None:
            seen = group.masks[window]  # [B, L]
        else:
            keys = torch.arange(group.pages.shape[1] * self.planner.page_size, device=group.pages.device)
            seen = visible(keys, kv_lens[:size, None].long() - 1, window)
        k, v = (
            self._gather(pages, group.pages.view(-1))
            .view(size, -1, kv_heads, pages.shape[-1])
            .to(q.dtype)
            .masked_fill_(~seen[..., None, None], 0)  # a page's rest is another's, and what is no number stays none times zero
            .transpose(1, 2)
            for pages in self._pages(layer)
        )
        grouped = q[:size].view(size, kv_heads, -1, 1, dim)  # [B, K, G, 1, D]
        mask = seen[:, None]  # [B, 1, L]
        attended = _attention(grouped, k, v, mask=mask, causal=False, layer=layer)  # [B, K, G, 1, V]
        out[:size] = attended.reshape(size, -1, attended.shape[-1])[..., : layer.facts.value_dim]

    def _attend_part(self, q: torch.Tensor, part: RequestPart, layer: LayerSpec, out: torch.Tensor) -> None:
        k, v = (self._in_one_piece(pages, part).to(q.dtype) for pages in self._pages(layer))  # [1, K, L, D or V]
        kv_heads, dim = layer.facts.num_kv_heads, layer.facts.head_dim
        num_queries = part.stop - part.start
        rows = q[part.start : part.stop].view(1, num_queries, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)  # [1, K, G, S, D]
        mask = part.masks[layer.facts.sliding_window]
        if part.tree is not None:
            mask = F.pad(part.tree, (part.kv_len - num_queries, 0), value=True)
        seen = None if mask is None else mask[None]
        attended = _attention(rows, k, v, mask=seen, causal=part.causal, layer=layer)
        whole = attended.permute(0, 3, 1, 2, 4).reshape(num_queries, -1, attended.shape[-1])  # [S, H, V]
        out[part.start : part.stop] = whole[..., : layer.facts.value_dim]

    def _pages(self, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [.., D] and values [.., V]. Latents serve as both, V is D: what is beyond the value is cut off at the end."""
        keys, values = self.pool.layer(layer.local_id)
        return keys, values if layer.facts.latent is None else keys

    @staticmethod
    def _gather(pages: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """[num_pages, page_size, K, D], [P] -> [P * page_size, K, D]. Torch copies whole pages as rows fastest."""
        rows = pages.view(pages.shape[0], -1).index_select(0, wanted)
        return rows.view(-1, *pages.shape[2:])

    def _in_one_piece(self, pages: torch.Tensor, part: RequestPart) -> torch.Tensor:
        """A view where the request's pages follow each other, else a copy: [1, K, L, D]."""
        if part.first_slot is not None:
            tokens = pages.view(-1, *pages.shape[2:])[part.first_slot : part.first_slot + part.kv_len]
        else:
            tokens = self._gather(pages, part.pages)[: part.kv_len]
        return tokens.transpose(0, 1)[None]


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None, causal: bool, layer: LayerSpec
) -> torch.Tensor:
    softcap, sinks = layer.facts.softcap, layer.sinks
    if softcap is None and sinks is None:
        return fused(q, k, v, mask=mask, causal=causal, scale=layer.scale)
    return explicit(q, k, v, mask=mask, causal=causal, scale=layer.scale, softcap=softcap, sinks=sinks)
