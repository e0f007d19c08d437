"""The rules of recurrent layers in plain torch: a token of each of several requests, or consecutive tokens of one.

B requests, H heads, C tokens of a chunk, K key dim, V value dim, W taps of a convolution. Everything is float32.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

_FORGETS_ALL: Final = -104.0  # its exponential is zero in float32; -inf would make sums of logarithms undefined


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """One token of each request. q, k: [B, H, K], v: [B, H, V], log_decay: [B, H, K or 1]; state: [B, H, V, K], updated in place.

    beta: [B, H] of the delta rule, None of the linear one. Returns [B, H, V].
    """
    state.mul_(log_decay.exp()[:, :, None])
    if beta is not None:
        v = beta[..., None] * (v - (state @ k[..., None]).squeeze(-1))
    state.addcmul_(v[..., None], k[..., None, :])
    return (state @ q[..., None]).squeeze(-1) * scale


def chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Consecutive tokens of one request, by the linear rule with a decay for each head. q, k: [H, C, K], v: [H, C, V], log_decay:
    [H, C]; state: [H, V, K], updated in place. Returns [H, C, V].

    With b the running sum of g, o_i = scale (exp(b_i) S q_i + sum over j <= i of exp(b_i - b_j) (q_i k_j) v_j): the chunkwise form
    of arXiv:2312.06635. No exponent is positive. The sums are float64, because their differences cancel.
    """
    total = log_decay.double().clamp_(min=_FORGETS_ALL).cumsum(-1)  # [H, C]
    between = (total[:, :, None] - total[:, None, :]).tril_()  # [H, C, C]; above the diagonal 0, and nothing is seen there
    scores = ((q @ k.transpose(1, 2)) * between.float().exp_()).tril_()
    out = scores @ v + (q @ state.transpose(1, 2)) * total.float().exp()[..., None]  # [H, C, V]
    left = (total[:, -1:] - total).float().exp()  # [H, C]: what of each token is left at the end
    state.mul_(total[:, -1, None, None].float().exp()).baddbmm_(v.transpose(1, 2), k * left[..., None])
    return out * scale


def convolve(windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, silu: bool) -> torch.Tensor:
    """Each channel's last W inputs, [.., W, channels], times weight [channels, W] -> [.., channels]."""
    made = (windows * weight.float().T).sum(-2)
    if bias is not None:
        made = made + bias.float()
    return F.silu(made) if silu else made
