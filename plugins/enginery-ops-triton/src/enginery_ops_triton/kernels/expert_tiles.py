"""Products of experts for pairs that are sorted by expert, up to BLOCK_M of them by a program: see experts.py.

Weights stand on the left of a product, so that a few pairs waste little of the matrix units.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.experts import SCALE_BLOCK
from enginery_ops_triton.kernels.gates import biased, gated
from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import INTERPRETED, round_to


@kernel
def tile_and_block(NUM_BLOCKS: tl.constexpr, GROUP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Of a program: GROUP tiles share a block of weights, and then the next, so that both stay in the cache."""
    number = tl.program_id(0)
    span: tl.constexpr = GROUP * NUM_BLOCKS
    first = number // span * GROUP
    rows = tl.minimum(tl.num_programs(0) // NUM_BLOCKS - first, GROUP)
    return first + number % span % rows, number % span // rows


@kernel
def tile_at(tiles: tl.tensor, tile: tl.tensor, ALONE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Its expert, -1 if it has no pairs; the places of its first pair and behind its last. ALONE: tiles has each pair's expert."""
    if ALONE:
        return tl.load(tiles + tile, cache_modifier=".cg").to(tl.int64), tile, tile + 1
    else:  # noqa: RET505 - the compiler takes only one of them
        return tl.load(tiles + tile * 3).to(tl.int64), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)


@kernel
def loaded(at: tl.tensor, left: tl.tensor, WHOLE: tl.constexpr) -> tl.tensor:
    """A block, with zeros where nothing is left. WHOLE: all of it is there."""
    if WHOLE:
        return tl.load(at)
    else:  # noqa: RET505 - the compiler takes only one of them
        return tl.load(at, mask=left, other=0.0)


@kernel
def widened(block: tl.tensor, scale_at: tl.tensor, SCALED: tl.constexpr) -> tl.tensor:
    """SCALED: to float32, which x then has. scale_at: [rows], of the block's columns."""
    if SCALED:
        return block.to(tl.float32) * tl.load(scale_at)[:, None]
    else:  # noqa: RET505 - the compiler takes only one of them, and only one may have this type
        return block


@kernel
def add_product(acc: tl.tensor, a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """acc + a b in float32, of float32 too: not in tf32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@kernel
def store_inner(
    gate: tl.tensor,
    up: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    m: tl.tensor,
    end: tl.tensor,
    n: tl.tensor,
    INNER: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """gate, up: [N, M] float32, outputs n of pairs m < end; out: [pairs, INNER]. Without a gate, up is not read."""
    bias_at, inside = (bias + expert * (2 * INNER) + n)[:, None], (n < INNER)[:, None]
    gate = biased(gate, bias_at, inside, BIASED)
    up = biased(up, bias_at + INNER, inside, BIASED)
    result = tl.trans(round_to(gated(gate, up, KIND, ALPHA, LIMIT), out.dtype.element_ty))  # [BLOCK_M, BLOCK_N]
    tl.store(out + m[:, None].to(tl.int64) * INNER + n[None, :], result, mask=(m[:, None] < end) & (n[None, :] < INNER))


@kernel
def store_outputs(
    acc: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    known: tl.tensor,
    m: tl.tensor,
    end: tl.tensor,
    n: tl.tensor,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """acc: [N, M] float32, outputs n of pairs m < end; out: [pairs, COLUMNS], in their own order. known: m, or the last pair."""
    acc = biased(acc, (bias + expert * COLUMNS + n)[:, None], (n < COLUMNS)[:, None], BIASED)
    pair = tl.load(order + known).to(tl.int64)
    result = tl.trans(round_to(acc, out.dtype.element_ty))  # [BLOCK_M, BLOCK_N]
    tl.store(out + pair[:, None] * COLUMNS + n[None, :], result, mask=(m[:, None] < end) & (n[None, :] < COLUMNS))


@kernel
def gate_up_tile(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
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
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> None:
    """What a program of `gate_up_of_tiles` does with pairs [first, end) of an expert, BLOCK_M at the most."""
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    parts: tl.constexpr = 1 if KIND == "squared" else 2
    m = first + tl.arange(0, BLOCK_M)
    token = tl.load(order + tl.minimum(m, end - 1)) // TOP_K
    row = tl.minimum(n, INNER - 1)
    gate_row = expert * (parts * INNER) + block_n * BLOCK_N
    if not DESCRIBED:
        gate_at = weight + (expert * (parts * INNER) + row)[:, None] * COLUMNS + k[None, :]
    x_at = x + token[None, :].to(tl.int64) * x_stride + k[:, None]
    scale_columns: tl.constexpr = (COLUMNS + SCALE_BLOCK - 1) // SCALE_BLOCK
    scale_at = scale + expert * ((2 * INNER + SCALE_BLOCK - 1) // SCALE_BLOCK * scale_columns)
    gate_scale = scale_at + row // SCALE_BLOCK * scale_columns
    up_scale = scale_at + (INNER + row) // SCALE_BLOCK * scale_columns
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in tl.range(0, COLUMNS, BLOCK_K, num_stages=STAGES):
        left = start + k < COLUMNS
        x_part = loaded(x_at + start, left[:, None], COLUMNS % BLOCK_K == 0)
        if DESCRIBED:
            gate_block = weight.load([gate_row.to(tl.int32), start])
        else:
            gate_block = loaded(gate_at + start, left[None, :], COLUMNS % BLOCK_K == 0)
        of_columns = start // SCALE_BLOCK
        gate = add_product(gate, widened(gate_block, gate_scale + of_columns, SCALED), x_part)
        if parts == 2:
            if DESCRIBED:
                up_block = weight.load([gate_row.to(tl.int32) + INNER, start])
            else:
                up_block = loaded(gate_at + start + INNER * COLUMNS, left[None, :], COLUMNS % BLOCK_K == 0)
            up = add_product(up, widened(up_block, up_scale + of_columns, SCALED), x_part)
    store_inner(gate, up, bias, out, expert, m, end, n, INNER, BIASED, KIND, ALPHA, LIMIT)


@kernel
def gate_up_of_tiles(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    DESCRIBED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [T, COLUMNS] with its row stride; order, tiles: see `sorting.sort_pairs`; out: [pairs, INNER] in that order.

    DESCRIBED: weight is a descriptor of [E 2 INNER, COLUMNS] in blocks of [BLOCK_N, BLOCK_K]. FEW: tiles of no more pairs, as the
    last ones of experts are, take products of that size; 0: all are alike.
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
                weight,
                scale,
                bias,
                order,
                out,
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
                BLOCK_K,
                STAGES,
                SCALED,
                BIASED,
                KIND,
                ALPHA,
                LIMIT,
                DESCRIBED,
            )


@kernel
def down_tile(
    x: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> None:
    """What a program of `down_of_tiles` does with pairs [first, end) of an expert, BLOCK_M at the most."""
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = first + tl.arange(0, BLOCK_M)
    known = tl.minimum(m, end - 1)
    row = tl.minimum(n, COLUMNS - 1)
    first_row = expert * COLUMNS + block_n * BLOCK_N
    if not DESCRIBED:
        at = weight + (expert * COLUMNS + row)[:, None] * INNER + k[None, :]
        x_at = x + known[None, :].to(tl.int64) * INNER + k[:, None]
    scale_columns: tl.constexpr = (INNER + SCALE_BLOCK - 1) // SCALE_BLOCK
    scale_at = scale + (expert * ((COLUMNS + SCALE_BLOCK - 1) // SCALE_BLOCK) + row // SCALE_BLOCK) * scale_columns
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        if DESCRIBED:
            x_part = x.load([first, start]).T
            block = weight.load([first_row.to(tl.int32), start])
        else:
            left = start + k < INNER
            x_part = loaded(x_at + start, left[:, None], INNER % BLOCK_K == 0)
            block = loaded(at + start, left[None, :], INNER % BLOCK_K == 0)
        acc = add_product(acc, widened(block, scale_at + start // SCALE_BLOCK, SCALED), x_part)
    store_outputs(acc, bias, order, out, expert, known, m, end, n, COLUMNS, BIASED)


@kernel
def down_of_tiles(
    x: tl.tensor,
    x_of_few: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [pairs, INNER], from `gate_up_of_tiles`; out: [pairs, COLUMNS], in the pairs' own order. FEW: as there.

    DESCRIBED: x is a descriptor of blocks of [BLOCK_M, BLOCK_K], x_of_few of [FEW, BLOCK_K], weight of [E COLUMNS, INNER] in blocks
    of [BLOCK_N, BLOCK_K]. Otherwise both are x.
    """
    release_successor(CHAINED)
    tile, block_n = tile_and_block((COLUMNS + BLOCK_N - 1) // BLOCK_N, GROUP)
    wait_for_predecessor(CHAINED)
    expert, first, end = tile_at(tiles, tile, False)
    for size in tl.static_range(2):
        fits = (end - first <= FEW) if size == 0 else (end - first > FEW)
        if (FEW > 0 or size == 1) and (expert >= 0) & fits:
            down_tile(
                x_of_few if size == 0 else x,
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
                FEW if size == 0 else BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                STAGES,
                SCALED,
                BIASED,
                DESCRIBED,
            )
