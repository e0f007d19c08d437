"""What the backend asks of kernels, so that it can be tested without a GPU.

T rows, H query heads, L keys of a piece; R, N, P as in `enginery.api.LatentFacts`, V value dim of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from enginery.api import AttnLayerFacts, LatentFacts, Unsupported
from enginery_attn_flashinfer.leases import Reusable
from enginery_attn_flashinfer_mla.pages import PageLists
from enginery_attn_flashinfer_mla.spec import RAGGED_DIMS, FlashInferMlaOptions, ragged_dims


class PagedWrapper(Reusable, Protocol):
    """Attention over latents in their pages. Holds one plan at a time."""

    def plan(self, pages: PageLists, *, indices: torch.Tensor | None = None) -> None:
        """Reads host tensors alone; waits only if the copy of the plan before is pending.

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

    @classmethod
    def of(
        cls,
        options: FlashInferMlaOptions,
        layers: Sequence[AttnLayerFacts],
        *,
        device: torch.device,
        dtype: torch.dtype,
        page_size: int,
        compute_capability: tuple[int, int] | None,
    ) -> KernelSettings:
        """Raises `Unsupported` where an option asks for kernels that do not run on such a device."""
        facts = next(layer for layer in layers if layer.latent is not None)
        assert facts.latent is not None
        on_hopper = compute_capability is not None and compute_capability[0] == 9
        if options.kernels == "fa3" and not on_hopper:
            raise Unsupported(f"kernels=fa3 is for compute capability 9.x, and the device is {device}; use kernels=auto")
        return cls(
            device=device,
            dtype=dtype,
            page_size=page_size,
            num_heads=facts.num_heads,
            latent=facts.latent,
            kernels="fa3" if on_hopper and options.kernels != "fa2" else "fa2",
            ragged=not options.skip_prefill and ragged_dims(facts.latent) == RAGGED_DIMS,
        )


class Kernels(Protocol):
    """Makes wrappers. workspace: uint8, for results of split requests; shared by all wrappers of a stream."""

    def paged(self, workspace: torch.Tensor) -> PagedWrapper: ...

    def ragged(self, workspace: torch.Tensor) -> RaggedWrapper: ...


class LoadKernels(Protocol):
    """Loads what is needed, which may compile. Raises `Unsupported` with the reason where that is not possible."""

    def __call__(self, settings: KernelSettings) -> Kernels: ...
