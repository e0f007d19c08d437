"""What `OpTable.draw_rows` should give, in float64 by numpy, written apart from the references."""

from __future__ import annotations

import numpy as np
import torch

ONES = np.uint64(0xFFFFFFFF)


def mixed(x: np.ndarray) -> np.ndarray:
    """Of 32 bits each, in uint64: [16 21f0aaad 15 d35a2d97 15]."""
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x21F0AAAD)) & ONES
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0xD35A2D97)) & ONES
    return x ^ (x >> np.uint64(15))


def exponentials(numbers: torch.Tensor, vocab_size: int) -> np.ndarray:
    """[M] float32 -> [M, V]."""
    keys = mixed(numbers.numpy().view(np.uint32).astype(np.uint64))
    tokens = (np.arange(vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B9)) & ONES
    shares = (mixed(keys[:, None] ^ tokens).astype(np.float64) + 0.5) / 2**32
    return -np.log1p(-shares)


def kept_shares(
    logits: torch.Tensor, *, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> torch.Tensor:
    """The probability of each token of a row after the cuts, by a stable sort: [V]."""
    values, order = (logits.double() / temperature).sort(descending=True, stable=True)
    weights = values.softmax(-1)
    if top_k:
        weights[top_k:] = 0
        weights /= weights.sum()
    before = weights.cumsum(-1) - weights
    dropped = (before >= top_p) | (weights < weights[0] * min_p)
    dropped[0] = False
    kept = weights.masked_fill(dropped, 0)
    return torch.zeros_like(weights).scatter(0, order, kept / kept.sum())


def drawn(logits: torch.Tensor, numbers: torch.Tensor, **cut: float) -> tuple[torch.Tensor, torch.Tensor]:
    """From one row with each number: the tokens, [M], and how far each is above the next, [M]."""
    noisy = kept_shares(logits, **cut).log() - torch.from_numpy(np.log(exponentials(numbers, len(logits))))  # type: ignore[arg-type]
    best, tokens = noisy.topk(2)
    return tokens[:, 0], best[:, 0] - best[:, 1]
