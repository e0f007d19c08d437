"""From what a layer gives `advance` to what its rule takes. S rows, H value heads, K, V: dims of a head's key and value."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from enginery.api import RecurrentFacts, RecurrentWeights

_LEAST_LENGTH = 1e-6  # squared: of what queries and keys are divided by


class Rows(NamedTuple):
    """q, k: [S, H, K], v: [S, H, V], log_decay: [S, H, K or 1], beta: [S, H] of the delta rule; skipped: [S, H, V], added to the
    output. All float32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor | None
    skipped: torch.Tensor | None


def rows_of(mixed: torch.Tensor, gates: torch.Tensor, facts: RecurrentFacts, weights: RecurrentWeights) -> Rows:
    """mixed: [S, C], after the convolution; gates: [S, G]."""
    mixed, gates = mixed.float(), gates.float()
    widths, heads = facts.mixed_widths, facts.value_heads
    if facts.ssm:
        v, k, q = mixed.split_with_sizes(widths[::-1], dim=-1)
    else:
        q, k, v = mixed.split_with_sizes(widths, dim=-1)
    v = v.reshape(-1, heads, facts.value_dim)  # [S, H, V]
    skipped = None if weights.skip is None else weights.skip[:, None] * v
    if facts.rule == "scan":
        steps, *keys = gates.split_with_sizes([heads, facts.key_dim, facts.key_dim], dim=-1)
        k, q = (part[:, None].expand(-1, heads, -1) for part in keys)
        return Rows(q, k, v * steps[..., None], -_rate(weights) * steps[..., None], None, skipped)
    group = heads // facts.key_heads
    q, k = (part.reshape(-1, facts.key_heads, facts.key_dim).repeat_interleave(group, dim=1) for part in (q, k))  # [S, H, K]
    beta: torch.Tensor | None = None
    if facts.rule == "delta":
        q, k = (part * (part.square().sum(-1, keepdim=True) + _LEAST_LENGTH).rsqrt() for part in (q, k))
        beta = (gates[:, heads * facts.key_dim :] if facts.decay == "channel" else gates[:, :heads]).sigmoid()
    log_decay, stepped = _decays(gates, facts, weights)
    return Rows(q, k, v * stepped if facts.ssm and stepped is not None else v, log_decay, beta, skipped)


def _rate(weights: RecurrentWeights) -> torch.Tensor:
    assert weights.a_log is not None, "a decay that is not constant has a_log"
    return weights.a_log.exp()


def _decays(gates: torch.Tensor, facts: RecurrentFacts, weights: RecurrentWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[S, H, K or 1]: the logarithm of the decay, and the steps that it is made of, where it is."""
    heads = facts.value_heads
    if facts.decay == "constant":
        assert weights.log_decay is not None, "a constant decay is a weight"
        return weights.log_decay.expand(len(gates), -1)[..., None], None
    raw = gates[:, : heads * facts.key_dim] if facts.decay == "channel" else gates[:, -heads:]
    raw = raw.reshape(len(raw), heads, raw.shape[-1] // heads)
    if weights.dt_bias is not None:
        raw = raw + weights.dt_bias.view(heads, -1)
    rate = _rate(weights)[:, None]
    if facts.gate_floor is not None:
        return facts.gate_floor * (rate * raw).sigmoid(), None
    steps = F.softplus(raw).clamp(*facts.step_limits)
    return -rate * steps, steps
