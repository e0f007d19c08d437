"""Planning: wrappers are leased, and planned from host tensors.

absorbed   rows [ 0 ................ | .... ]      one wrapper, or several where there are more rows than one can plan
ragged     piece 0 | piece 1 | ..                  a wrapper each, over all rows of the batch

S rows of the batch, L keys of a piece; H, R, N, P as in `contract.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from enginery.api import ChunkPlan, ForwardPlan, KVPiece, LayerSpec, PlanKey, WorkspaceArena
from enginery_attn_flashinfer.leases import Lease, Pool
from enginery_attn_flashinfer_mla.contract import Kernels, KernelSettings, PagedWrapper, RaggedWrapper
from enginery_attn_flashinfer_mla.pages import Ints, Rows, cut_rows, on_host, page_lists, starts_of

# FlashInfer's `MLAPlan` has room for 16384 items of work and does not look whether it is enough. An item is a tile of at least 64
# rows times heads, and splitting the keys makes one more for each multiprocessor at most.
MAX_ITEMS: Final = 16384 - 512
TILE: Final = 64


def max_rows(num_heads: int) -> int:
    """That one plan may have: each needs H / 64 tiles, and a request one more."""
    return MAX_ITEMS * TILE // (num_heads + TILE)


def workspace_bytes(settings: KernelSettings, *, num_units: int) -> int:
    """The most that results of split requests take, as FlashInfer's plans lay them out."""
    latent, heads = settings.latent, settings.num_heads
    absorbed = 2 * num_units * TILE * (2 * latent.rank + 4)
    ragged = 4 * heads * -(-2 * num_units // heads) * 128 * (latent.value_dim + 1)
    return max(absorbed, ragged) + 256


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedPart:
    """Rows of a batch, and the wrapper that has the plan for them."""

    rows: slice
    wrapper: Lease[PagedWrapper]


@dataclass(frozen=True, kw_only=True, eq=False)
class FlashInferMlaPlan(ForwardPlan):
    """Absorbed attention. Rows that only pad the batch are in no part."""

    parts: tuple[PagedPart, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RaggedPiece:
    """blind: rows of requests that have no keys in the piece, int64, device; None if there are none. wrapper: None without keys."""

    wrapper: Lease[RaggedWrapper] | None
    blind: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class FlashInferChunkPlan(ChunkPlan):
    """By the index of the piece."""

    pieces: tuple[RaggedPiece, ...]


class StreamWrappers:
    """The wrappers that share one workspace."""

    def __init__(self, kernels: Kernels, workspace: torch.Tensor) -> None:
        self.paged: Pool[PagedWrapper] = Pool(lambda: kernels.paged(workspace))
        self.ragged: Pool[RaggedWrapper] = Pool(lambda: kernels.ragged(workspace))


class Planner:
    """Plans what is not captured."""

    def __init__(self, kernels: Kernels, settings: KernelSettings, arena: WorkspaceArena) -> None:
        on_gpu = settings.device.type == "cuda"
        self.kernels = kernels
        self.page_size, self.num_heads = settings.page_size, settings.num_heads
        self.device = settings.device
        self.pinned = on_gpu
        self.max_rows = max_rows(settings.num_heads)
        self._arena = arena
        self._workspace_bytes = workspace_bytes(
            settings, num_units=torch.cuda.get_device_properties(settings.device).multi_processor_count if on_gpu else 1
        )
        self._streams: dict[int, StreamWrappers] = {}

    def workspace(self) -> torch.Tensor:
        """Of the current stream: uint8."""
        return self._arena.take("MLA of split requests", self._workspace_bytes)

    def wrappers(self) -> StreamWrappers:
        """Of the current stream."""
        workspace = self.workspace()
        found = self._streams.get(workspace.data_ptr())
        if found is None:
            found = self._streams[workspace.data_ptr()] = StreamWrappers(self.kernels, workspace)
        return found

    def paged(self, rows: Rows) -> tuple[PagedPart, ...]:
        """Absorbed attention of these rows."""
        pool, parts = self.wrappers().paged, []
        for part in cut_rows(rows, self.max_rows):
            lease = pool.lease()
            lease.item.plan(page_lists(part, page_size=self.page_size, pinned=self.pinned))
            parts.append(PagedPart(rows=part.place, wrapper=lease))
        return tuple(parts)

    def ragged(self, q_lens: Ints, chunks: Sequence[KVPiece], *, own: bool, key: PlanKey) -> FlashInferChunkPlan:
        """q_lens: [B]. own: besides the chunks, the step's own tokens are a piece, the last."""
        lens = [(chunk.lens_cpu.numpy(), chunk.causal) for chunk in chunks] + ([(q_lens, True)] if own else [])
        num_rows = int(q_lens.sum())
        pool = self.wrappers().ragged
        pieces = tuple(self._piece(pool, q_lens, keys, causal=causal) for keys, causal in lens)

        def attend(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: LayerSpec,
            piece: KVPiece,
            out: torch.Tensor,
            lse: torch.Tensor | None,
        ) -> None:
            planned = pieces[piece.index]
            q, out, lse = q[:num_rows], out[:num_rows], None if lse is None else lse[:num_rows]
            if planned.wrapper is not None:
                planned.wrapper.item.run(q, k, v, out, scale=layer.scale, lse=lse)
            if planned.blind is not None:
                out.index_fill_(0, planned.blind, 0.0)
                if lse is not None:
                    lse.index_fill_(0, planned.blind, float("-inf"))

        return FlashInferChunkPlan(key=key, attend=attend, pieces=pieces)

    def _piece(self, pool: Pool[RaggedWrapper], q_lens: Ints, kv_lens: Ints, *, causal: bool) -> RaggedPiece:
        """FlashInfer's -inf is -50000, so what rows without keys are given is written here."""
        seen = np.repeat(kv_lens > 0, q_lens)  # [S]
        blind = None
        if not seen.all():
            (hidden,) = on_host(np.flatnonzero(~seen).astype(np.int32), pinned=self.pinned)
            blind = hidden.to(self.device, non_blocking=True).long()
        if not seen.any():
            return RaggedPiece(wrapper=None, blind=blind)
        some = np.flatnonzero(q_lens)  # requests that only pad a batch have neither
        q_indptr, kv_indptr = on_host(starts_of(q_lens[some]), starts_of(kv_lens[some]), pinned=self.pinned)
        lease = pool.lease()
        lease.item.plan(q_indptr, kv_indptr, causal=causal)
        return RaggedPiece(wrapper=lease, blind=blind)


def attend_parts(parts: Sequence[PagedPart], q: torch.Tensor, latents: torch.Tensor, out: torch.Tensor, *, scale: float) -> None:
    """q: [T, H, R + P]; latents: [pages, page_size, 1, R + P]; out: [T, H, R]."""
    for part in parts:
        part.wrapper.item.run(q[part.rows], latents.squeeze(2), out[part.rows], scale=scale)
