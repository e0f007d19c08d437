"""The operations a model is made of, as a table of functions. The core has a torch reference for each; plugins offer faster ones.

T tokens, N rows or heads, D head dim, R rotary dim, C columns, V vocabulary.
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

    bind_linear(weight [out, in], bias [out] or None): may repack the weight; keeps what it needs of it.
    rms_norm(x [N, C], weight [C], eps): over the last dimension, in float32 inside.
    add_rms_norm(x [N, C], residual [N, C], weight, eps): adds x into residual in place, returns the norm of the sum.
    qk_norm_rotary(qk [T, N, D], weight [N, D] or None, eps, cos_sin [T, R]): in place; RMSNorm over each head if there is a weight,
    then rotates the first R dims, halves convention (GPT-NeoX).
    gated_silu(x [N, 2C]): silu(first half) * second half.
    """

    bind_linear: Callable[[torch.Tensor, torch.Tensor | None], LinearFn]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    qk_norm_rotary: Callable[[torch.Tensor, torch.Tensor | None, float, torch.Tensor], None]
    gated_silu: Callable[[torch.Tensor], torch.Tensor]


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
