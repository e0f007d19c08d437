"""Which strategies an MLA prefill may take, from capabilities and sizes alone, and the pieces that each cuts it into.

B requests; R, N, P as in `contracts/attention.py`, V value dim of a head.
"""

from __future__ import annotations

import numpy as np
import torch

from enginery.contracts.attention import Capabilities, LatentFacts
from enginery.contracts.latent import KVPiece, PrefillStrategy


def strategies_to_try(
    facts: LatentFacts,
    capabilities: Capabilities,
    *,
    asked: PrefillStrategy | None,
    chunk_tokens: int,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
) -> tuple[PrefillStrategy, ...]:
    """The best first; absorbed is the last, because no backend can deny it.

    q_lens, kv_lens: [B] int32, host. A one-shot prefill makes keys and values of all tokens at once, so at most `chunk_tokens`.
    """
    queries, keys = q_lens.numpy().astype(np.float64), kv_lens.numpy().astype(np.float64)
    num_keys = float(keys.sum())
    one_shot = (PrefillStrategy.ONE_SHOT,) if num_keys <= chunk_tokens else ()
    chunked = (PrefillStrategy.CHUNKED,) if capabilities.lse_base is not None else ()
    if asked is PrefillStrategy.ONE_SHOT:
        return (*(one_shot or chunked), PrefillStrategy.ABSORBED)
    if asked is PrefillStrategy.CHUNKED:
        return (*chunked, PrefillStrategy.ABSORBED)
    pairs = float((queries * (keys - (queries - 1) / 2)).sum())  # of a row and a key that it sees
    absorbed = pairs * (2 * facts.rank + facts.rope_dim)
    made = num_keys * facts.rank * (facts.nope_dim + facts.value_dim)
    ragged = pairs * (facts.nope_dim + facts.rope_dim + facts.value_dim) + made
    if asked is PrefillStrategy.ABSORBED or not capabilities.mla_ragged or absorbed <= ragged:
        return (PrefillStrategy.ABSORBED,)
    return (*one_shot, *chunked, PrefillStrategy.ABSORBED)


def cut_pieces(
    q_lens: torch.Tensor, kv_lens: torch.Tensor, strategy: PrefillStrategy, *, chunk_tokens: int
) -> tuple[tuple[KVPiece, ...], KVPiece | None]:
    """The chunks, and the piece of the step's own tokens, or None where the one chunk holds them too. q_lens, kv_lens: [B], host.

    Chunks of a prefix are equally long for every request, at most `chunk_tokens` together, the last of each shorter or empty.
    """
    prefix = kv_lens - q_lens  # [B]
    if strategy is PrefillStrategy.ONE_SHOT:
        return (KVPiece(index=0, starts_cpu=torch.zeros_like(kv_lens), lens_cpu=kv_lens, causal=True),), None
    length = max(1, chunk_tokens // len(q_lens))
    count = -(-int(prefix.max()) // length)
    chunks = []
    for index in range(count):
        lens = (prefix - index * length).clamp(0, length)
        starts = torch.full_like(prefix, index * length)
        chunks.append(KVPiece(index=index, starts_cpu=starts, lens_cpu=lens, causal=False))
    return tuple(chunks), KVPiece(index=count, starts_cpu=prefix, lens_cpu=q_lens, causal=True)
