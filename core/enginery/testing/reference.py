"""The formulas, in float64 on the host, one request at a time. Slow and plain: what everything else is compared with.

S rows of the request's last tokens, L tokens of the request, H query heads, K KV heads, D head dim, V value dim.
"""

from __future__ import annotations

import math

import torch

from enginery.contracts.attention import AttnLayerFacts, LatentFacts
from enginery.contracts.memory import RecurrentFacts, RecurrentWeights


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    facts: AttnLayerFacts,
    scale: float,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [S, H, D], k: [L, K, D], v: [L, K, V] -> softmax attention [S, H, V] and its natural log-sum-exp [S, H].

    The S rows are the last of the L tokens. Rows that see nothing: 0 and -inf. The log-sum-exp leaves sinks out.
    """
    q, k, v = (part.double().cpu() for part in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [L, H, .]
    scores = torch.einsum("shd,lhd->hsl", q, k) * scale
    if facts.softcap is not None:
        scores = facts.softcap * torch.tanh(scores / facts.softcap)
    row = torch.arange(len(k) - len(q), len(k))[:, None]  # [S, 1]
    key = torch.arange(len(k))
    if causal:
        scores = scores.masked_fill(key > row, float("-inf"))
    if facts.sliding_window is not None:
        scores = scores.masked_fill(key <= row - facts.sliding_window, float("-inf"))
    lse = scores.logsumexp(-1)  # [H, S]
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double().cpu()[:, None])
    weights = (scores - total[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hsl,lhv->shv", weights, v), lse.T


def expand_latents(latents: torch.Tensor, kv_b: torch.Tensor, facts: LatentFacts) -> tuple[torch.Tensor, torch.Tensor]:
    """[L, 1, R + P], [H, N + V, R] -> every head's keys [L, H, N + P] and values [L, H, V]."""
    latents, kv_b = latents.double().cpu().squeeze(1), kv_b.double().cpu()
    made = torch.einsum("lr,hnr->lhn", latents[:, : facts.rank], kv_b)
    rope = latents[:, None, facts.rank :].expand(-1, len(kv_b), -1)
    return torch.cat((made[..., : facts.nope_dim], rope), dim=-1), made[..., facts.nope_dim :]


def recurrence(
    mixed: torch.Tensor, gates: torch.Tensor, *, facts: RecurrentFacts, weights: RecurrentWeights, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """mixed: [L, C], gates: [L, HV], raw -> outputs [L, HV, V] and the state after the last, [HV, V, D]. Of rule "linear"."""
    assert facts.rule == "linear", f"there is no formula here for rule {facts.rule}"
    width = facts.key_heads * facts.key_dim
    group = facts.value_heads // facts.key_heads
    q, k, v = torch.split(mixed.double().cpu(), [width, width, facts.value_heads * facts.value_dim], dim=-1)
    q, k = (part.reshape(-1, facts.key_heads, facts.key_dim).repeat_interleave(group, dim=1) for part in (q, k))
    v = v.reshape(-1, facts.value_heads, facts.value_dim)
    decay = log_decay(gates.double().cpu(), facts, weights).exp()  # [L, HV]
    state, out = torch.zeros(*v.shape[1:], k.shape[-1], dtype=torch.float64), torch.empty_like(v)
    for token in range(len(q)):
        state = decay[token, :, None, None] * state + v[token, :, :, None] * k[token, :, None, :]
        out[token] = scale * torch.einsum("hd,hvd->hv", q[token], state)
    return out, state


def log_decay(gates: torch.Tensor, facts: RecurrentFacts, weights: RecurrentWeights) -> torch.Tensor:
    """[L, HV] float64 -> the same, as `RecurrentFacts` says."""
    if facts.decay == "constant":
        assert weights.log_decay is not None, "a constant decay is a weight"
        return weights.log_decay.double().cpu().expand(len(gates), -1)
    slope = 1.0 if weights.a_log is None else weights.a_log.double().cpu().exp()
    raw = gates if weights.dt_bias is None else gates + weights.dt_bias.double().cpu()
    return (-slope * torch.nn.functional.softplus(raw)).clamp(min=-math.inf if facts.gate_floor is None else facts.gate_floor)
