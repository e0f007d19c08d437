"""The same kernels in torch, in float64: for tests on machines without a GPU. Not fast, and never chosen.

They keep one plan as FlashInfer's do, and leave numbers where FlashInfer leaves them: -50000 for the log-sum-exp of nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from enginery_attn_flashinfer_mla.contract import KernelSettings
from enginery_attn_flashinfer_mla.pages import PageLists

LARGE: Final = 5e4  # FlashInfer's infinity
TILE: Final = 64  # rows times heads


class TorchKernels:
    """Implements `contract.Kernels`."""

    def __init__(self, settings: KernelSettings) -> None:
        self.settings = settings

    def paged(self, workspace: torch.Tensor) -> TorchPaged:
        """See `contract.Kernels`."""
        return TorchPaged(self.settings)

    def ragged(self, workspace: torch.Tensor) -> TorchRagged:
        """See `contract.Kernels`."""
        assert self.settings.ragged, "kernels for keys and values were not asked for"
        return TorchRagged()


class TorchPaged:
    """Implements `contract.PagedWrapper`."""

    def __init__(self, settings: KernelSettings) -> None:
        self.settings = settings
        self.q_lens: list[int] = []
        self.kv_lens: list[int] = []
        self.kv_indptr: list[int] = []
        self.indices = torch.empty(0, dtype=torch.int32)
        self.blocks = 0  # that work together, which a graph keeps

    def is_pending(self) -> bool:
        """Never."""
        return False

    def plan(self, pages: PageLists, *, indices: torch.Tensor | None = None) -> None:
        """See `contract.PagedWrapper`."""
        self.q_lens, self.kv_lens = pages.q_indptr.diff().tolist(), pages.kv_lens.tolist()
        self.kv_indptr = pages.kv_indptr.tolist()
        self.indices = pages.indices.clone() if indices is None else indices
        assert self.q_lens, "FlashInfer divides by the number of requests"
        self.blocks = 2 if sum(self.q_lens) * self.settings.num_heads // len(self.q_lens) > TILE else 1
        assert pages.causal or set(self.q_lens) == {1}

    def run(self, q: torch.Tensor, latents: torch.Tensor, out: torch.Tensor, *, scale: float) -> None:
        """See `contract.PagedWrapper`."""
        assert len(q) == len(out) == sum(self.q_lens)
        indices, rank, row = self.indices.tolist(), self.settings.latent.rank, 0
        for request, (new, length) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            used = indices[self.kv_indptr[request] : self.kv_indptr[request + 1]]
            keys = latents[used].flatten(0, 1)[:length, None].expand(-1, q.shape[1], -1)
            rows = slice(row, row + new)
            out[rows] = attention(q[rows], keys, keys[..., :rank], scale=scale, causal=True)[0]
            row += new


class TorchRagged:
    """Implements `contract.RaggedWrapper`."""

    def __init__(self) -> None:
        self.q_lens: list[int] = []
        self.kv_lens: list[int] = []
        self.causal = False

    def is_pending(self) -> bool:
        """Never."""
        return False

    def plan(self, q_indptr: torch.Tensor, kv_indptr: torch.Tensor, *, causal: bool) -> None:
        """See `contract.RaggedWrapper`."""
        self.q_lens, self.kv_lens, self.causal = q_indptr.diff().tolist(), kv_indptr.diff().tolist(), causal

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, scale: float, lse: torch.Tensor | None
    ) -> None:
        """See `contract.RaggedWrapper`."""
        if len(q) != sum(self.q_lens):
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({sum(self.q_lens)})")
        num_keys = sum(self.kv_lens)  # padding may follow
        keys, values = (torch.split(part[:num_keys], self.kv_lens) for part in (k, v))
        parts = zip(torch.split(q, self.q_lens), keys, values, strict=True)
        results = [attention(*part, scale=scale, causal=self.causal) for part in parts]
        out.copy_(torch.cat([values for values, _ in results]))
        if lse is not None:
            lse.copy_(torch.cat([sums for _, sums in results]) / torch.log(torch.tensor(2.0)))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [S, H, D], k: [L, H, D], v: [L, H, V] -> [S, H, V] and the natural log-sum-exp [S, H]; of nothing: 0 and -LARGE."""
    if not len(k):
        return q.new_zeros(len(q), q.shape[1], v.shape[-1]), q.new_full(q.shape[:2], -LARGE, dtype=torch.float64)
    scores = torch.einsum("shd,lhd->shl", q.double(), k.double()) * scale
    if causal:
        ahead = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(ahead[:, None], float("-inf"))
    return torch.einsum("shl,lhv->shv", scores.softmax(-1), v.double()), scores.logsumexp(-1)


def attend_table(
    q: torch.Tensor, latents: torch.Tensor, table: torch.Tensor, lens: Sequence[int], out: torch.Tensor, *, scale: float
) -> None:
    """Decoding by a page table. q: [B, H, R + P]; latents: [pages, page_size, R + P]; table: [B, C]; out: [B, H, R]."""
    for request, length in enumerate(lens):
        used = table[request, : -(-length // latents.shape[1])].long()
        keys = latents[used].flatten(0, 1)[:length, None].expand(-1, q.shape[1], -1)
        one = slice(request, request + 1)
        out[one] = attention(q[one], keys, keys[..., : out.shape[-1]], scale=scale, causal=False)[0]
