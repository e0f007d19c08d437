"""The formulas, in float64 on the host, one request at a time. Slow and plain: what everything else is compared with.

S rows of the request's last tokens, L tokens of the request, H query heads, K KV heads, D head dim, V value dim.
"""

from __future__ import annotations

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
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """mixed: [L, C], gates: [L, G], raw, of one whole request -> outputs [L, HV, V] and the states after the last.

    States by name, a page each; see `RecurrentFacts`.
    """
    mixed, gates = mixed.double().cpu(), gates.double().cpu()
    states: dict[str, torch.Tensor] = {}
    if facts.conv_kernel > 1:
        padded = torch.cat((mixed.new_zeros(facts.conv_kernel - 1, mixed.shape[1]), mixed))
        states["conv"] = padded[len(mixed) :]
        mixed = _convolved(padded, facts, weights)
    if facts.rule == "conv":
        return mixed.reshape(-1, facts.value_heads, facts.value_dim), states
    q, k, v = _heads(mixed, gates, facts)
    log_decay, steps = _decays(gates, facts, weights)
    written = v * steps if facts.ssm or facts.rule == "scan" else v
    at = slice(facts.value_heads) if facts.decay != "channel" else slice(facts.value_heads * facts.key_dim, None)
    beta = gates[:, at].sigmoid() if facts.rule == "delta" else None
    state, out = torch.zeros(*v.shape[1:], k.shape[-1], dtype=torch.float64), torch.empty_like(v)
    decays, keys, queries = log_decay.exp()[:, :, None, :], k[:, :, None, :], scale * q[..., None]
    for token in range(len(q)):
        state = decays[token] * state
        new = written[token, ..., None]  # [HV, V, 1]
        if beta is not None:
            new = beta[token, :, None, None] * (new - state @ k[token, ..., None])
        state = state + new * keys[token]
        out[token] = (state @ queries[token])[..., 0]
    states["matrix"] = state
    return out if weights.skip is None else out + weights.skip.double().cpu()[:, None] * v, states


def _convolved(padded: torch.Tensor, facts: RecurrentFacts, weights: RecurrentWeights) -> torch.Tensor:
    """[W - 1 + L, C] -> [L, C]."""
    assert weights.conv is not None, "a layer with a convolution has its weight"
    windows = padded.unfold(0, facts.conv_kernel, 1)  # [L, C, W]
    made = (windows * weights.conv.double().cpu()).sum(-1)
    if weights.conv_bias is not None:
        made = made + weights.conv_bias.double().cpu()
    return made * made.sigmoid() if facts.conv_silu else made


def _heads(mixed: torch.Tensor, gates: torch.Tensor, facts: RecurrentFacts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each value head's queries and keys, [L, HV, K], and values, [L, HV, V]."""
    widths, heads = facts.mixed_widths, facts.value_heads
    q, k, v = torch.split(mixed, list(widths), dim=-1)
    if facts.ssm:
        v, k, q = torch.split(mixed, list(reversed(widths)), dim=-1)
    v = v.reshape(-1, heads, facts.value_dim)
    if facts.rule == "scan":
        k, q = (part[:, None].expand(-1, heads, -1) for part in gates[:, heads:].chunk(2, dim=-1))
        return q, k, v
    q, k = (part.reshape(-1, facts.key_heads, facts.key_dim).repeat_interleave(heads // facts.key_heads, dim=1) for part in (q, k))
    if facts.rule == "delta":
        q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    return q, k, v


def _decays(gates: torch.Tensor, facts: RecurrentFacts, weights: RecurrentWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of each token's decay, [L, HV, K or 1], and the steps it is made of, where it is."""
    heads = facts.value_heads
    if facts.decay == "constant":
        assert weights.log_decay is not None, "a constant decay is a weight"
        decay = weights.log_decay.double().cpu().expand(len(gates), -1)[..., None]
        return decay, decay
    assert weights.a_log is not None, "a decay that is not constant has a_log"
    rate = weights.a_log.double().cpu().exp()
    if facts.rule == "scan":
        steps = gates[:, :heads, None]  # [L, HV, 1]
        return -rate * steps, steps
    raw = gates[:, : heads * facts.key_dim] if facts.decay == "channel" else gates[:, -heads:]
    raw = raw.reshape(len(raw), heads, facts.key_dim if facts.decay == "channel" else 1)
    if weights.dt_bias is not None:
        raw = raw + weights.dt_bias.double().cpu().view(heads, -1)
    if facts.gate_floor is not None:
        return facts.gate_floor * (rate[:, None] * raw).sigmoid(), raw
    steps = torch.nn.functional.softplus(raw).clamp(*facts.step_limits)
    return -rate[:, None] * steps, steps
