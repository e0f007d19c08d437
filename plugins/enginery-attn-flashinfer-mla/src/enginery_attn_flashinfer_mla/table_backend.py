"""A backend around one decoding kernel that reads page tables: what it does not decode, a FlashInfer leaf beside it computes.

requests   [ 0 .. of one row each .. | others ]
           [ the kernel              | FlashInfer, absorbed or ragged ]

    lens     [ 40 | 2 | 75 ]                      B requests
    table    [ 7 3 9 0 | 4 0 0 0 | 1 2 5 6 ]      [B, C], as many columns as the kernel wants

What such plugins differ in is their kernel and what they refuse, so they have no class of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
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
    WorkspaceArena,
    covering_plan,
    hookimpl,
)
from enginery_attn_flashinfer_mla.backend import FlashInferMla, rows_of
from enginery_attn_flashinfer_mla.pages import Rows, on_host
from enginery_attn_flashinfer_mla.plan import PagedPart, attend_parts

MAX_ENTRIES: Final = 16 << 20  # of the table of captured steps: 64 MiB


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """table [B, C], lens [B]: int32, device. longest: no request is longer; a number of the host, which a graph keeps."""

    table: torch.Tensor
    lens: torch.Tensor
    longest: int


class TableKernel(Protocol):
    """Absorbed decoding of one row per request.

    columns: tables have a multiple of it. workspace_bytes: taken from the arena. zeroed: its workspace is cleared before its first
    use, and it leaves zeros where it needs them.
    """

    columns: int
    workspace_bytes: int
    zeroed: bool

    def __call__(
        self, q: torch.Tensor, latents: torch.Tensor, tables: Tables, workspace: torch.Tensor, out: torch.Tensor, *, scale: float
    ) -> None:
        """q: [B, H, R + P]; latents: [pages, page_size, R + P]; out: [B, H, R], all contiguous."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class TablePlan(ForwardPlan):
    """tables: of the decoding requests at the front; None without any. parts: of the others."""

    tables: Tables | None
    workspace: torch.Tensor
    parts: tuple[PagedPart, ...]


class Workspaces:
    """Of each stream, cleared where the kernel wants that."""

    def __init__(self, arena: WorkspaceArena, kernel: TableKernel, purpose: str) -> None:
        self._arena = arena
        self._kernel = kernel
        self._purpose = purpose
        self._cleared: set[int] = set()

    def take(self) -> torch.Tensor:
        """Of the current stream: uint8."""
        workspace = self._arena.take(self._purpose, self._kernel.workspace_bytes)
        if self._kernel.zeroed and workspace.data_ptr() not in self._cleared:
            self._cleared.add(workspace.data_ptr())
            workspace.zero_()
        return workspace


class TableBackend:
    """Decodes with `kernel`, and has everything else done by `beside`. Implements `enginery.api.AttnBackend`."""

    def __init__(self, context: BackendContext, kernel: TableKernel, beside: FlashInferMla) -> None:
        self.backend_id = context.instance
        self.pool = context.pool
        self.geometry = context.geometry
        self.device = context.device
        self.kernel = kernel
        self.beside = beside
        self.workspaces = Workspaces(context.arena, kernel, f"decoding of {context.instance}")
        self.captured: Tables | None = None
        self.epoch = 0

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> TablePlan:
        """Upload a table of the requests of one row at the front; of a captured step, have it where it stays."""
        key = PlanKey.of(batch, self.backend_id, epoch=self.epoch, capture=capture)
        workspace, count, rows = self.workspaces.take(), batch.num_decode_requests, rows_of(batch)
        if capture:
            decodes = batch.phase is Phase.DECODE and batch.num_tokens == batch.num_requests
            if self.captured is None or not decodes or batch.num_requests > len(self.captured.lens):
                raise Unsupported(
                    f"{self.backend_id}: decoding steps of one token per request are captured, after init_graph_state and no "
                    f"larger than it was told; this is a batch of {batch.num_requests} requests and {batch.num_tokens} tokens in "
                    f"phase {batch.phase}"
                )
            self._refresh(self.captured, rows)
            captured = Tables(table=self.captured.table[:count], lens=self.captured.lens[:count], longest=self.captured.longest)
            return TablePlan(key=key, tables=captured, workspace=workspace, parts=())
        others = Rows(q_lens=rows.q_lens[count:], kv_lens=rows.kv_lens[count:], table=rows.table[count:], first=count)
        tables = self._tables(rows, count) if count else None
        return TablePlan(key=key, tables=tables, workspace=workspace, parts=self.beside.planner.paged(others))

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch, chunks: tuple[KVPiece, ...]) -> ChunkPlan | Denied:
        """FlashInfer's; it is told what the chunks say: one that is causal has the step's own tokens too."""
        return self.beside.init_mha_chunk_metadata(batch, chunks, any(chunk.causal for chunk in chunks))

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        """Take the memory that captured plans point into. Plans made before point elsewhere, and are not used any more."""
        self.epoch += self.captured is not None
        columns = self._columns(min(self.geometry.num_pages, MAX_ENTRIES // max_batch_size))
        table = torch.zeros(max_batch_size, columns, dtype=torch.int32, device=self.device)
        lens = torch.ones(max_batch_size, dtype=torch.int32, device=self.device)
        self.captured = Tables(table=table, lens=lens, longest=columns * self.geometry.page_size)
        return True

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        """Upload this batch's table to where the captured plan has it."""
        if self.captured is None or plan.key.epoch != self.epoch or plan.key.num_requests != batch.num_requests:
            raise StalePlan(f"the plan to refresh was made for {plan.key}, and the batch has {batch.num_requests} requests")
        self._refresh(self.captured, rows_of(batch))
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
        planned = covering_plan(plan, batch, TablePlan, backend=self.backend_id, epoch=self.epoch)
        latents = self.pool.layer(layer.local_id).k
        if planned.tables is not None:
            count = len(planned.tables.lens)
            self.kernel(q[:count], latents.squeeze(2), planned.tables, planned.workspace, out[:count], scale=layer.scale)
        attend_parts(planned.parts, q, latents, out, scale=layer.scale)

    def _columns(self, pages: int) -> int:
        """That hold so many pages."""
        return -(-pages // self.kernel.columns) * self.kernel.columns

    def _host(self, rows: Rows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, C] and [B], page 0 past the last page of a request."""
        lens = rows.kv_lens[:count]
        pages = -(-lens // self.geometry.page_size)
        width = self._columns(int(pages.max()))
        table = np.zeros((count, width), dtype=np.int32)
        used = np.arange(width) < pages[:, None]
        shown = min(width, rows.table.shape[1])
        table[:, :shown] = rows.table[:count, :shown]
        table *= used
        flat, host_lens = on_host(table.reshape(-1), lens, pinned=self.beside.planner.pinned)
        return flat.view(count, width), host_lens

    def _tables(self, rows: Rows, count: int) -> Tables:
        table, lens = self._host(rows, count)
        there = [part.to(self.device, non_blocking=True) for part in (table, lens)]
        return Tables(table=there[0], lens=there[1], longest=int(rows.kv_lens[:count].max()))

    def _refresh(self, captured: Tables, rows: Rows) -> None:
        count = len(rows.q_lens)
        table, lens = self._host(rows, count)
        if table.shape[1] > captured.table.shape[1]:
            raise Unsupported(
                f"a request with {table.shape[1]} pages does not fit the table of captured steps, which has "
                f"{captured.table.shape[1]} columns; run this batch eagerly"
            )
        captured.table[:count, : table.shape[1]].copy_(table, non_blocking=True)
        captured.lens[:count].copy_(lens, non_blocking=True)
