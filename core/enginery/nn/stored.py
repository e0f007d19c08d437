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
FLOAT4_BLOCKS: Final = Scheme(values="mxfp4", block=(1, 32))  # Microscaling (arXiv:2310.10537)
_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what E2M1 holds, by its code; then the same below 0
FLOAT4_VALUES: Final = (*_POSITIVE, *(-value for value in _POSITIVE))


def widen(stored: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight in `dtype`: [N, C], or [E, N, C]. Raises `Unsupported` for schemes that the core cannot compute."""
    check_widens(stored.scheme)
    values = _of_halves(stored.values) if stored.scheme.values == "mxfp4" else stored.values.float()
    return (values * spread(stored.scales.float(), values.shape, stored.scheme.block)).to(dtype)


def _of_halves(packed: torch.Tensor) -> torch.Tensor:
    """[.., N, C / 2] bytes -> [.., N, C] float32, the low half of a byte first."""
    values = torch.tensor(FLOAT4_VALUES, device=packed.device)
    return torch.stack((values[(packed & 15).int()], values[(packed >> 4).int()]), dim=-1).flatten(-2)


def check_widens(scheme: Scheme) -> None:
    """Raises `Unsupported` for a scheme that the core cannot compute."""
    if scheme.values not in ("f8e4m3", "i8", "mxfp4") or scheme.zeros:
        raise Unsupported(f"the core has no reference for weights in {scheme}; a plugin's kernels have to take them")


def spread(scales: torch.Tensor, shape: Sequence[int], block: tuple[int, int]) -> torch.Tensor:
    """[.., N / rows, C / columns] -> [.., N, C], the blocks' scales for each value. Blocks at the ends may be smaller."""
    rows, columns = shape[-2:]
    by_row, by_column = block[0] or rows, block[1] or columns
    return scales.repeat_interleave(by_row, -2)[..., :rows, :].repeat_interleave(by_column, -1)[..., :columns]


def one_expert(stored: StoredWeight, expert: int) -> StoredWeight:
    """[N, C] of [E, N, C]."""
    return StoredWeight(scheme=stored.scheme, values=stored.values[expert], scales=stored.scales[expert])
