"""Which batches compile every kernel: variants of a kernel differ by tile, by feature and by what a layer is, not by lengths."""

from __future__ import annotations

from typing import NamedTuple

from enginery.api import KVGeometry, Phase
from enginery_attn_triton.prefixes import MIN_SHARED_TOKENS
from enginery_attn_triton.tiling import SMALL_TILE, TALL_REQUESTS


class BatchShape(NamedTuple):
    """A batch whose pages may all be the scratch page. q_lens, kv_lens: [B]."""

    phase: Phase
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


def warm_up_batches(geometry: KVGeometry, *, max_requests: int) -> tuple[BatchShape, ...]:
    """One decoding step, whose requests seem to share a prefix and are split; prefills for both sizes of tile.

    MLA prefills with keys and values made from latents have variants for the prefix too.
    """
    num_decoding = min(max_requests, TALL_REQUESTS)
    length = MIN_SHARED_TOKENS + geometry.page_size + 1
    decoding = BatchShape(Phase.DECODE, (1,) * num_decoding, (length,) * num_decoding)
    prefixes = (0, geometry.page_size) if any(layer.latent is not None for layer in geometry.layers) else (0,)
    prefills = [BatchShape(Phase.PREFILL, (new,), (prefix + new,)) for prefix in prefixes for new in (2, SMALL_TILE + 1)]
    return (decoding, *prefills)
