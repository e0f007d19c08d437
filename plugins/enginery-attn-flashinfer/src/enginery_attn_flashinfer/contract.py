"""What the backend asks of kernels, so that it can be tested without a GPU. T tokens, H query heads, K KV heads, D head dim.

B requests, L tokens of all requests, cached ones too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from enginery.api import LayerKV, Unsupported
from enginery_attn_flashinfer.cuts import Cut
from enginery_attn_flashinfer.leases import Reusable
from enginery_attn_flashinfer.pages import GatherLists, PageLists
from enginery_attn_flashinfer.spec import FP8, FlashInferOptions


class Wrapper(Reusable, Protocol):
    """Holds one plan at a time."""

    def plan(self, cut: Cut, pages: PageLists) -> None:
        """For layers of this cut. Reads host tensors alone; waits only if the copy of the plan before is pending."""
        ...

    def run(self, q: torch.Tensor, kv: LayerKV, out: torch.Tensor, *, scale: float, lse: torch.Tensor | None = None) -> None:
        """q, out: [T, H, D]; lse: [T, H] float32, base 2, written unless None; for rows that see nothing `out` is 0, lse -inf."""
        ...


class RaggedWrapper(Reusable, Protocol):
    """The same for keys and values that are in one piece, in the model's dtype, request behind request."""

    def plan(self, cut: Cut, q_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> None:
        """q_indptr, kv_indptr: [B + 1] int32, host: the first of each request's rows of T and of L."""
        ...

    def run(self, q: torch.Tensor, kv: LayerKV, out: torch.Tensor, *, scale: float) -> None:
        """q, out: [T, H, D]; kv: [L, K, D] each, of which only the last dim is contiguous."""
        ...


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """prefill: which FlashAttention, where keys and values are in the model's dtype. All else has the second."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    prefill: Literal["fa2", "fa3"]

    @classmethod
    def of(
        cls,
        options: FlashInferOptions,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: str,
        page_size: int,
        compute_capability: tuple[int, int] | None,
    ) -> KernelSettings:
        """Raises `Unsupported` where an option asks for kernels that do not run on such a device."""
        has_fa3 = compute_capability is not None and compute_capability[0] == 9
        if options.prefill == "fa3" and not has_fa3:
            raise Unsupported(f"prefill=fa3 is for compute capability 9.x, and the device is {device}; use prefill=auto")
        return cls(
            device=device,
            dtype=dtype,
            kv_dtype=torch.float8_e4m3fn if kv_dtype == FP8 else dtype,
            page_size=page_size,
            prefill="fa3" if has_fa3 and options.prefill != "fa2" else "fa2",
        )


class Kernels(Protocol):
    """Makes wrappers. workspace: uint8, for results of split requests; shared by all wrappers of a stream."""

    def decode(self, workspace: torch.Tensor) -> Wrapper:
        """One row for each request."""
        ...

    def captured(self, workspace: torch.Tensor, pages: PageLists) -> Wrapper:
        """The same for a CUDA graph. pages: on the device, always read there; the caller copies to it before each `plan`."""
        ...

    def captured_prefix(self, workspace: torch.Tensor, pages: PageLists) -> Wrapper:
        """`prefix` for a CUDA graph, likewise."""
        ...

    def prefill(self, workspace: torch.Tensor) -> Wrapper:
        """Any number of rows, which are the last of their request's keys; causal."""
        ...

    def ragged(self, workspace: torch.Tensor) -> RaggedWrapper:
        """The same."""
        ...

    def verify(self, workspace: torch.Tensor) -> Wrapper:
        """A few rows of each request, the last of its keys; causal. Long requests are split, as in decoding."""
        ...

    def captured_verify(self, workspace: torch.Tensor, pages: PageLists) -> Wrapper:
        """The same for a CUDA graph, see `captured`. Requests without rows and keys may be behind the others."""
        ...

    def prefix(self, workspace: torch.Tensor) -> Wrapper:
        """Every row sees all keys of its request."""
        ...

    def gather(self, kv: LayerKV, lists: GatherLists, into: LayerKV) -> None:
        """Copy pages of kv to their rows of `into`, [L, K, D] each and contiguous, in its dtype."""
        ...

    def merge(self, out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
        """Fold another part of the keys into `out` [T, H, D] and `lse` [T, H], in place."""
        ...


class LoadKernels(Protocol):
    """Loads what these cuts need, which may compile. Raises `Unsupported` with the reason where that is not possible."""

    def __call__(self, settings: KernelSettings, cuts: Sequence[Cut]) -> Kernels: ...
