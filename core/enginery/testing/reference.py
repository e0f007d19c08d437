"""The formulas, in float64 on the host, one request at a time. Slow and plain: what everything else is compared with.

S rows of the request's last tokens, L tokens of the request, H query heads, K KV heads, D head dim, V value dim.
"""

from __future__ import annotations

import torch

from enginery.contracts.attention import AttnLayerFacts, LatentFacts


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


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [L, H, D], k: [L, H, D + 1], v: [L, H, V] -> outputs [L, H, V] and the state after the last, [H, D, V]."""
    q, k, v = (part.double().cpu() for part in (q, k, v))
    keys, decay = k[..., :-1], k[..., -1].exp()  # [L, H, D], [L, H]
    state, out = torch.zeros(*keys.shape[1:], v.shape[-1], dtype=torch.float64), torch.empty_like(v)
    for token in range(len(q)):
        state = decay[token, :, None, None] * state + keys[token, :, :, None] * v[token, :, None, :]
        out[token] = scale * torch.einsum("hd,hdv->hv", q[token], state)
    return out, state
