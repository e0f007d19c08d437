"""The operations a model is made of, as a table of functions. The core has a torch reference for each; plugins offer faster ones.

T tokens, N rows, H query heads, K KV heads, D head dim, R rotary dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from enginery.contracts.versions import ApiVersion

if TYPE_CHECKING:
    import torch

    from enginery.contracts.attention import Reason


class LinearFn(Protocol):
    """y = x W^T + b with W and b bound: [N, in] -> [N, out]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class OpTable:
    """One function per operation, chosen at start.

    bind_linear(weight [out, in], bias [out] or None): takes ownership of the weight and may repack it.
    rms_norm(x [N, C], weight [C], eps): over the last dimension, in float32 inside.
    add_rms_norm(x, residual, weight, eps): adds x into the residual; returns (normed, new residual).
    rotary(q [T, H, D], k [T, K, D], cos [T, R/2], sin [T, R/2]): rotates the first R dims of each head, halves convention (GPT-NeoX).
    gated_silu(x [N, 2C]): silu(first half) * second half.
    embedding(ids [T], weight [V, C]).
    """

    bind_linear: Callable[[torch.Tensor, torch.Tensor | None], LinearFn]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    gated_silu: Callable[[torch.Tensor], torch.Tensor]
    embedding: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class OpNeeds:
    """Where the operations will run."""

    device: str
    dtype: str
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """A set of faster operations on offer: any subset of `OpTable`'s fields.

    load: imports what is heavy and returns the functions by field name.
    """

    name: str
    api: ApiVersion
    priority: int
    provides: tuple[str, ...]
    refuse: Callable[[OpNeeds], list[Reason]]
    load: Callable[[OpNeeds], Mapping[str, Callable[..., Any]]]
