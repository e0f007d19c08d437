"""The products of experts_float4.py for up to 16 pairs of an expert, by `float4_few.product`, whose weights stay in registers."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.expert_tiles import tile_and_block, tile_at
from enginery_ops_triton.kernels.experts_float4 import GROUP_COLUMNS, LANES, ROWS_PAIRED
from enginery_ops_triton.kernels.float4_few import by_quads, fetched, product, sums
from enginery_ops_triton.kernels.gates import gated
from enginery_ops_triton.kernels.gluon_launch import all_threads, constant, kernel
from enginery_ops_triton.kernels.launch import release_successor, wait_for_predecessor


@kernel
def gates_and_ups(acc: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """[N, M], eight of each by turns, -> each [M, N / 2], adjacent rows in adjacent threads."""
    rows: tl.constexpr = acc.shape[0]
    pairs: tl.constexpr = acc.shape[1]
    apart = gl.permute(gl.reshape(acc, [rows // 16, 2, 8, pairs]), [3, 0, 2, 1])
    gate, up = gl.split(apart)  # each [M, N / 16, 8]
    layout: tl.constexpr = rows_adjacent(rows // 2, gl.num_warps())
    gate = gl.convert_layout(gl.reshape(gate, [pairs, rows // 2]), layout)
    return gate, gl.convert_layout(gl.reshape(up, [pairs, rows // 2]), layout)


@constant
def rows_adjacent(rows: int, warps: int) -> gl.BlockedLayout:
    """[pairs, rows], two rows a thread."""
    lanes = min(32, rows // 2)
    return gl.BlockedLayout([1, 2], [32 // lanes, lanes], [warps, 1], [1, 0])


@kernel
def rows_of(block_n: tl.tensor, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LAYOUT: tl.constexpr) -> tl.tensor:
    """A block's, of which those behind the last are the last."""
    row = block_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    return row if ROWS % BLOCK_N == 0 else gl.minimum(row, ROWS - 1)


@kernel
def biases(bias: tl.tensor, block_n: tl.tensor, there: tl.tensor, ROWS: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """[BLOCK_N] of an expert's ROWS, as `rows_adjacent` has them, which are there, or zeros."""
    n = block_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, rows_adjacent(BLOCK_N, gl.num_warps())))
    return gl.load(bias + n, mask=(n < ROWS) & there, other=0.0)


@kernel
def store_gated(
    acc: tl.tensor,
    of_gates: tl.tensor,
    of_ups: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    block_n: tl.tensor,
    INNER: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """As `experts_float4.store_gated`, of pairs [first, end). of_gates, of_ups: `biases`."""
    gate, up = gates_and_ups(acc)
    layout: tl.constexpr = gate.type.layout
    n = block_n * gate.shape[1] + gl.arange(0, gate.shape[1], layout=gl.SliceLayout(0, layout))
    m = first + gl.arange(0, gate.shape[0], layout=gl.SliceLayout(1, layout))
    if BIASED:
        gate += gl.expand_dims(of_gates.to(gl.float32), 0)
        up += gl.expand_dims(of_ups.to(gl.float32), 0)
    inside = gl.expand_dims(m < end, 1) & gl.expand_dims(n < INNER, 0)
    at = out + gl.expand_dims(m.to(gl.int64) * INNER, 1) + gl.expand_dims(n, 0)
    gl.store(at, gated(gate, up, KIND, ALPHA, LIMIT).to(gl.bfloat16), mask=inside)


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
    ALONE: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """As `experts_float4.gate_up_tile`."""
    rows: tl.constexpr = (INNER + ROWS_PAIRED - 1) // ROWS_PAIRED * ROWS_PAIRED * 2
    groups: tl.constexpr = (COLUMNS + GROUP_COLUMNS - 1) // GROUP_COLUMNS
    of_x: tl.constexpr = fetched(gl.num_warps())
    of_rows: tl.constexpr = by_quads(BLOCK_N, gl.num_warps(), shared=False)
    m = first + gl.arange(0, 4 * BLOCK_M, layout=gl.SliceLayout(1, of_x)) % BLOCK_M
    known = gl.minimum(m, end - 1)
    of_gates = expert  # nothing reads it, nor the next
    of_ups = expert
    if BIASED:  # loaded early: at the end nothing else would be on its way
        of_gates = biases(bias + expert * (2 * INNER), block_n, expert >= 0, INNER, BLOCK_N // 2)
        of_ups = biases(bias + expert * (2 * INNER) + INNER, block_n, expert >= 0, INNER, BLOCK_N // 2)
    token = (known if ALONE else gl.load(order + known)) // TOP_K
    acc = product(
        words + expert * (groups * rows * LANES),
        exponents + expert * (groups * rows),
        x + token.to(gl.int64) * x_stride,
        rows_of(block_n, rows, BLOCK_N, of_rows),
        m < end,
        rows,
        COLUMNS,
        STAGES,
        SPLIT,
        False,
    )
    last = True
    if SPLIT > 1:
        of_sums: tl.constexpr = sums(gl.num_warps())
        row = rows_of(block_n, rows, BLOCK_N, of_sums)
        pair = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, of_sums))
        at = partial + gl.expand_dims(pair.to(gl.int64) * (SPLIT * rows), 0) + gl.expand_dims(row, 1)
        kept = gl.expand_dims(pair < end, 0) & gl.expand_dims(row >= 0, 1)
        gl.store(at + gl.program_id(1) * rows, acc, mask=kept)
        all_threads()  # all threads have stored before one of them says so
        last = gl.atomic_add(arrived + gl.program_id(0), 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=of_sums)
            for other in range(SPLIT):
                acc += gl.load(at + other * rows, mask=kept, other=0.0, cache_modifier=".cg")
            gl.store(arrived + gl.program_id(0), 0)
    if last:
        store_gated(acc, of_gates, of_ups, out, first, end, block_n, INNER, BIASED, KIND, ALPHA, LIMIT)


@kernel
def gate_up_of_few(
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
    """As `experts_float4.gate_up_of_float4`, in bfloat16 and where scales are NARROW.

    With pairs ALONE, lets `down_of_few` start only after its own wait: that one reads ids ahead of its turn.
    """
    gl.static_assert(NARROW)
    rows: tl.constexpr = (INNER + ROWS_PAIRED - 1) // ROWS_PAIRED * ROWS_PAIRED * 2
    release_successor(CHAINED and not ALONE)
    tile, block_n = tile_and_block((rows + BLOCK_N - 1) // BLOCK_N, GROUP)
    wait_for_predecessor(CHAINED)
    release_successor(CHAINED and ALONE)
    expert, first, end = tile_at(tiles, tile, ALONE)
    for size in gl.static_range(2):
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
    ALONE: tl.constexpr,
    BIASED: tl.constexpr,
    WAITS: tl.constexpr,
) -> None:
    """As `experts_float4.down_tile`. WAITS: as in `product`."""
    groups: tl.constexpr = (INNER + GROUP_COLUMNS - 1) // GROUP_COLUMNS
    of_x: tl.constexpr = fetched(gl.num_warps())
    of_rows: tl.constexpr = by_quads(BLOCK_N, gl.num_warps(), shared=False)
    m = first + gl.arange(0, 4 * BLOCK_M, layout=gl.SliceLayout(1, of_x)) % BLOCK_M
    known = gl.minimum(m, end - 1)
    part = gl.program_id(1)
    offset = expert  # nothing reads it
    if BIASED:  # early, as in `gate_up_tile`
        offset = biases(bias + expert * COLUMNS, block_n, part == 0, COLUMNS, BLOCK_N)
    acc = product(
        words + expert * (groups * COLUMNS * LANES),
        exponents + expert * (groups * COLUMNS),
        x + known.to(gl.int64) * INNER,
        rows_of(block_n, COLUMNS, BLOCK_N, of_rows),
        m < end,
        COLUMNS,
        INNER,
        STAGES,
        SPLIT,
        WAITS,
    )
    result = gl.convert_layout(gl.permute(acc, [1, 0]), rows_adjacent(BLOCK_N, gl.num_warps()))  # [M, N]
    n = block_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, result.type.layout))
    m = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, result.type.layout))
    if BIASED:
        result += gl.expand_dims(offset.to(gl.float32), 0)
    pair = (m if ALONE else gl.load(order + gl.minimum(m, end - 1))).to(gl.int64)
    out_at = out + gl.expand_dims((pair * SPLIT + part) * COLUMNS, 1) + gl.expand_dims(n, 0)
    inside = gl.expand_dims(m < end, 1) & gl.expand_dims(n < COLUMNS, 0)
    gl.store(out_at, result.to(out.dtype.element_ty), mask=inside)


@kernel
def down_of_few(
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
    """As `experts_float4.down_of_float4`, in bfloat16 and where scales are NARROW.

    With pairs ALONE, what chose the experts had ended before the predecessor let this start, so the first groups of their weights
    are on their way before x is waited for.
    """
    gl.static_assert(NARROW)
    release_successor(CHAINED)
    tile, block_n = tile_and_block((COLUMNS + BLOCK_N - 1) // BLOCK_N, GROUP)
    wait_for_predecessor(CHAINED and not ALONE)
    expert, first, end = tile_at(tiles, tile, ALONE)
    for size in gl.static_range(2):
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
                ALONE,
                BIASED,
                CHAINED and ALONE,
            )
