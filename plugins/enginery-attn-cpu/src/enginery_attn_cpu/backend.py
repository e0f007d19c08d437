"""The backend: a plan is the addresses of the batch's host tensors, and `attend` is one call of the compiled kernels.

B requests, T tokens, H query heads, D head dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from enginery.api import (
    BackendContext,
    ForwardBatch,
    ForwardPlan,
    LayerSpec,
    LocalLayerId,
    PlanKey,
    Unsupported,
    covering_plan,
    hookimpl,
)
from enginery_attn_cpu import native_part

TYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True, kw_only=True, eq=False)
class CpuPlan(ForwardPlan):
    """numbers: the kernel's first arguments, addresses among them; kept: the tensors that these are of."""

    numbers: tuple[int, ...]
    kept: tuple[torch.Tensor, ...]


class CpuAttention:
    """MHA, GQA and MQA of decoding rows over pages, one or several a request. Implements `enginery.api.AttnBackend`."""

    def __init__(self, context: BackendContext) -> None:
        """Raises `Unsupported` without the compiled part."""
        if native_part.kernels is None:
            raise Unsupported(f"enginery-attn-cpu was installed without its compiled part: {native_part.why_absent}")
        self.backend_id = context.instance
        self.pool = context.pool
        self.kernels = native_part.kernels
        geometry = context.geometry
        softmax = [layer for layer in geometry.layers if layer.recurrent is None and layer.latent is None]
        self.partial_size = max((layer.num_heads * (layer.value_dim + 2) for layer in softmax), default=0)
        self.layers = [
            self._numbers(LocalLayerId(index), geometry.page_size) if layer in softmax else ()
            for index, layer in enumerate(geometry.layers)
        ]

    def _numbers(self, layer: LocalLayerId, page_size: int) -> tuple[int, ...]:
        """The kernel's arguments about a layer's memory, which stays where it is."""
        facts, (keys, values) = self.pool.geometry.layers[layer], self.pool.layer(layer)
        sizes = (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.value_dim, facts.sliding_window or 0)
        return (keys.data_ptr(), values.data_ptr(), TYPES[keys.dtype], keys.shape[0], page_size, *sizes)

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> CpuPlan:
        """Nothing is computed but how much memory the parts of long requests take: the kernel cuts its work itself."""
        q_lens, kv_lens, table = (
            each if each.stride(-1) == 1 else each.contiguous()
            for each in (batch.q_lens_cpu, batch.kv_lens_cpu, batch.page_table_cpu)
        )
        lens = (batch.num_requests, q_lens.data_ptr(), kv_lens.data_ptr())
        count = self.kernels.count_partials(*lens)
        partials = torch.empty(count * self.partial_size, dtype=torch.float32)
        numbers = (*lens, table.data_ptr(), table.stride(0), partials.data_ptr(), torch.get_num_threads())
        key = PlanKey.of(batch, self.backend_id, capture=capture)
        return CpuPlan(key=key, numbers=numbers, kept=(q_lens, kv_lens, table, partials))

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
        """See `AttnBackend.attend`. Keys and values are read from the pool, where the step's own are too."""
        planned = covering_plan(plan, batch, CpuPlan, backend=self.backend_id)
        (q_row, q_head, q_step), (out_row, out_head, out_step) = q.stride(), out.stride()
        if not q_step == out_step == 1:
            raise Unsupported(f"{self.backend_id} takes heads whose numbers are adjacent, not strides {q.stride()}, {out.stride()}")
        self.kernels.attend(
            *planned.numbers,
            *self.layers[layer.local_id],
            TYPES[q.dtype],
            q.data_ptr(),
            q_row,
            q_head,
            out.data_ptr(),
            out_row,
            out_head,
            0 if layer.sinks is None else layer.sinks.data_ptr(),
            layer.facts.softcap or 0.0,
            layer.scale,
        )
