"""Weights that are stored in a format, as plain numbers: what kernels for a scheme are tested against.

N rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from enginery.contracts.weights import Scheme, StoredWeight
from enginery.errors import Unsupported

FLOAT8_BLOCKS: Final = Scheme(values="f8e4m3", block=(128, 128))  # DeepSeek-V3 (arXiv:2412.19437, section 3.3)


def widen(stored: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight in `dtype`: [N, C], or [E, N, C]. Raises `Unsupported` for schemes that the core cannot compute."""
    check_widens(stored.scheme)
    return (stored.values.float() * spread(stored.scales, stored.values.shape, stored.scheme.block)).to(dtype)


def check_widens(scheme: Scheme) -> None:
    """Raises `Unsupported` for a scheme that the core cannot compute."""
    if scheme.values != "f8e4m3" or scheme.zeros:
        raise Unsupported(f"the core has no reference for weights in {scheme}; a plugin's kernels have to take them")


def spread(scales: torch.Tensor, shape: Sequence[int], block: tuple[int, int]) -> torch.Tensor:
    """[.., N / rows, C / columns] -> [.., N, C], the blocks' scales for each value. Blocks at the ends may be smaller."""
    rows, columns = shape[-2:]
    by_row, by_column = block[0] or rows, block[1] or columns
    return scales.repeat_interleave(by_row, -2)[..., :rows, :].repeat_interleave(by_column, -1)[..., :columns]


def one_expert(stored: StoredWeight, expert: int) -> StoredWeight:
    """[N, C] of [E, N, C]."""
    return StoredWeight(scheme=stored.scheme, values=stored.values[expert], scales=stored.scales[expert])
