"""Mixture-of-experts products of float8 weights on matrix units that multiply float8: no weight is widened.

A float8 (e4m3) has 4 significant bits, a bfloat16 8, a float16 11. So an activation is a sum of PARTS of them, two or three: the
nearest one, and then what is left. A power of two for each 128 columns of a row makes the largest number there one between 128 and
256; a sum of parts is off by 2 ** -9 at most, a float8's smallest step. Products of the parts add up in the matrix units over the
columns of one block of the weight's scales; these sums times both scales add up in float32.

Up to BLOCK_M pairs of an expert share one reading of its weights: see kernels/experts.py for pairs, tiles and their order.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.expert_tiles import loaded, store_inner, store_outputs, tile_and_block, tile_at
from enginery_ops_triton.kernels.experts import SCALE_BLOCK
from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import add_product

LARGEST_POWER = tl.constexpr(7)  # of the largest number of a block: it is below 256, and a float8's is 448
LEAST_EXPONENT = tl.constexpr(27)  # of a float32's bits, 2 ** -100, in place of a smaller largest number's
NAN = tl.constexpr(0x7FC00000)  # the bits of a float32


@kernel
def of_four_bits(values: tl.tensor) -> tl.tensor:
    """The nearest float32 of so many significant bits, ties to even.

    Not by a float8 and back: where its two instructions meet, the ptxas of Triton 3.6 lets the second read another register.
    """
    bits = values.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)


@kernel
def split_rows(
    x: tl.tensor,
    parts: tl.tensor,
    scales: tl.tensor,
    x_stride: int,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [rows, COLUMNS] with its row stride -> parts [rows, PARTS, COLUMNS] float8, scales [rows, blocks of columns] float32.

    A program has so many BLOCKS of a row. The scale of one with an infinity or NaN is NaN.
    """
    release_successor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * SCALE_BLOCK + tl.arange(0, SCALE_BLOCK)[None, :]
    inside = column < COLUMNS
    wait_for_predecessor(CHAINED)
    left = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    most = tl.max(left.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # of the bits, where infinity and NaN are the largest
    power = tl.maximum(most >> 23, LEAST_EXPONENT) - LARGEST_POWER
    left *= ((254 - power) << 23).to(tl.float32, bitcast=True)[:, None]
    for part in tl.static_range(PARTS):
        nearest = of_four_bits(left)
        left -= nearest
        tl.store(parts + (row * PARTS + part) * COLUMNS + column, nearest.to(parts.dtype.element_ty), mask=inside)
    num_blocks: tl.constexpr = (COLUMNS + SCALE_BLOCK - 1) // SCALE_BLOCK
    scale = tl.where(power < 255 - LARGEST_POWER, power << 23, NAN).to(tl.float32, bitcast=True)
    tl.store(scales + row * num_blocks + block, scale, mask=block < num_blocks)


@kernel
def scaled(sums: tl.tensor, x_scales: tl.tensor, scale_at: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """sums: [N, M] of one block of columns; x_scales: [M]; scale_at: to the rows' scales, [N], or to the one that all have."""
    if ALIGNED:
        return sums * (x_scales * tl.load(scale_at))[None, :]
    else:  # noqa: RET505 - the compiler takes only one of them
        return sums * (x_scales[None, :] * tl.load(scale_at)[:, None])


@kernel
def gate_up_tile(
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block_n: tl.tensor,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """What a program of `gate_up_of_parts` does with pairs [first, end) of an expert, BLOCK_M at the most."""
    whole: tl.constexpr = COLUMNS // SCALE_BLOCK * SCALE_BLOCK == COLUMNS
    num_blocks: tl.constexpr = (COLUMNS + SCALE_BLOCK - 1) // SCALE_BLOCK
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, SCALE_BLOCK)
    m = first + tl.arange(0, BLOCK_M)
    token = tl.load(order + tl.minimum(m, end - 1)) // TOP_K
    row = tl.minimum(n, INNER - 1)
    at = weight + (expert * (2 * INNER) + row)[:, None] * COLUMNS + k[None, :]
    x_at = x + token[None, :].to(tl.int64) * (PARTS * COLUMNS) + k[:, None]
    x_scale_at = x_scale + token * num_blocks
    aligned: tl.constexpr = INNER % BLOCK_N == 0 and SCALE_BLOCK % BLOCK_N == 0
    scale_row = block_n * BLOCK_N if aligned else row
    scale_at = scale + expert * ((2 * INNER + SCALE_BLOCK - 1) // SCALE_BLOCK * num_blocks)
    gate_scale = scale_at + scale_row // SCALE_BLOCK * num_blocks
    up_scale = scale_at + (INNER + scale_row) // SCALE_BLOCK * num_blocks
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        start = block * SCALE_BLOCK
        left = start + k < COLUMNS
        gate_block = loaded(at + start, left[None, :], whole)
        up_block = loaded(at + start + INNER * COLUMNS, left[None, :], whole)
        gates = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        ups = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            x_part = loaded(x_at + start + part * COLUMNS, left[:, None], whole)
            gates = add_product(gates, gate_block, x_part)
            ups = add_product(ups, up_block, x_part)
        x_scales = tl.load(x_scale_at + block)
        gate += scaled(gates, x_scales, gate_scale + block, aligned)
        up += scaled(ups, x_scales, up_scale + block, aligned)
    store_inner(gate, up, bias, out, expert, m, end, n, INNER, BIASED, KIND, ALPHA, LIMIT)


@kernel
def gate_up_of_parts(
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x, x_scale: of the tokens, from `split_rows`; order, tiles: see `sorting.sort_pairs`; out: [pairs, INNER] in that order.

    FEW: tiles of no more pairs, as the last ones of experts are, take products of that size; 0: all are alike.
    """
    release_successor(CHAINED)
    tile, block_n = tile_and_block((INNER + BLOCK_N - 1) // BLOCK_N, GROUP)
    wait_for_predecessor(CHAINED)
    expert, first, end = tile_at(tiles, tile, False)
    for size in tl.static_range(2):
        fits = (end - first <= FEW) if size == 0 else (end - first > FEW)
        if (FEW > 0 or size == 1) and (expert >= 0) & fits:
            gate_up_tile(
                x,
                x_scale,
                weight,
                scale,
                bias,
                order,
                out,
                expert,
                first,
                end,
                block_n,
                INNER,
                COLUMNS,
                TOP_K,
                PARTS,
                FEW if size == 0 else BLOCK_M,
                BLOCK_N,
                STAGES,
                BIASED,
                KIND,
                ALPHA,
                LIMIT,
            )


@kernel
def down_tile(
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block_n: tl.tensor,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """What a program of `down_of_parts` does with pairs [first, end) of an expert, BLOCK_M at the most."""
    whole: tl.constexpr = INNER // SCALE_BLOCK * SCALE_BLOCK == INNER
    num_blocks: tl.constexpr = (INNER + SCALE_BLOCK - 1) // SCALE_BLOCK
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, SCALE_BLOCK)
    m = first + tl.arange(0, BLOCK_M)
    known = tl.minimum(m, end - 1)
    row = tl.minimum(n, COLUMNS - 1)
    at = weight + (expert * COLUMNS + row)[:, None] * INNER + k[None, :]
    x_at = x + known[None, :].to(tl.int64) * (PARTS * INNER) + k[:, None]
    x_scale_at = x_scale + known * num_blocks
    aligned: tl.constexpr = COLUMNS % BLOCK_N == 0 and SCALE_BLOCK % BLOCK_N == 0
    scale_row = block_n * BLOCK_N if aligned else row
    scale_at = scale + (expert * ((COLUMNS + SCALE_BLOCK - 1) // SCALE_BLOCK) + scale_row // SCALE_BLOCK) * num_blocks
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        start = block * SCALE_BLOCK
        left = start + k < INNER
        weights = loaded(at + start, left[None, :], whole)
        sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            sums = add_product(sums, weights, loaded(x_at + start + part * INNER, left[:, None], whole))
        acc += scaled(sums, tl.load(x_scale_at + block), scale_at + block, aligned)
    store_outputs(acc, bias, order, out, expert, known, m, end, n, COLUMNS, BIASED)


@kernel
def down_of_parts(
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x, x_scale: of the pairs, from `split_rows`; out: [pairs, COLUMNS], in the pairs' own order. FEW: as there."""
    release_successor(CHAINED)
    tile, block_n = tile_and_block((COLUMNS + BLOCK_N - 1) // BLOCK_N, GROUP)
    wait_for_predecessor(CHAINED)
    expert, first, end = tile_at(tiles, tile, False)
    for size in tl.static_range(2):
        fits = (end - first <= FEW) if size == 0 else (end - first > FEW)
        if (FEW > 0 or size == 1) and (expert >= 0) & fits:
            down_tile(
                x,
                x_scale,
                weight,
                scale,
                bias,
                order,
                out,
                expert,
                first,
                end,
                block_n,
                INNER,
                COLUMNS,
                PARTS,
                FEW if size == 0 else BLOCK_M,
                BLOCK_N,
                STAGES,
                BIASED,
            )
