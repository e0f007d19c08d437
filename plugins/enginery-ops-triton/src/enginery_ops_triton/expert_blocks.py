"""Sizes of the blocks that the kernels of experts.py and experts_float4.py work in, measured on H200s.

From the sweeps of docs/benchmarks/kernels_moe.py and kernels_moe_float4.py; for single pairs from chains of routers and experts of
Qwen3-Next and Kimi-Linear, and from whole steps of gpt-oss-120b (docs/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from enginery_ops_triton.kernels.launch import next_power_of_2
from enginery_ops_triton.shared_memory import HOPPER_BYTES, fitting_stages

WIDE_TILES: Final = ((16, 12), (32, 26), (64, 58))
FLOAT8_TILES: Final = ((16, 12), (32, 36), (64, math.inf))
FLOAT4_TILES: Final = ((16, 12), (32, 25), (64, 64))
"""Pairs of a tile, and up to how many of an expert on average tiles of so many are the fastest."""
LARGEST_TILE: Final = 128
PARTS: Final = {torch.bfloat16: 2, torch.float16: 3}
"""In float8, that an activation is the sum of: kernels/experts_float8.py."""


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Outputs and columns that a program of so many warps takes at once.

    ahead: how many of these blocks are on their way together.
    """

    n: int
    k: int
    num_warps: int
    ahead: int


@dataclass(frozen=True, kw_only=True)
class PairBlocks:
    """For few pairs of a token and an expert: each reads its own weights."""

    gate_up: RowBlock
    down: RowBlock


@dataclass(frozen=True, kw_only=True)
class ProductBlock:
    """Rows and columns of the weight in a program's block, blocks in flight, tiles that go through the weights together.

    Of weights in MXFP4 alone: split: programs that share the columns. registers: of a thread, at the most, so that more programs
    fit on a multiprocessor; None: as many as the compiler takes.
    """

    n: int
    k: int
    num_warps: int
    stages: int
    group: int = 8
    split: int = 1
    registers: int | None = None


@dataclass(frozen=True, kw_only=True)
class TileBlocks:
    """For more pairs: sorted by expert, m of them share its weights. described: blocks are loaded by tensor descriptors (TMA).

    few: tiles of no more pairs are computed as tiles of so many; 0: none are.
    """

    m: int
    gate_up: ProductBlock
    down: ProductBlock
    described: bool = False
    few: int = 0


@dataclass(frozen=True, kw_only=True)
class Float4Blocks:
    """For weights in MXFP4, whose blocks have all 128 columns of a group.

    alone: each pair of a token and an expert is a tile. few: see `TileBlocks`. direct: weights go from memory to registers, as
    kernels/experts_float4_few.py has it; a warp then has 16 rows, or 32.
    """

    m: int
    gate_up: ProductBlock
    down: ProductBlock
    alone: bool = False
    few: int = 0
    direct: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Experts, a model's columns, an expert's inner size; the types of x and of the weights.

    has_descriptors: whether those can load the weights. has_direct: whether `Float4Blocks` may be direct in bfloat16. available:
    bytes of shared memory that a program can have.
    """

    num_experts: int
    columns: int
    inner: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    has_descriptors: bool = False
    has_direct: bool = False
    available: int = HOPPER_BYTES


def blocks_for(num_pairs: int, top_k: int, sizes: ExpertSizes) -> PairBlocks | TileBlocks:
    """Pairs read their own weights while few of them share an expert."""
    if num_pairs <= max(top_k, sizes.num_experts // 4):
        dtype = sizes.weight_dtype
        if dtype.itemsize == 1:
            return _float8_pairs(top_k, sizes)
        warps = 2 if sizes.columns * dtype.itemsize % 1024 else 1
        return PairBlocks(
            gate_up=_rows(sizes.columns, dtype, num_warps=warps, width=1024, ahead=5, whole=sizes.inner),
            down=_down_rows(sizes.inner, dtype, top_k=top_k),
        )
    wide = sizes.weight_dtype is sizes.dtype
    m = _pairs_of_tile(num_pairs, sizes.num_experts, WIDE_TILES if wide else FLOAT8_TILES)
    if sizes.dtype is torch.float32:  # without tensor cores, so in registers
        block = ProductBlock(n=32, k=32, num_warps=4, stages=2)
        return TileBlocks(m=min(m, 32), gate_up=block, down=block)
    if not wide:
        return _of_parts(m, sizes)
    return _of_large_tiles(m, sizes) if m > 32 else _of_small_tiles(m)


def _of_parts(m: int, sizes: ExpertSizes) -> TileBlocks:
    """Of float8 weights, with all columns of a scale in a block. From the sweep in docs/benchmarks/kernels-moe-parts.json."""
    column_bytes = PARTS[sizes.dtype] * m  # of x

    def block(rows: int, stages: int, *, weights: int = 1) -> ProductBlock:
        fitting = fitting_stages(stages, 128 * (weights * rows + column_bytes), sizes.available, in_registers=0)
        return _groups(rows, num_warps=4, stages=fitting)

    return TileBlocks(m=m, gate_up=block(64, 3, weights=2), down=block(128, 4 if m == 16 else 3), few=16 if m > 16 else 0)


def _of_small_tiles(m: int) -> TileBlocks:
    if m == 32:
        return TileBlocks(m=m, gate_up=_half_group(64, num_warps=4, stages=4), down=_half_group(128, num_warps=4, stages=4))
    block = ProductBlock(n=64, k=128, num_warps=4, stages=3)
    return TileBlocks(m=m, gate_up=block, down=block)


def _of_large_tiles(m: int, sizes: ExpertSizes) -> TileBlocks:
    block_bytes = 64 * (m + 256) * sizes.dtype.itemsize  # gates and ups are as many rows as down's
    stages = fitting_stages(4, block_bytes, sizes.available, in_registers=0 if sizes.has_descriptors else 1)
    gate_up = _half_group(128, num_warps=8, stages=stages)
    down = _half_group(128, num_warps=4, stages=stages) if m == 64 else _half_group(256, num_warps=8, stages=stages)
    return TileBlocks(m=m, gate_up=gate_up, down=down, described=sizes.has_descriptors, few=32)


def float4_blocks_for(num_pairs: int, top_k: int, sizes: ExpertSizes) -> Float4Blocks:
    """Tiles of 32 pairs and more have a smaller kind beside them, for what experts have left."""
    m = _pairs_of_tile(num_pairs, sizes.num_experts, FLOAT4_TILES)
    if sizes.dtype is torch.float32:  # without tensor cores, so in registers
        block = _groups(32, num_warps=4, stages=2)
        return Float4Blocks(m=min(m, 32), gate_up=block, down=block)
    alone = num_pairs <= max(top_k, sizes.num_experts // 16)  # hardly two of an expert
    if sizes.has_direct and sizes.dtype is torch.bfloat16 and m == 16:
        return _direct_blocks(alone=alone, few=3 * num_pairs <= 16 * sizes.num_experts)
    if alone:
        gate_up, down = _groups(64, num_warps=2, stages=3, split=3), _groups(128, num_warps=4, stages=3, split=6)
        return Float4Blocks(m=8, gate_up=gate_up, down=down, alone=True)
    if m == 16:
        block = _groups(128, num_warps=4, stages=3, registers=96)  # five programs a multiprocessor, not four
        return Float4Blocks(m=m, gate_up=block, down=block)
    block = _groups(128, num_warps=4 if m <= 64 else 8, stages=3)
    return Float4Blocks(m=m, gate_up=block, down=block, few=16 if m == 32 else 32)


def _pairs_of_tile(num_pairs: int, num_experts: int, tiles: Sequence[tuple[int, float]]) -> int:
    return next((m for m, most in tiles if num_pairs <= most * num_experts), LARGEST_TILE)


def _half_group(rows: int, *, num_warps: int, stages: int) -> ProductBlock:
    """Of so many rows and 64 columns."""
    return ProductBlock(n=rows, k=64, num_warps=num_warps, stages=stages)


def _direct_blocks(*, alone: bool, few: bool) -> Float4Blocks:
    """few: tiles of 8 have room. From the sweep in docs/benchmarks/kernels-float4-few.json."""
    if alone:
        gate_up, down = _groups(64, num_warps=4, stages=6), _groups(64, num_warps=4, stages=4, split=4)
        return Float4Blocks(m=8, gate_up=gate_up, down=down, alone=True, direct=True)
    if few:
        gate_up, down = _groups(128, num_warps=4, stages=3), _groups(64, num_warps=4, stages=3)
        return Float4Blocks(m=8, gate_up=gate_up, down=down, direct=True)
    block = _groups(128, num_warps=4, stages=2, registers=128)
    return Float4Blocks(m=16, gate_up=block, down=block, few=8, direct=True)


def _groups(rows: int, *, num_warps: int, stages: int, split: int = 1, registers: int | None = None) -> ProductBlock:
    """Of so many rows and a group of columns."""
    return ProductBlock(n=rows, k=128, num_warps=num_warps, stages=stages, split=split, registers=registers)


def _down_rows(inner: int, dtype: torch.dtype, *, top_k: int) -> RowBlock:
    """Whole rows of half of the experts ahead, 16 bytes a thread, as many of each as a program has warps. Others: one row."""
    row_bytes = inner * dtype.itemsize
    if dtype.itemsize == 2 and row_bytes in (512, 1024, 2048):
        return RowBlock(n=row_bytes // 512, k=inner, num_warps=row_bytes // 512, ahead=-(-top_k // 2))
    return _rows(inner, dtype, num_warps=1, width=512 if row_bytes <= 1024 else 1024, ahead=9, num_rows=top_k)


def _rows(
    columns: int, dtype: torch.dtype, *, num_warps: int, width: int, ahead: int, num_rows: int = 1, whole: int = 128
) -> RowBlock:
    """A row for each warp; width: of a block, in bytes. At most so many blocks are ahead, and as many each time.

    num_rows: how many are gone through as one. whole: how many rows a whole number of blocks has.
    """
    k = min(width // dtype.itemsize, next_power_of_2(columns))
    n = min(num_warps * width // (dtype.itemsize * k), 128)
    return RowBlock(n=_dividing(n, whole), k=k, num_warps=num_warps, ahead=_evenly(num_rows * -(-columns // k), ahead))


def _float8_pairs(top_k: int, sizes: ExpertSizes) -> PairBlocks:
    """Four rows a warp, which share what is made of x and scales: a weight takes 4 to 5 instructions so, and 9 with one row.

    Blocks have one row of scales each, so rows are a whole number of them.
    """
    gate_up_k, down_k = (min(256, next_power_of_2(columns)) for columns in (sizes.columns, sizes.inner))
    return PairBlocks(
        gate_up=RowBlock(n=_dividing(8, sizes.inner), k=gate_up_k, num_warps=2, ahead=_evenly(-(-sizes.columns // gate_up_k), 2)),
        down=RowBlock(n=4, k=down_k, num_warps=1, ahead=_evenly(top_k * -(-sizes.inner // down_k), 8)),
    )


def _dividing(n: int, whole: int) -> int:
    """n, or the largest part of it by powers of two that divides the whole."""
    while whole % n:
        n //= 2
    return n


def _evenly(count: int, most: int) -> int:
    """As many of them each time, no more than so many."""
    return -(-count // -(-count // most))
