"""Mixture-of-experts products: y = down(gated(gate x, up x)) of each of a token's experts, and their weighted sum.

A pair is a token and one of its TOP_K experts; pair = token * TOP_K + place. For few pairs the `_of_pairs` kernels here read the
weights of each pair's expert. For more, sorting.py orders the pairs by expert and cuts each expert's into tiles of BLOCK_M; the
kernels of expert_tiles.py read an expert's weights once for a tile, and `weighted_sum` adds up. Nothing depends on the order in
which programs run.

Weights are [E, 2 INNER, COLUMNS], or without a gate (KIND "squared") [E, INNER, COLUMNS], and [E, COLUMNS, INNER], contiguous.
Float8 weights have a scale for each 128 x 128 (SCALED), and are widened to the type of x, which stays as it is; several pairs of
an expert in 16 bits are experts_float8.py's. Biases, if there are any (BIASED), are [E, 2 INNER] and [E, COLUMNS].
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.gates import biased, gated
from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import round_to
from enginery_ops_triton.kernels.sums_in_lanes import adjacent, in_lanes

SCALE_BLOCK = tl.constexpr(128)
WARP = tl.constexpr(32)  # lanes, whose integers one instruction adds up


@kernel
def row_block(at: tl.tensor, left: tl.constexpr, wanted: tl.tensor, other: tl.tensor, BLOCK_K: tl.constexpr) -> tl.tensor:
    """[N, BLOCK_K] of weights that are read once, if they are wanted, else `other`. left: columns of the rows from there on."""
    if left >= BLOCK_K:
        return tl.load(at, mask=wanted, other=other, eviction_policy="evict_first")
    return tl.load(at, mask=wanted & (tl.arange(0, BLOCK_K) < left)[None, :], other=other, eviction_policy="evict_first")


@kernel
def gate_up_of_pairs(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    NUM_EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    JOINED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [T, COLUMNS] with its row stride; ids: [pairs]; out: [pairs, INNER]. AHEAD blocks of a row are on their way together.

    Programs: tokens, blocks of INNER, which are whole blocks if the weights are scaled, and places, the last first. So those that
    read the same of an expert that all tokens have run side by side, and one of them reads it from memory.

    The JOINED last of a token's experts are expected to be the last of all. Programs of those have their first blocks on their way
    before ids are there, and load others if they are wrong. Lets `down_of_pairs` start only after its own wait: that one reads ids
    ahead of its turn.
    """
    first = tl.program_id(1) * BLOCK_N
    place = TOP_K - 1 - tl.program_id(2)
    pair = tl.program_id(0).to(tl.int64) * TOP_K + place
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    size: tl.constexpr = INNER * COLUMNS
    parts: tl.constexpr = 1 if KIND == "squared" else 2
    at = weight + tl.minimum(n, INNER - 1).to(tl.int64)[:, None] * COLUMNS + k[None, :]
    gates = ()  # type: tuple[tl.tensor, ...]
    ups = ()  # type: tuple[tl.tensor, ...]
    expected = -1
    if JOINED > 0:
        tl.static_assert(parts == 2)
        expected = tl.where(place >= TOP_K - JOINED, NUM_EXPERTS - TOP_K + place, -1)
        row = at + expected.to(tl.int64) * (2 * size)
        for block in tl.static_range(AHEAD):
            gates += (row_block(row + block * BLOCK_K, COLUMNS - block * BLOCK_K, expected >= 0, 0.0, BLOCK_K),)
            ups += (row_block(row + size + block * BLOCK_K, COLUMNS - block * BLOCK_K, expected >= 0, 0.0, BLOCK_K),)
    wait_for_predecessor(CHAINED)
    release_successor(CHAINED)
    expert = tl.load(ids + pair).to(tl.int64)
    row = at + expert * (parts * size)
    x_at = x + tl.program_id(0).to(tl.int64) * x_stride + k
    scale_columns: tl.constexpr = (COLUMNS + SCALE_BLOCK - 1) // SCALE_BLOCK
    scale_at = scale + expert * ((2 * INNER + SCALE_BLOCK - 1) // SCALE_BLOCK * scale_columns)
    gate = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for begin in tl.static_range(0, COLUMNS, AHEAD * BLOCK_K):
        gate_blocks = ()  # type: tuple[tl.tensor, ...]
        up_blocks = ()  # type: tuple[tl.tensor, ...]
        for start in tl.static_range(begin, begin + AHEAD * BLOCK_K, BLOCK_K):
            if begin == 0 and JOINED > 0:
                gate_block, up_block = gates[start // BLOCK_K], ups[start // BLOCK_K]
                gate_blocks += (row_block(row + start, COLUMNS - start, expert != expected, gate_block, BLOCK_K),)
                up_blocks += (row_block(row + size + start, COLUMNS - start, expert != expected, up_block, BLOCK_K),)
            else:
                gate_blocks += (row_block(row + start, COLUMNS - start, expert >= 0, 0.0, BLOCK_K),)
                if parts == 2:
                    up_blocks += (row_block(row + size + start, COLUMNS - start, expert >= 0, 0.0, BLOCK_K),)
        for start in tl.static_range(begin, begin + AHEAD * BLOCK_K, BLOCK_K):
            left = start + k < COLUMNS
            x_gate = tl.load(x_at + start, mask=left, other=0.0).to(tl.float32)
            x_up = x_gate
            if SCALED:  # the rows of a block share their scales
                of_column = (start + k) // SCALE_BLOCK
                x_gate *= tl.load(scale_at + first // SCALE_BLOCK * scale_columns + of_column, mask=left, other=0.0)
                x_up *= tl.load(scale_at + (INNER + first) // SCALE_BLOCK * scale_columns + of_column, mask=left, other=0.0)
            gate += gate_blocks[(start - begin) // BLOCK_K].to(tl.float32) * x_gate[None, :]
            if parts == 2:
                up += up_blocks[(start - begin) // BLOCK_K].to(tl.float32) * x_up[None, :]
    bias_at = bias + expert * (2 * INNER) + n
    gate_sum = biased(tl.sum(gate, axis=1), bias_at, n < INNER, BIASED)
    up_sum = biased(tl.sum(up, axis=1), bias_at + INNER, n < INNER, BIASED)
    result = gated(gate_sum, up_sum, KIND, ALPHA, LIMIT)
    tl.store(out + pair * INNER + n, round_to(result, out.dtype.element_ty), mask=n < INNER)


@kernel
def down_of_pairs(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [pairs, INNER], from `gate_up_of_pairs`; ids, weights: [pairs]; out: [T, COLUMNS]. Programs: tokens, blocks of COLUMNS.

    The rows of a token's experts are gone through as one, of which AHEAD blocks are on their way together. What chose ids and
    weights had ended before its predecessor let it start, so both are read, and the first blocks are on their way, before x is
    waited for. They are read past the first cache, so all at once: with a load for each of them a layer of Qwen3-Next took 5 us
    more, as all programs ask for the same line.
    """
    release_successor(CHAINED)
    first = tl.program_id(1) * BLOCK_N
    token = tl.program_id(0).to(tl.int64)
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(n, COLUMNS - 1)
    steps: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    scale_columns: tl.constexpr = (INNER + SCALE_BLOCK - 1) // SCALE_BLOCK
    at = weight + row.to(tl.int64)[:, None] * INNER + k[None, :]
    scale_at = scale + first // SCALE_BLOCK * scale_columns
    together: tl.constexpr = 1 if SCALED else adjacent(BLOCK_K, weight.dtype.element_ty.primitive_bitwidth)
    acc = tl.zeros((BLOCK_N, BLOCK_K // together), dtype=tl.float32)
    offset = tl.zeros((BLOCK_N,), dtype=tl.float32)  # of the experts' biases
    lane = tl.arange(0, WARP if TOP_K <= WARP else 2 * WARP)
    all_ids = tl.load(ids + token * TOP_K + lane, mask=lane < TOP_K, other=0, cache_modifier=".cg")
    all_weights = tl.load(weights + token * TOP_K + lane, mask=lane < TOP_K, other=0.0, cache_modifier=".cg")
    all_weights = all_weights.to(tl.int32, bitcast=True)
    experts = ()  # type: tuple[tl.tensor, ...]
    shares = ()  # type: tuple[tl.tensor, ...]
    for place in tl.static_range(TOP_K):
        experts += (tl.sum(tl.where(lane == place, all_ids, 0), axis=0).to(tl.int64),)
        shares += (tl.sum(tl.where(lane == place, all_weights, 0), axis=0).to(tl.float32, bitcast=True),)
    for begin in tl.static_range(0, TOP_K * steps, AHEAD):
        blocks = ()  # type: tuple[tl.tensor, ...]
        for block in tl.static_range(begin, begin + AHEAD):
            if block < TOP_K * steps:
                expert = experts[block // steps]
                block_at = at + expert * (COLUMNS * INNER) + block % steps * BLOCK_K
                blocks += (row_block(block_at, INNER - block % steps * BLOCK_K, expert >= 0, 0.0, BLOCK_K),)
        if begin == 0:
            wait_for_predecessor(CHAINED)
        for block in tl.static_range(begin, begin + AHEAD):
            if block < TOP_K * steps:
                expert, share = experts[block // steps], shares[block // steps]
                column = block % steps * BLOCK_K + k
                x_at = x + (token * TOP_K + block // steps) * INNER + column
                x_part = tl.load(x_at, mask=column < INNER, other=0.0).to(tl.float32)
                if SCALED:
                    expert = tl.load(ids + token * TOP_K + block // steps).to(tl.int64)  # again: held, it takes registers
                    of_expert = expert * ((COLUMNS + SCALE_BLOCK - 1) // SCALE_BLOCK * scale_columns)
                    x_part *= share * tl.load(scale_at + of_expert + column // SCALE_BLOCK, mask=column < INNER, other=0.0)
                    acc += blocks[block - begin].to(tl.float32) * x_part[None, :]
                else:
                    acc += share * in_lanes(blocks[block - begin].to(tl.float32) * x_part[None, :], together)
                if BIASED and block % steps == 0:
                    offset += share * tl.load(bias + expert * COLUMNS + row).to(tl.float32)
    result = tl.sum(acc, axis=1)
    if BIASED:
        result += offset
    tl.store(out + token * COLUMNS + n, round_to(result, out.dtype.element_ty), mask=n < COLUMNS)


@kernel
def weighted_sum(
    x: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [T, TOP_K, PARTS, COLUMNS]; weights: [T, TOP_K]; out: [T, COLUMNS]. Programs: tokens, blocks of COLUMNS."""
    release_successor(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    wait_for_predecessor(CHAINED)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        share = tl.load(weights + pair)
        for part in tl.static_range(PARTS):
            acc += tl.load(x + (pair * PARTS + part) * COLUMNS + column, mask=inside, other=0.0).to(tl.float32) * share
    tl.store(out + token * COLUMNS + column, round_to(acc, out.dtype.element_ty), mask=inside)
