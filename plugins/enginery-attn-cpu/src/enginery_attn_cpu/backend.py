"""The backend: a plan is the addresses of the batch's host tensors, and `attend` is one call of the compiled kernels.

A captured plan has the addresses of tables that all captured plans share; `refresh_graph_metadata` copies a batch's over them.

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
    MaskPart,
    PlanKey,
    StalePlan,
    Unsupported,
    VerifyMask,
    covering_plan,
    hookimpl,
)
from enginery_attn_cpu import native_part

TYPES = {torch.float32: 0, torch.bfloat16: 1}
MOST_TREE_ROWS = 127  # so that a row sees a key in each chunk of 128 before its own


@dataclass(frozen=True, kw_only=True, eq=False)
class CpuPlan(ForwardPlan):
    """numbers: the kernel's first arguments, addresses among them; kept: the tensors that these are of.

    trees: [requests, N, N] bool, written after planning, of requests whose drafts may branch; None: there are none.
    """

    numbers: tuple[int, ...]
    kept: tuple[torch.Tensor, ...]
    trees: torch.Tensor | None = None


class Tables:
    """What captured plans point to, for the largest batch. q_lens, kv_lens: [B]; pages: [B, P]; int32, of the host."""

    def __init__(self, most_requests: int, most_pages: int) -> None:
        self.q_lens = torch.zeros(most_requests, dtype=torch.int32)
        self.kv_lens = torch.zeros(most_requests, dtype=torch.int32)
        self.pages = torch.empty(most_requests, most_pages, dtype=torch.int32)
        self._arrays = tuple(each.numpy() for each in (self.q_lens, self.kv_lens, self.pages))

    def write(self, batch: ForwardBatch) -> None:
        """The batch in the first rows. By numpy: torch's copies take four times as long."""
        q_lens, kv_lens, pages = self._arrays
        count, table = batch.num_requests, batch.page_table_cpu.numpy()
        q_lens[:count] = batch.q_lens_cpu.numpy()
        kv_lens[:count] = batch.kv_lens_cpu.numpy()
        pages[:count, : table.shape[1]] = table


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
        self.most_pages = max(geometry.pages.values(), default=0)
        self.graphs: Tables | None = None
        self.epoch = 0
        self.dims = [[of.num_heads, of.head_dim, of.num_heads, of.value_dim] for of in geometry.layers]  # of q and out
        self.layers = [
            self._numbers(LocalLayerId(index), geometry.page_size) if layer in softmax else ()
            for index, layer in enumerate(geometry.layers)
        ]

    def _misfit(self, q: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, out: torch.Tensor) -> str:
        heads, dim, _, value_dim = self.dims[layer.local_id]
        given = " and ".join(f"{name} {list(each.shape)} {each.dtype}" for name, each in (("q", q), ("out", out)))
        return (
            f"{self.backend_id} was given {given} for {batch.num_tokens} tokens; by its facts layer {layer.global_id} has "
            f"q [T, {heads}, {dim}] and out [T, {heads}, {value_dim}] of one dtype: correct the model's block or its facts"
        )

    def _numbers(self, layer: LocalLayerId, page_size: int) -> tuple[int, ...]:
        """The kernel's arguments about a layer's memory, which stays where it is."""
        facts, (keys, values) = self.pool.geometry.layers[layer], self.pool.layer(layer)
        sizes = (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.value_dim, facts.sliding_window or 0)
        return (keys.data_ptr(), values.data_ptr(), TYPES[keys.dtype], keys.shape[0], page_size, *sizes)

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> CpuPlan:
        """Nothing is computed: the kernel cuts its work itself."""
        key = PlanKey.of(batch, self.backend_id, epoch=self.epoch, capture=capture)
        if capture:
            tables = self._written(batch)
            q_lens, kv_lens, table = tables.q_lens, tables.kv_lens, tables.pages
        else:
            q_lens, kv_lens, table = (
                each if each.stride(-1) == 1 else each.contiguous()
                for each in (batch.q_lens_cpu, batch.kv_lens_cpu, batch.page_table_cpu)
            )
        trees = _room_for_trees(batch) if batch.trees else None
        masks = (0, 0) if trees is None else (trees.data_ptr(), len(trees))
        lens = (batch.num_requests, q_lens.data_ptr(), kv_lens.data_ptr())
        numbers = (*lens, table.data_ptr(), table.stride(0), torch.get_num_threads(), *masks)
        return CpuPlan(key=key, numbers=numbers, kept=(q_lens, kv_lens, table), trees=trees)

    @hookimpl
    def verify_mask(self, plan: ForwardPlan) -> VerifyMask:
        """In the plan."""
        assert isinstance(plan, CpuPlan)
        assert plan.trees is not None, "it is asked of batches with trees"
        return VerifyMask(parts=(MaskPart(slice(0, len(plan.trees)), plan.trees),))

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        """Take the memory of the tables that captured plans point to. Those made before are not used any more."""
        self.epoch += self.graphs is not None
        self.graphs = Tables(max_batch_size, self.most_pages + 1)
        return True

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        """Copy the batch's lengths and pages to where captured plans point."""
        if plan.key.epoch != self.epoch:
            raise StalePlan(f"the plan to refresh was made for {plan.key}, and the tables of captured plans were made anew since")
        self._written(batch)
        return True

    def _written(self, batch: ForwardBatch) -> Tables:
        """The tables with this batch in their first rows. Raises `Unsupported` for one that they have no room for."""
        count, columns = batch.num_requests, batch.page_table_cpu.shape[1]
        if self.graphs is None or count > len(self.graphs.pages) or columns > self.graphs.pages.shape[1]:
            raise Unsupported(
                f"{self.backend_id} captures no step of {count} requests of up to {columns} pages; init_graph_state comes first, "
                "and says how many requests there may be"
            )
        self.graphs.write(batch)
        return self.graphs

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
        planned = covering_plan(plan, batch, CpuPlan, backend=self.backend_id, epoch=self.epoch)
        (rows, *dims), (out_rows, *out_dims) = q.shape, out.shape
        if [*dims, *out_dims] != self.dims[layer.local_id] or min(rows, out_rows) < batch.num_tokens or q.dtype is not out.dtype:
            raise Unsupported(self._misfit(q, layer, batch, out))
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


def _room_for_trees(batch: ForwardBatch) -> torch.Tensor:
    """Nothing is seen as yet: [requests, N, N] bool. Raises `Unsupported` for more rows than kernels take of a tree."""
    length = batch.decode_len
    if length > MOST_TREE_ROWS:
        raise Unsupported(f"trees of {length} rows are more than the {MOST_TREE_ROWS} that the kernels take; draft fewer tokens")
    return torch.zeros(batch.num_decode_requests, length, length, dtype=torch.bool)
