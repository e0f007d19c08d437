"""Plain torch for every operation: correct on every device, and what faster ones are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from enginery.contracts.ops import LinearFn, OpTable


def reference_ops() -> OpTable:
    """The table that plugins override in part."""
    return OpTable(
        bind_linear=bind_linear, rms_norm=rms_norm, add_rms_norm=add_rms_norm, qk_norm_rotary=qk_norm_rotary, gated_silu=gated_silu
    )


def bind_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFn:
    """`F.linear` with its weight bound."""

    def linear(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return linear


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm (arXiv:1910.07467) over the last dimension; weight broadcasts."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of residual + x; residual keeps the sum."""
    return rms_norm(residual.add_(x), weight, eps)


def qk_norm_rotary(qk: torch.Tensor, weight: torch.Tensor | None, eps: float, cos_sin: torch.Tensor) -> None:
    """Norm each head (if there is a weight), then rotate pairs (d, d + R/2) by the position's angle, in place."""
    if weight is not None:
        qk.copy_(rms_norm(qk, weight, eps))
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]  # [T, 1, R/2]
    first, second = qk[..., :half], qk[..., half : 2 * half]  # [T, N, R/2]
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)


def gated_silu(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate, arXiv:2002.05202."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
