"""The backend: plans on the host, then runs FlashInfer's kernels. T tokens, H query heads, D head dim."""

from __future__ import annotations

import torch

from enginery.api import (
    BackendContext,
    ForwardBatch,
    ForwardPlan,
    LayerKV,
    LayerSpec,
    PlanKey,
    StalePlan,
    Unsupported,
    covering_plan,
    hookimpl,
)
from enginery_attn_flashinfer.contract import KernelSettings, LoadKernels
from enginery_attn_flashinfer.cuts import Cut, planned_requests
from enginery_attn_flashinfer.graphs import GraphState
from enginery_attn_flashinfer.pages import Rows
from enginery_attn_flashinfer.plan import CutPlan, FlashInferPlan, Planner, SharedPart, scratch_views
from enginery_attn_flashinfer.spec import FlashInferOptions


class FlashInferAttention:
    """MHA, GQA and MQA over pages, with sliding window and soft cap; decoding steps in graphs; shared prefixes read once.

    Requests of one token at the front of a batch are decoded, whatever the phase; those whose drafts are verified are no prefills
    either. Implements `enginery.api.AttnBackend`.
    """

    def __init__(self, context: BackendContext, load: LoadKernels) -> None:
        options = context.options if isinstance(context.options, FlashInferOptions) else FlashInferOptions()
        self.backend_id = context.instance
        self.pool = context.pool
        self.arena = context.arena
        self.geometry = context.geometry
        self.device = context.device
        self.dtype = context.dtype
        self.options = options
        self.cuts = tuple(None if layer.recurrent is not None else Cut.of(layer) for layer in context.geometry.layers)
        every = tuple(dict.fromkeys(cut for cut in self.cuts if cut is not None))
        settings = kernel_settings(context, options)
        self.kernels = load(settings, every)
        self.planner = Planner(
            self.kernels,
            every,
            settings,
            arena=context.arena,
            shared_tokens=options.shared_prefix_tokens,
            gather_bytes=options.gather_mb << 20,
        )
        on_gpu = context.device.type == "cuda"
        self.num_units = torch.cuda.get_device_properties(context.device).multi_processor_count if on_gpu else 1
        self.workspace_bytes = self._workspace_bytes(0)
        self.graphs: GraphState | None = None
        self.epoch = 0

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> FlashInferPlan:
        """Lease wrappers and plan this batch in them; of one that is captured, the wrappers that `refresh_graph_metadata` plans."""
        key = PlanKey.of(batch, self.backend_id, epoch=self.epoch, capture=capture)
        if not capture:
            return self.planner.plan(batch, key, self._workspace())
        if self.graphs is None:
            raise Unsupported(f"{self.backend_id} captures steps after init_graph_state, which was not called")
        fronts = self.graphs.fronts(batch.num_requests, batch.decode_len, self._captured_workspace(batch))
        self.graphs.refresh(decoding_rows(batch), batch.decode_len)
        cuts = {cut: CutPlan(front=front, prefill=None) for cut, front in fronts.items()}
        return FlashInferPlan(key=key, cuts=cuts, num_decoding=batch.num_tokens, num_rows=batch.num_tokens)

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        """Take the memory that captured plans point into. Plans made before point elsewhere, and are not used any more."""
        self.epoch += self.graphs is not None
        self.workspace_bytes = self._workspace_bytes(max_batch_size)
        self.graphs = GraphState(
            self.planner,
            max_batch_size=max_batch_size,
            max_rows=max_num_tokens,
            num_pages=self.geometry.num_pages,
            device=self.device,
            sharing=self.options.shared_prefix_in_graphs,
        )
        return True

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        """Plan this batch in the captured wrappers."""
        if self.graphs is None or plan.key.epoch != self.epoch or plan.key.num_requests != batch.num_requests:
            raise StalePlan(f"the plan to refresh was made for {plan.key}, and the batch has {batch.num_requests} requests")
        self.graphs.refresh(decoding_rows(batch), batch.decode_len)
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
        """See `enginery.api.Attends`. Keys and values are those of the pool, with the step's own, or the step's own alone."""
        planned = covering_plan(plan, batch, FlashInferPlan, backend=self.backend_id, epoch=self.epoch)
        cut = self.cuts[layer.local_id]
        assert cut is not None, "a recurrent layer has no pages"
        kv, part = self.pool.layer(layer.local_id), planned.cuts[cut]
        count = planned.num_decoding
        if isinstance(part.front, SharedPart):
            self._attend_shared(q[:count], kv, out[:count], cut=cut, part=part.front, scale=layer.scale)
        elif part.front is not None:
            part.front.item.run(q[:count], kv, out[:count], scale=layer.scale)
        if part.prefill is not None:
            rows = slice(count, planned.num_rows)
            if part.prefill.own:
                kv = LayerKV(k[rows], v[rows])
            elif part.prefill.gathering is not None:
                self.kernels.gather(kv, part.prefill.gathering.lists, part.prefill.gathering.into)
                kv = part.prefill.gathering.into
            part.prefill.wrapper.item.run(q[rows], kv, out[rows], scale=layer.scale)

    def _attend_shared(self, q: torch.Tensor, kv: LayerKV, out: torch.Tensor, *, cut: Cut, part: SharedPart, scale: float) -> None:
        """q, out: [B, H, D], of decoding requests."""
        rows = slice(part.first, part.last)
        other, lse, other_lse = scratch_views(part.scratch, cut, shared=part.last - part.first, decoding=len(q), dtype=out.dtype)
        part.prefix.item.run(q[rows], kv, other, scale=scale, lse=other_lse)
        part.decode.item.run(q, kv, out, scale=scale, lse=lse)
        self.kernels.merge(out[rows], lse[rows], other, other_lse)

    def _workspace(self) -> torch.Tensor:
        return self.arena.take("attention of split requests", self.workspace_bytes, may_move=True)

    def _captured_workspace(self, batch: ForwardBatch) -> torch.Tensor:
        """Of a step that is captured. Raises `Unsupported` if it verifies drafts and would need more than the options leave."""
        count, length, cuts = batch.num_requests, batch.decode_len, self.planner.cuts
        planned = planned_requests(cuts, num_requests=count, length=length)
        sizes = [cut.verify_bytes(num_units=self.num_units, num_requests=planned, num_rows=count * length) for cut in cuts]
        if length == 1 or max(sizes, default=0) <= self.workspace_bytes:
            return self._workspace()
        left = (self.options.workspace_mb << 20) - self.workspace_bytes
        if max(sizes) > left:
            raise Unsupported(
                f"a captured step that verifies {length} rows of {count} requests may take {max(sizes) >> 20} MiB for split "
                f"requests, and of flashinfer.workspace_mb={self.options.workspace_mb} others leave {left >> 20}; raise it"
            )
        return self.arena.take("attention of verified requests, split", left)

    def _workspace_bytes(self, captured_requests: int) -> int:
        """The most that any layer needs. Raises `Unsupported` if it is more than the options allow."""
        needed = max(
            (cut.workspace_bytes(num_units=self.num_units, captured_requests=captured_requests) for cut in self.planner.cuts),
            default=0,
        )
        if needed > self.options.workspace_mb << 20:
            raise Unsupported(
                f"split requests may take {needed >> 20} MiB in steps of up to {captured_requests} requests in graphs, and "
                f"flashinfer.workspace_mb allows {self.options.workspace_mb}; raise it, or capture smaller batches"
            )
        return needed


def decoding_rows(batch: ForwardBatch) -> Rows:
    """All of a batch."""
    return Rows(q_lens=batch.q_lens_cpu.numpy(), kv_lens=batch.kv_lens_cpu.numpy(), table=batch.page_table_cpu.numpy())


def kernel_settings(context: BackendContext, options: FlashInferOptions) -> KernelSettings:
    """Raises `Unsupported` where an option asks for kernels that do not run on this device."""
    return KernelSettings.of(
        options,
        device=context.device,
        dtype=context.dtype,
        kv_dtype=context.geometry.dtype,
        page_size=context.geometry.page_size,
        compute_capability=torch.cuda.get_device_capability(context.device) if context.device.type == "cuda" else None,
    )
