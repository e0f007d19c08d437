"""Mixture-of-experts products with weights in MXFP4 (arXiv:2310.10537), which are widened in registers.

Weights come as `float4_groups.Float4Groups` has them: 128 columns of a row are 32 words of 16 bits, of which word j has the values
of columns j, 32 + j, 64 + j and 96 + j. So the words give four matrices [rows, 32] of adjacent columns, each with one scale for a
row, and nothing moves between threads: a value's sign and its other three bits go to where a bfloat16 has its sign and the ends of
exponent and mantissa, two words at a time in a register, and a power of two makes up for the bias of exponents and scales.

    bit     15   14   13   12   11 10   9   8 7 6   5 4 3   2 1 0       s: sign, e: exponent, m: mantissa, each of column 0 to 3
    of     s 0  s 3  e 3  s 1  e3 m3  s 2  eem 0   eem 1   eem 2

Up to BLOCK_M pairs of an expert share one reading of its weights: see kernels/experts.py for pairs, tiles and their order.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.expert_tiles import add_product, store_inner, tile_and_block, tile_at
from enginery_ops_triton.kernels.gates import biased
from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import INTERPRETED, round_to

GROUP_COLUMNS = tl.constexpr(128)
LANES = tl.constexpr(32)  # words of a group of columns
ROWS_PAIRED = tl.constexpr(8)  # gates, and then as many ups

FIRST = tl.constexpr("and.b32 $0, $1, 0x81C081C0;")
SECOND = tl.constexpr("{.reg .b32 a; shl.b32 a, $1, 3; and.b32 $0, a, 0x81C081C0;}")
THIRD = tl.constexpr("{.reg .b32 a; shl.b32 a, $1, 6; and.b32 $0, a, 0x81C081C0;}")
FOURTH = tl.constexpr(
    "{.reg .b32 a, b, c; shl.b32 a, $1, 1; and.b32 a, a, 0x80008000; shr.b32 b, $1, 5; and.b32 b, b, 0x01000100; "
    "shr.b32 c, $1, 4; and.b32 c, c, 0x00C000C0; or.b32 a, a, b; or.b32 $0, a, c;}"
)


@kernel
def tiny(words: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    """The values at a place times 2 ** -126, bfloat16, from words of int16: two in a register."""
    if PLACE == 0:
        return tl.inline_asm_elementwise(FIRST, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
    elif PLACE == 1:  # noqa: RET505 - the compiler takes only one of them
        return tl.inline_asm_elementwise(SECOND, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
    elif PLACE == 2:
        return tl.inline_asm_elementwise(THIRD, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(FOURTH, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)


@kernel
def tiny_float32(words: tl.tensor, PLACE: tl.constexpr) -> tl.tensor:
    """The same as float32, without assembly."""
    bits = words.to(tl.int32)
    if PLACE < 3:
        bits = (bits << (3 * PLACE)) & 0x81C0
    else:
        bits = ((bits << 1) & 0x8000) | ((bits >> 5) & 0x0100) | ((bits >> 4) & 0x00C0)
    return (bits << 16).to(tl.float32, bitcast=True)


@kernel
def widened_float4(
    words: tl.tensor, exponents: tl.tensor, PLACE: tl.constexpr, NARROW: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """[N, 32] of DTYPE. words: [N, 32] int16; exponents: [N] int32, a byte for each place. NARROW: see `Float4Groups`."""
    if NARROW and DTYPE.is_bf16() and not INTERPRETED:
        bits = (exponents << 7 if PLACE % 2 == 0 else exponents >> 1) & 0x7F807F80  # of two places
        bits = (bits if PLACE < 2 else bits >> 16).to(tl.int16)
        return tiny(words, PLACE) * bits.to(tl.bfloat16, bitcast=True)[:, None]
    else:  # noqa: RET505 - the compiler takes only one of them
        values = tiny_float32(words, PLACE)
        if not NARROW:
            values *= 8.507059173023462e37  # 2 ** 126
        scale = (((exponents >> (8 * PLACE)) & 0xFF) << 23).to(tl.float32, bitcast=True)
        return round_to(values * scale[:, None], DTYPE)


@kernel
def product(
    words: tl.tensor,
    exponents: tl.tensor,
    x_at: tl.tensor,
    row: tl.tensor,
    wanted: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
) -> tl.tensor:
    """Rows of one expert's weight times x, [N, BLOCK_M] float32; of SPLIT parts of the columns, the program's.

    words: to those of the expert, [G, ROWS, 32]; exponents: [G, ROWS]; row: [N], which exist; x_at: [32, BLOCK_M], to the first
    columns of x, which has COLUMNS; behind them weights are zero. wanted: [BLOCK_M]; of others x is zero instead of a copy, which
    all programs would read from the same lines of the cache at once.
    """
    lane = tl.arange(0, LANES)
    words_at = words + row[:, None] * LANES + lane[None, :]
    exponents_at = exponents + row
    acc = tl.zeros((row.shape[0], BLOCK_M), dtype=tl.float32)
    groups: tl.constexpr = (COLUMNS + GROUP_COLUMNS - 1) // GROUP_COLUMNS
    each: tl.constexpr = (groups + SPLIT - 1) // SPLIT
    begin = tl.program_id(1) * each
    for step in tl.range(0, each, num_stages=STAGES):
        group = begin + step
        there = group if groups % SPLIT == 0 else tl.minimum(group, groups - 1)  # behind the last, x is zero
        some = tl.load(words_at + there * (ROWS * LANES))
        scales = tl.load(exponents_at + there * ROWS)
        for place in tl.static_range(4):
            start = group * GROUP_COLUMNS + place * LANES
            inside = (start + lane < COLUMNS)[:, None] & wanted[None, :]
            x_part = tl.load(x_at + start, mask=inside, other=0.0)
            acc = add_product(acc, widened_float4(some, scales, place, NARROW, x_part.dtype), x_part)
    return acc


@kernel
def store_gated(
    acc: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    m: tl.tensor,
    end: tl.tensor,
    block_n: tl.tensor,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """acc: [BLOCK_N, BLOCK_M], gates and ups by turns, of pairs m < end; out: [pairs, INNER]."""
    apart = tl.reshape(acc, (BLOCK_N // (2 * ROWS_PAIRED), 2, ROWS_PAIRED, BLOCK_M))
    gate, up = tl.split(tl.permute(apart, (0, 2, 3, 1)))  # each [BLOCK_N / 16, 8, BLOCK_M]
    gate = tl.reshape(gate, (BLOCK_N // 2, BLOCK_M))
    up = tl.reshape(up, (BLOCK_N // 2, BLOCK_M))
    n = block_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    store_inner(gate, up, bias, out, expert, m, end, n, INNER, BIASED, KIND, ALPHA, LIMIT)


@kernel
def gate_up_tile(
    x: tl.tensor,
    words: tl.tensor,
    exponents: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block_n: tl.tensor,
    x_stride: int,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
    ALONE: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """What a program of `gate_up_of_float4` does with pairs [first, end) of an expert, BLOCK_M at the most."""
    rows: tl.constexpr = (INNER + ROWS_PAIRED - 1) // ROWS_PAIRED * ROWS_PAIRED * 2
    groups: tl.constexpr = (COLUMNS + GROUP_COLUMNS - 1) // GROUP_COLUMNS
    m = first + tl.arange(0, BLOCK_M)
    known = tl.minimum(m, end - 1)
    token = (known if ALONE else tl.load(order + known)) // TOP_K
    row = tl.minimum(block_n * BLOCK_N + tl.arange(0, BLOCK_N), rows - 1)
    acc = product(
        words + expert * (groups * rows * LANES),
        exponents + expert * (groups * rows),
        x + token[None, :].to(tl.int64) * x_stride + tl.arange(0, LANES)[:, None],
        row,
        m < end,
        rows,
        COLUMNS,
        BLOCK_M,
        STAGES,
        SPLIT,
        NARROW,
    )
    last = True
    if SPLIT > 1:
        at = partial + m[None, :].to(tl.int64) * (SPLIT * rows) + row[:, None]
        kept = (m < end)[None, :] & (row >= 0)[:, None]
        tl.store(at + tl.program_id(1) * rows, acc, mask=kept)
        tl.debug_barrier()  # all threads have stored before one of them says so
        last = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for other in range(SPLIT):
                acc += tl.load(at + other * rows, mask=kept, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tl.program_id(0), 0)
    if last:
        store_gated(acc, bias, out, expert, m, end, block_n, INNER, BLOCK_M, BLOCK_N, BIASED, KIND, ALPHA, LIMIT)


@kernel
def gate_up_of_float4(
    x: tl.tensor,
    words: tl.tensor,
    exponents: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    x_stride: int,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
    ALONE: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [T, COLUMNS] with its row stride; order, tiles: see `sorting.sort_pairs`; out: [pairs, INNER] in that order.

    Weights have eight gates and their eight ups by turns, the last ones filled up: BLOCK_N of those rows give BLOCK_N / 2 outputs.
    ALONE: each pair is a tile, tiles are the pairs' experts, and order is not read. SPLIT: programs that share the columns. Each
    leaves its sums in `partial` [pairs, SPLIT, rows] float32; the last to arrive adds them up in a fixed order and clears its
    counter in `arrived` [tiles and blocks] for the next launch. FEW: tiles of no more pairs, as the last ones of experts are, take
    products of that size; 0: all are alike.
    """
    rows: tl.constexpr = (INNER + ROWS_PAIRED - 1) // ROWS_PAIRED * ROWS_PAIRED * 2
    release_successor(CHAINED)
    tile, block_n = tile_and_block((rows + BLOCK_N - 1) // BLOCK_N, GROUP)
    wait_for_predecessor(CHAINED)
    expert, first, end = tile_at(tiles, tile, ALONE)
    for size in tl.static_range(2):
        fits = (end - first <= FEW) if size == 0 else (end - first > FEW)
        if (FEW > 0 or size == 1) and (expert >= 0) & fits:
            gate_up_tile(
                x,
                words,
                exponents,
                bias,
                order,
                out,
                partial,
                arrived,
                expert,
                first,
                end,
                block_n,
                x_stride,
                INNER,
                COLUMNS,
                TOP_K,
                FEW if size == 0 else BLOCK_M,
                BLOCK_N,
                STAGES,
                SPLIT,
                NARROW,
                ALONE,
                BIASED,
                KIND,
                ALPHA,
                LIMIT,
            )


@kernel
def down_tile(
    x: tl.tensor,
    words: tl.tensor,
    exponents: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block_n: tl.tensor,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
    ALONE: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """What a program of `down_of_float4` does with pairs [first, end) of an expert, BLOCK_M at the most."""
    groups: tl.constexpr = (INNER + GROUP_COLUMNS - 1) // GROUP_COLUMNS
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = first + tl.arange(0, BLOCK_M)
    known = tl.minimum(m, end - 1)
    acc = product(
        words + expert * (groups * COLUMNS * LANES),
        exponents + expert * (groups * COLUMNS),
        x + known[None, :].to(tl.int64) * INNER + tl.arange(0, LANES)[:, None],
        tl.minimum(n, COLUMNS - 1),
        m < end,
        COLUMNS,
        INNER,
        BLOCK_M,
        STAGES,
        SPLIT,
        NARROW,
    )
    part = tl.program_id(1)
    acc = biased(acc, (bias + expert * COLUMNS + n)[:, None], ((n < COLUMNS) & (part == 0))[:, None], BIASED)
    pair = (known if ALONE else tl.load(order + known)).to(tl.int64)
    result = tl.trans(round_to(acc, out.dtype.element_ty))  # [BLOCK_M, BLOCK_N]
    out_at = out + (pair[:, None] * SPLIT + part) * COLUMNS + n[None, :]
    tl.store(out_at, result, mask=(m[:, None] < end) & (n[None, :] < COLUMNS))


@kernel
def down_of_float4(
    x: tl.tensor,
    words: tl.tensor,
    exponents: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
    ALONE: tl.constexpr,
    BIASED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [pairs, INNER], from `gate_up_of_float4`; out: [pairs, SPLIT, COLUMNS], in the pairs' own order, sums of SPLIT parts."""
    release_successor(CHAINED)
    tile, block_n = tile_and_block((COLUMNS + BLOCK_N - 1) // BLOCK_N, GROUP)
    wait_for_predecessor(CHAINED)
    expert, first, end = tile_at(tiles, tile, ALONE)
    for size in tl.static_range(2):
        fits = (end - first <= FEW) if size == 0 else (end - first > FEW)
        if (FEW > 0 or size == 1) and (expert >= 0) & fits:
            down_tile(
                x,
                words,
                exponents,
                bias,
                order,
                out,
                expert,
                first,
                end,
                block_n,
                INNER,
                COLUMNS,
                FEW if size == 0 else BLOCK_M,
                BLOCK_N,
                STAGES,
                SPLIT,
                NARROW,
                ALONE,
                BIASED,
            )
