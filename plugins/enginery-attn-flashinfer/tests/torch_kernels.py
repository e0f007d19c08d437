"""FlashInfer's kernels, written in torch for the CPU; they keep plans as its wrappers do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from enginery.api import LayerKV
from enginery_attn_flashinfer.contract import KernelSettings
from enginery_attn_flashinfer.cuts import Cut
from enginery_attn_flashinfer.pages import GatherLists, PageLists


class TorchWrapper:
    """Keeps one plan. fixed: the page lists of a captured wrapper."""

    def __init__(self, page_size: int, *, causal: bool, single: bool = False, fixed: PageLists | None = None) -> None:
        self.page_size, self.causal, self.single, self.fixed = page_size, causal, single, fixed
        self.cut: Cut | None = None
        self.q_lens: list[int] = []

    def is_pending(self) -> bool:
        return False

    def plan(self, cut: Cut, pages: PageLists) -> None:
        assert pages.num_requests
        self.cut, self.q_lens = cut, pages.q_indptr.diff().tolist()
        assert not self.single or set(self.q_lens) == {1}
        self.lists = [part.clone() for part in (pages.indptr, pages.indices, pages.last_lens)]

    def run(self, q: torch.Tensor, kv: LayerKV, out: torch.Tensor, *, scale: float, lse: torch.Tensor | None = None) -> None:
        assert len(q) == len(out) == sum(self.q_lens)
        if self.fixed is not None:
            self.lists = [self.fixed.indptr, self.fixed.indices, self.fixed.last_lens]
        indptr, indices, last_lens = (part.tolist() for part in self.lists)
        row = 0
        for request, count in enumerate(self.q_lens):
            used = indices[indptr[request] : indptr[request + 1]]
            length = max(len(used) - 1, 0) * self.page_size + last_lens[request]
            rows = slice(row, row + count)
            k, v = (part[used].flatten(0, 1)[:length].double() for part in kv)
            out[rows], sums = self.attention(q[rows].double(), k, v, scale)
            if lse is not None:
                lse[rows] = sums
            row += count

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, H, D] and log-sum-exps [S, H], base 2."""
        cut = self.cut
        assert cut is not None
        k, v = k.repeat_interleave(cut.group, 1), v.repeat_interleave(cut.group, 1)
        scores = torch.einsum("shd,lhd->shl", q, k) * scale
        if cut.softcap is not None:
            scores = cut.softcap * (scores / cut.softcap).tanh()
        behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))  # [S, L]
        hidden = (behind < 0) if self.causal else torch.zeros_like(behind, dtype=torch.bool)
        if cut.window is not None:
            hidden |= behind >= cut.window
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        sums = scores.logsumexp(-1)
        weights = (scores - sums[..., None]).exp() if len(k) else scores
        return torch.einsum("shl,lhd->shd", weights, v), sums / torch.log(torch.tensor(2.0))


class TorchRaggedWrapper(TorchWrapper):
    """Sees keys and values as one page for each request."""

    def __init__(self) -> None:
        super().__init__(0, causal=True)

    def plan(self, cut: Cut, q_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> None:
        self.cut, self.q_lens, self.kv_lens = cut, q_indptr.diff().tolist(), kv_indptr.diff().tolist()
        assert all(0 < rows <= keys for rows, keys in zip(self.q_lens, self.kv_lens, strict=True))

    def run(self, q: torch.Tensor, kv: LayerKV, out: torch.Tensor, *, scale: float) -> None:
        assert kv.k.dtype == kv.v.dtype == q.dtype
        parts = [part.double().split(self.kv_lens) for part in kv]
        rows = zip(q.double().split(self.q_lens), *parts, out.split(self.q_lens), strict=True)
        for mine, k, v, result in rows:
            result.copy_(self.attention(mine, k, v, scale)[0])


class TorchKernels:
    """Implements `contract.Kernels`."""

    def __init__(self, settings: KernelSettings, cuts: Sequence[Cut]) -> None:
        self.page_size = settings.page_size

    def decode(self, workspace: torch.Tensor) -> TorchWrapper:
        return TorchWrapper(self.page_size, causal=True, single=True)

    def captured(self, workspace: torch.Tensor, pages: PageLists) -> TorchWrapper:
        return TorchWrapper(self.page_size, causal=True, single=True, fixed=pages)

    def captured_prefix(self, workspace: torch.Tensor, pages: PageLists) -> TorchWrapper:
        return TorchWrapper(self.page_size, causal=False, fixed=pages)

    def prefill(self, workspace: torch.Tensor) -> TorchWrapper:
        return TorchWrapper(self.page_size, causal=True)

    def verify(self, workspace: torch.Tensor) -> TorchWrapper:
        return TorchWrapper(self.page_size, causal=True)

    def captured_verify(self, workspace: torch.Tensor, pages: PageLists) -> TorchWrapper:
        return TorchWrapper(self.page_size, causal=True, fixed=pages)

    def ragged(self, workspace: torch.Tensor) -> TorchRaggedWrapper:
        return TorchRaggedWrapper()

    def gather(self, kv: LayerKV, lists: GatherLists, into: LayerKV) -> None:
        for part, copy in zip(kv, into, strict=True):
            for page, (first, end) in zip(lists.pages.tolist(), lists.starts.unfold(0, 2, 1).tolist(), strict=True):
                copy[first:end] = part[page, : end - first].to(copy.dtype)

    def prefix(self, workspace: torch.Tensor) -> TorchWrapper:
        return TorchWrapper(self.page_size, causal=False)

    def merge(self, out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
        together = torch.logaddexp2(lse, other_lse)
        mine, theirs = (torch.exp2(part - together)[..., None] for part in (lse, other_lse))
        out.copy_(out * mine + other * theirs)
        lse.copy_(together)
