"""What the backend asks of kernels, so that it can be tested without a GPU.

T rows, H query heads, L keys of a piece; R, N, P as in `enginery.api.LatentFacts`, V value dim of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from enginery.api import LatentFacts
from enginery_attn_flashinfer.leases import Reusable
from enginery_attn_flashinfer_mla.pages import PageLists

if TYPE_CHECKING:
    import torch


class PagedWrapper(Reusable, Protocol):
    """Attention over latents in their pages. Holds one plan at a time."""

    def plan(self, pages: PageLists, *, indices: torch.Tensor | None = None) -> None:
        """Reads host tensors alone; waits only if the copy of the plan before is pending. Every request has rows.

        indices: where a captured step finds its pages on the device, copied there by the caller.
        """
        ...

    def run(self, q: torch.Tensor, latents: torch.Tensor, out: torch.Tensor, *, scale: float) -> None:
        """Causal. q: [T, H, R + P]; latents: [pages, page_size, R + P]; out: [T, H, R]."""
        ...


class RaggedWrapper(Reusable, Protocol):
    """Attention over keys and values that are given. Holds one plan at a time."""

    def plan(self, q_indptr: torch.Tensor, kv_indptr: torch.Tensor, *, causal: bool) -> None:
        """q_indptr, kv_indptr: [B + 1] int32, host: where each request's rows and keys begin."""
        ...

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, scale: float, lse: torch.Tensor | None
    ) -> None:
        """q: [T, H, N + P]; k: [L, H, N + P]; v: [L, H, V]; out: [T, H, V]; lse: [T, H] float32, base 2, written unless None.

        What is written for rows of requests without keys is of no meaning.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """kernels: which FlashAttention. ragged: whether kernels for keys and values that are given are needed."""

    device: torch.device
    dtype: torch.dtype
    page_size: int
    num_heads: int
    latent: LatentFacts
    kernels: Literal["fa2", "fa3"]
    ragged: bool


class Kernels(Protocol):
    """Makes wrappers. workspace: uint8, for results of split requests; shared by all wrappers of a stream."""

    def paged(self, workspace: torch.Tensor) -> PagedWrapper: ...

    def ragged(self, workspace: torch.Tensor) -> RaggedWrapper: ...


class LoadKernels(Protocol):
    """Loads what is needed, which may compile. Raises `Unsupported` with the reason where that is not possible."""

    def __call__(self, settings: KernelSettings) -> Kernels: ...
