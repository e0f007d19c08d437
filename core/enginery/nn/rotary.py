"""Rotary position embeddings (RoFormer, arXiv:2104.09864) with every scaling that transformers knows for Llama-like models.

The table has a row per position, so a position's angle never depends on what else is in the batch or on how a prompt is cut.
Two methods of transformers look at the longest sequence of a forward instead, and are pinned here:

- `dynamic` (NTK): position p uses the base for a sequence of p + 1 tokens, which is what cached decoding in transformers does;
- `longrope`: the long factors if the engine serves contexts beyond `original_max_position_embeddings`, else the short ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch

from enginery.checkpoint.decoder_shape import RopeShape
from enginery.errors import CheckpointError, OutOfMemory

_BLOCK: Final = 1 << 16  # positions whose angles, in float32, are in the host's memory at once
Frequencies = tuple[torch.Tensor, float]


def rotary_table(rope: RopeShape, num_positions: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[num_positions, R]: the cosines of each position's R/2 angles, then their sines, times the method's attention factor.

    Raises `CheckpointError`, and `OutOfMemory` for more positions than there is memory for.
    """
    if not isinstance(rope.kind, str) or rope.kind not in _METHODS:
        raise CheckpointError(f"config.json asks for rope type {rope.kind!r}; known are {', '.join(sorted(_METHODS))}")
    width = _rows(rope, range(1), num_positions).shape[1]
    try:
        table = torch.empty(num_positions, width, dtype=dtype, device=device)
        for begin in range(0, 0 if device.type == "meta" else num_positions, _BLOCK):
            block = range(begin, min(begin + _BLOCK, num_positions))
            table[block.start : block.stop] = _rows(rope, block, num_positions).to(device=device, dtype=dtype)
    except RuntimeError as error:  # torch's, of the host or the device
        raise OutOfMemory(f"rotary angles of {num_positions:,} positions do not fit into memory; take --max-model-len") from error
    return table


def _rows(rope: RopeShape, block: range, num_positions: int) -> torch.Tensor:
    """[B, R] of these positions of so many, float32."""
    positions = torch.arange(block.start, block.stop, dtype=torch.float32)
    try:
        inv_freq, attention_factor = _METHODS[rope.kind](rope, positions, num_positions)  # [R/2], or [B, R/2]
    except (TypeError, ValueError, ArithmeticError) as error:
        stated = dict(rope.parameters)
        raise CheckpointError(f"config.json has rope parameters {stated!r}, which are not usable: {error}") from error
    angles = positions[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor  # [B, R]


def _parameter(rope: RopeShape, key: str) -> float:
    value = rope.parameters.get(key)
    if value is None:
        raise CheckpointError(f"config.json has rope type {rope.kind!r} without its parameter {key!r}")
    return float(value)


def _plain(theta: float | torch.Tensor, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _dynamic(rope: RopeShape, positions: torch.Tensor, num_positions: int) -> Frequencies:
    factor, dim = _parameter(rope, "factor"), rope.rotary_dim
    length = (positions + 1).clamp(min=rope.max_positions)
    theta = rope.theta * (factor * length / rope.max_positions - (factor - 1)) ** (dim / (dim - 2))
    return _plain(theta[:, None], dim), 1.0  # [B, R/2]


def _llama3(rope: RopeShape, positions: torch.Tensor, num_positions: int) -> Frequencies:
    """Llama 3.1's model card: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = (_parameter(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(rope.parameters.get("original_max_position_embeddings") or rope.max_positions)
    inv_freq = _plain(rope.theta, rope.rotary_dim)
    wavelength = 2 * math.pi / inv_freq
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    stretched = torch.where(wavelength > trained / low, inv_freq / factor, inv_freq)
    between = (wavelength <= trained / low) & (wavelength >= trained / high)
    return torch.where(between, blended, stretched), 1.0


def _yarn(rope: RopeShape, positions: torch.Tensor, num_positions: int) -> Frequencies:
    """The frequencies of YaRN (arXiv:2309.00071), and the factor of its attention."""
    dim, theta = rope.rotary_dim, rope.theta
    trained = float(rope.parameters.get("original_max_position_embeddings") or rope.max_positions)
    factor = float(rope.parameters.get("factor") or rope.max_positions / trained)

    def boundary(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = boundary(float(rope.parameters.get("beta_fast") or 32))
    high = boundary(float(rope.parameters.get("beta_slow") or 1))
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    extrapolated = _plain(theta, dim)
    inv_freq = extrapolated / factor * ramp + extrapolated * (1 - ramp)
    return inv_freq, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeShape, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    stated = rope.parameters.get("attention_factor")
    if stated is not None:
        return float(stated)
    one, all_dims = rope.parameters.get("mscale"), rope.parameters.get("mscale_all_dim")
    return mscale(float(one)) / mscale(float(all_dims)) if one and all_dims else mscale(1.0)


def _longrope(rope: RopeShape, positions: torch.Tensor, num_positions: int) -> Frequencies:
    """The frequencies of LongRoPE (arXiv:2402.13753), and the factor of its attention."""
    trained = float(rope.parameters.get("original_max_position_embeddings") or rope.max_positions)
    which = "long_factor" if num_positions > trained else "short_factor"
    stretch = rope.parameters.get(which)
    if stretch is None or len(stretch) != rope.rotary_dim // 2:
        raise CheckpointError(f"config.json has rope type 'longrope', whose {which!r} must list {rope.rotary_dim // 2} numbers")
    factor = float(rope.parameters.get("factor") or rope.max_positions / trained)
    stated = rope.parameters.get("attention_factor")
    implied = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    inv_freq = _plain(rope.theta, rope.rotary_dim) / torch.tensor(stretch, dtype=torch.float32)
    return inv_freq, implied if stated is None else float(stated)


_METHODS: dict[str, Callable[[RopeShape, torch.Tensor, int], Frequencies]] = {
    "default": lambda rope, *_: (_plain(rope.theta, rope.rotary_dim), 1.0),
    "linear": lambda rope, *_: (_plain(rope.theta, rope.rotary_dim) / _parameter(rope, "factor"), 1.0),
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
