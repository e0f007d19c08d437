"""The backend: plans on the host, then runs FlashInfer's kernels. Letters as in `contract.py`."""

from __future__ import annotations

from typing import Final

import torch

from enginery.api import (
    BackendContext,
    ChunkPlan,
    Denied,
    ForwardBatch,
    ForwardPlan,
    KVPiece,
    LayerSpec,
    Phase,
    PlanKey,
    StalePlan,
    Unsupported,
    covering_plan,
    hookimpl,
)
from enginery_attn_flashinfer.leases import Lease
from enginery_attn_flashinfer_mla.contract import KernelSettings, LoadKernels, PagedWrapper
from enginery_attn_flashinfer_mla.pages import Rows, padded, page_lists
from enginery_attn_flashinfer_mla.plan import TILE, FlashInferMlaPlan, PagedPart, Planner, attend_parts
from enginery_attn_flashinfer_mla.spec import RAGGED_DIMS, FlashInferMlaOptions, ragged_dims

MAX_INDICES: Final = 16 << 20  # 64 MiB


class CapturedSteps:
    """One wrapper for the graphs of all sizes, which run one at a time, each after it was planned for that step.

    Where `MLAPlan` puts things depends on the device alone, so a graph finds them whatever its size. How many blocks work together
    depends on the rows that a request has on average, which are the same in all steps of a graph; mixed steps have so many requests
    without rows besides that a block works alone.
    """

    def __init__(self, planner: Planner, *, max_batch_size: int, max_rows: int, num_pages: int) -> None:
        if max_batch_size > planner.max_rows:
            raise Unsupported(f"graphs of {max_batch_size} requests are asked for; FlashInfer plans {planner.max_rows} at most")
        self.planner = planner
        self.max_batch_size, self.max_rows, self.mixed_rows = max_batch_size, min(max_rows, planner.max_rows), 0
        num_indices = min(max_batch_size * (num_pages + 1), MAX_INDICES)
        self.indices = torch.zeros(num_indices, dtype=torch.int32, device=planner.device)
        self.wrapper: Lease[PagedWrapper] = Lease(planner.kernels.paged(planner.workspace()))

    def refresh(self, batch: ForwardBatch) -> None:
        """Copy the page numbers to where kernels read them, and plan again."""
        rows, mixed = rows_of(batch), batch.phase is Phase.MIXED
        if mixed:
            tiles = -(-batch.num_tokens * self.planner.num_heads // TILE)
            rows = padded(rows, num_rows=batch.num_tokens, num_requests=tiles)
        pages = page_lists(rows, page_size=self.planner.page_size, pinned=self.planner.pinned, causal=mixed)
        if len(pages.indices) > len(self.indices):
            raise Unsupported(
                f"{batch.num_requests} requests with {len(pages.indices)} pages do not fit the page lists of captured steps, which "
                f"have {len(self.indices)} entries; run this batch eagerly"
            )
        self.indices[: len(pages.indices)].copy_(pages.indices, non_blocking=True)
        self.wrapper.item.plan(pages, indices=self.indices)


class FlashInferMla:
    """MLA over paged latents, and over keys and values made from them; steps that decode or verify drafts in graphs.

    Implements `enginery.api.AttnBackend`.
    """

    def __init__(self, context: BackendContext, load: LoadKernels) -> None:
        options = context.options if isinstance(context.options, FlashInferMlaOptions) else FlashInferMlaOptions()
        self.backend_id = context.instance
        self.pool = context.pool
        self.options = options
        self.num_pages = context.geometry.num_pages
        settings = kernel_settings(context, options)
        self.planner = Planner(load(settings), settings, context.arena)
        self.denial = why_not_ragged(settings, options)
        self.graphs: CapturedSteps | None = None
        self.epoch = 0

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> FlashInferMlaPlan:
        """Lease wrappers and plan this batch in them; of one that is captured, the one that `refresh_graph_metadata` plans."""
        key = PlanKey.of(batch, self.backend_id, epoch=self.epoch, capture=capture)
        if not capture:
            return FlashInferMlaPlan(key=key, parts=self.planner.paged(rows_of(batch)))
        graphs = self._graphs_of(batch)
        graphs.refresh(batch)
        part = PagedPart(rows=slice(0, batch.num_tokens), wrapper=graphs.wrapper)
        return FlashInferMlaPlan(key=key, parts=(part,))

    def _graphs_of(self, batch: ForwardBatch) -> CapturedSteps:
        """Raises `Unsupported` for a batch that cannot be captured."""
        graphs = self.graphs
        most = 0 if graphs is None else graphs.mixed_rows if batch.phase is Phase.MIXED else graphs.max_rows
        if graphs is None or batch.num_requests > graphs.max_batch_size or batch.num_tokens > most:
            raise Unsupported(
                f"{self.backend_id} captures steps after init_graph_state and no larger than it was told; this is a batch of "
                f"{batch.num_requests} requests and {batch.num_tokens} tokens"
            )
        return graphs

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch, chunks: tuple[KVPiece, ...], disable_ragged: bool) -> ChunkPlan | Denied:
        """Plan a wrapper for each piece. disable_ragged: there is no pass over the step's own tokens alone."""
        if self.denial is not None:
            return Denied(self.denial)
        if not self.options.chunked_prefix and not all(chunk.causal for chunk in chunks):
            return Denied("cutting a cached prefix into chunks is switched off, by chunked_prefix=false")
        key = PlanKey.of(batch, self.backend_id, epoch=self.epoch)
        return self.planner.ragged(batch.q_lens_cpu.numpy(), chunks, own=not disable_ragged, key=key)

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        """Take the memory that captured plans point into. Plans made before point elsewhere, and are not used any more."""
        self.epoch += self.graphs is not None
        self.graphs = CapturedSteps(self.planner, max_batch_size=max_batch_size, max_rows=max_num_tokens, num_pages=self.num_pages)
        return True

    @hookimpl
    def init_mixed_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        """They have the memory of other captured steps, in which one of them is planned at a time."""
        if self.graphs is None or max_batch_size > self.graphs.max_batch_size:
            raise Unsupported(
                f"{self.backend_id} captures mixed steps after init_graph_state, and of no more requests than that was told; "
                f"these are to be of {max_batch_size}"
            )
        self.graphs.mixed_rows = min(max_num_tokens, self.planner.max_rows)
        return True

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        """Plan this batch in the captured wrapper."""
        captured = plan.key.phase is Phase.MIXED or plan.key.num_requests == batch.num_requests
        if self.graphs is None or plan.key.epoch != self.epoch or not captured:
            raise StalePlan(f"the plan to refresh was made for {plan.key}, and the batch has {batch.num_requests} requests")
        self.graphs.refresh(batch)
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
        """See `enginery.api.Attends`. Latents are read from the pool, where the step's own are too."""
        planned = covering_plan(plan, batch, FlashInferMlaPlan, backend=self.backend_id, epoch=self.epoch)
        attend_parts(planned.parts, q, self.pool.layer(layer.local_id).k, out, scale=layer.scale)


def rows_of(batch: ForwardBatch) -> Rows:
    """All of a batch."""
    q_lens, kv_lens, table = (part.numpy() for part in (batch.q_lens_cpu, batch.kv_lens_cpu, batch.page_table_cpu))
    return Rows(q_lens=q_lens, kv_lens=kv_lens, table=table, first=0)


def why_not_ragged(settings: KernelSettings, options: FlashInferMlaOptions) -> str | None:
    """Why no prefill is computed over keys and values made from latents, or None."""
    if options.skip_prefill:
        return "kernels for prefills were not loaded, by skip_prefill=true"
    if not settings.ragged:
        has = ragged_dims(settings.latent)
        return f"FlashInfer's prefills are for keys and values of {RAGGED_DIMS} dims, and here they have {has}"
    return None


def kernel_settings(context: BackendContext, options: FlashInferMlaOptions) -> KernelSettings:
    """Raises `Unsupported` where an option asks for kernels that do not run on this device."""
    return KernelSettings.of(
        options,
        context.geometry.layers,
        device=context.device,
        dtype=context.dtype,
        page_size=context.geometry.page_size,
        compute_capability=torch.cuda.get_device_capability(context.device) if context.device.type == "cuda" else None,
    )
