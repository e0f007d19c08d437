"""y = x W^T + b for so few rows of x that reading W is all that counts."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel_of_any, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import add_product, round_to
from enginery_ops_triton.kernels.sums_in_lanes import adjacent, in_lanes


@kernel_of_any("num_rows")
def matvec(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    x_stride: int,
    weight_stride: int,
    num_outputs: int,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [num_rows, COLUMNS]; weight: [num_outputs, COLUMNS]; out: [num_rows, num_outputs] contiguous. num_rows <= ROWS.

    The first AHEAD blocks of the weight are on their way before x is waited for. More rows than one read the others again, and the
    last row is computed once more for each that is not there, so that the rows' sums do not wait for each other. If there are
    several such blocks, a warp has outputs of its own and needs all of x, which it loads as it loads the weight: loaded once
    for all warps, x would go through shared memory, with two barriers a block.
    """
    release_successor(CHAINED)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    whole: tl.constexpr = COLUMNS % BLOCK_K == 0
    wanted = n[:, None] < num_outputs
    at = weight + n[:, None].to(tl.int64) * weight_stride + k[None, :]
    blocks = ()  # type: tuple[tl.tensor, ...]
    for start in tl.static_range(0, AHEAD * BLOCK_K, BLOCK_K):
        inside = wanted if whole else wanted & (start + k[None, :] < COLUMNS)
        blocks += (tl.load(at + start, mask=inside, other=0.0, eviction_policy="evict_first"),)
    offset = tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32) if BIAS else 0.0
    wait_for_predecessor(CHAINED)
    together: tl.constexpr = adjacent(BLOCK_K, weight.dtype.element_ty.primitive_bitwidth)
    columns = tl.broadcast_to(k[None, :], (BLOCK_N, BLOCK_K)) if AHEAD > 1 else k[None, :]
    for place in tl.static_range(ROWS):
        row = place if ROWS == 1 else tl.minimum(place, num_rows - 1)
        x_at = x + row * x_stride + columns
        acc = tl.zeros((BLOCK_N, BLOCK_K // together), dtype=tl.float32)
        for start in tl.static_range(0, AHEAD * BLOCK_K, BLOCK_K):
            x_part = tl.load(x_at + start, mask=start + columns < COLUMNS, other=0.0)
            acc += in_lanes(blocks[start // BLOCK_K].to(tl.float32) * x_part.to(tl.float32), together)
        for start in tl.static_range(AHEAD * BLOCK_K, COLUMNS, BLOCK_K):
            left = start + columns < COLUMNS
            more = tl.load(at + start, mask=wanted if whole else wanted & left, other=0.0, eviction_policy="evict_first")
            x_part = tl.load(x_at + start, mask=left, other=0.0)
            acc += in_lanes(more.to(tl.float32) * x_part.to(tl.float32), together)
        result = tl.sum(acc, axis=1) + offset
        tl.store(out + row * num_outputs + n, round_to(result, out.dtype.element_ty), mask=n < num_outputs)


@kernel_of_any("num_rows")
def few_rows(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    num_rows: int,
    x_stride: int,
    weight_stride: int,
    num_outputs: int,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `matvec` on the matrix units, for num_rows <= BLOCK_M. It too has its first block of the weight on its way early.

    The columns are split among SPLIT programs. Each leaves its sums in `partial` [SPLIT, num_rows, num_outputs] float32; the last
    to arrive adds them up in a fixed order and clears its counter in `arrived` [blocks of outputs] for the next launch.
    """
    release_successor(CHAINED)
    block_n = tl.program_id(0)
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    steps: tl.constexpr = (COLUMNS + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    whole: tl.constexpr = COLUMNS % (BLOCK_K * SPLIT) == 0
    x_at = x + m[:, None] * x_stride + k[None, :]
    weight_at = weight + n[None, :].to(tl.int64) * weight_stride + k[:, None]
    x_inside = m[:, None] < num_rows
    weight_inside = n[None, :] < num_outputs
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    first = part * steps * BLOCK_K
    if whole:
        block = tl.load(weight_at + first, mask=weight_inside, other=0.0)
        wait_for_predecessor(CHAINED)
        x_part = tl.load(x_at + first, mask=x_inside, other=0.0)
    else:
        block = tl.load(weight_at + first, mask=weight_inside & (first + k[:, None] < COLUMNS), other=0.0)
        wait_for_predecessor(CHAINED)
        x_part = tl.load(x_at + first, mask=x_inside & (first + k[None, :] < COLUMNS), other=0.0)
    acc = add_product(acc, x_part, block)
    for step in tl.range(1, steps, num_stages=STAGES):
        start = first + step * BLOCK_K
        if whole:
            x_part = tl.load(x_at + start, mask=x_inside, other=0.0)
            block = tl.load(weight_at + start, mask=weight_inside, other=0.0)
        else:
            x_part = tl.load(x_at + start, mask=x_inside & (start + k[None, :] < COLUMNS), other=0.0)
            block = tl.load(weight_at + start, mask=weight_inside & (start + k[:, None] < COLUMNS), other=0.0)
        acc = add_product(acc, x_part, block)
    inside = x_inside & weight_inside
    out_at = m[:, None] * num_outputs + n[None, :]
    last = SPLIT == 1
    if SPLIT > 1:
        tl.store(partial + part * num_rows * num_outputs + out_at, acc, mask=inside)
        tl.debug_barrier()  # all threads have stored before one of them says so
        last = tl.atomic_add(arrived + block_n, 1, sem="acq_rel") == SPLIT - 1
    if last:
        if SPLIT > 1:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for other in range(SPLIT):
                acc += tl.load(partial + other * num_rows * num_outputs + out_at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(arrived + block_n, 0)
        if BIAS:
            acc += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(out + out_at, round_to(acc, out.dtype.element_ty), mask=inside)
