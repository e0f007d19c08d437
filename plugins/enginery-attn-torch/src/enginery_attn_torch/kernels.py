"""Attention over keys and values that are already in one piece, in two ways.

B batch, K KV heads, G query heads per KV head, S queries, L keys, D head dim, V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    """torch's fused attention. q: [B, K, G, S, D], k: [B, K, L, D], v: [B, K, L, V], mask: [B, S, L] bool -> [B, K, G, S, V].

    A single query per head needs no causality, so its heads of one group are taken for queries and the keys are read once.
    Several run on kernels that want keys and values equally wide, or else keep all scores: the narrower ones get zeros.
    """
    batch, kv_heads, group, num_queries, dim = q.shape
    if num_queries == 1:
        seen = None if mask is None else mask[:, None]  # [B, 1, 1, L]
        return F.scaled_dot_product_attention(q.squeeze(3), k, v, attn_mask=seen, scale=scale).unsqueeze(3)
    seen = None if mask is None else mask[:, None]  # [B, 1, S, L]
    heads = q.reshape(batch, kv_heads * group, num_queries, dim)
    value_dim = v.shape[-1]
    if value_dim != dim:
        heads, k, v = (F.pad(part, (0, max(dim, value_dim) - part.shape[-1])) for part in (heads, k, v))
    out = F.scaled_dot_product_attention(
        heads, k, v, attn_mask=seen, is_causal=causal and mask is None, scale=scale, enable_gqa=group > 1
    )
    return out[..., :value_dim].reshape(batch, kv_heads, group, num_queries, value_dim)


def explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The formula, in float32 or better: softmax(softcap(q k^T scale) + mask, sinks) v. Shapes as in `fused`; sinks: [K * G].

    Soft cap: Gemma 2, arXiv:2408.00118. Sinks: a logit per head that takes probability and carries no value, gpt-oss model card.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bkgsd,bkld->bkgsl", q.to(work), k.to(work)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    num_queries, num_keys = scores.shape[-2:]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    elif causal:
        ahead = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).triu(1 + num_keys - num_queries)
        scores = scores.masked_fill(ahead, float("-inf"))
    if sinks is not None:
        _, kv_heads, group, _, _ = q.shape
        column = sinks.to(work).view(1, kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("bkgsl,bkld->bkgsd", weights, v.to(work)).to(q.dtype)
