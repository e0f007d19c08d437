"""For `kernels_norm_product.py`: `matvec` of one row which norms the row itself."""

from __future__ import annotations

import triton.language as tl

from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import round_to
from enginery_ops_triton.kernels.sums_in_lanes import adjacent, in_lanes


@kernel
def leave_norm(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    summed: tl.tensor,
    normed: tl.tensor,
    arrived: tl.tensor,
    readers: tl.tensor,
    eps: float,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAITING: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """The norm as `add_rms_norm` makes it. WAITING: the sum is stored when so many others have read what it replaces."""
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(CHAINED)
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
    kept = round_to(values, summed.dtype.element_ty)
    wide = kept.to(tl.float32)
    result = round_to(wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps), kept.dtype)
    tl.store(normed + column, round_to(result.to(tl.float32) * scale, normed.dtype.element_ty), mask=inside)
    if WAITING:
        while tl.atomic_add(arrived, 0, sem="acquire") < readers:
            pass
        tl.store(arrived, 0)
    tl.store(summed + column, kept, mask=inside)


@kernel
def product_of_norm(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    arrived: tl.tensor,
    weight_stride: int,
    num_outputs: int,
    eps: float,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    WAITING: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Some outputs. The sum of squares is taken with the products and divided out of them. WAITING: says when it has read."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    wanted = n[:, None] < num_outputs
    at = weight + n[:, None].to(tl.int64) * weight_stride + k[None, :]
    columns = tl.broadcast_to(k[None, :], (BLOCK_N, BLOCK_K)) if AHEAD > 1 else k[None, :]
    blocks = ()  # type: tuple[tl.tensor, ...]
    scales = ()  # type: tuple[tl.tensor, ...]
    for start in tl.static_range(0, AHEAD * BLOCK_K, BLOCK_K):
        inside = wanted & (start + k[None, :] < COLUMNS)
        blocks += (tl.load(at + start, mask=inside, other=0.0, eviction_policy="evict_first"),)
        scales += (tl.load(norm_weight + start + columns, mask=start + columns < COLUMNS, other=0.0),)
    wait_for_predecessor(CHAINED)
    together: tl.constexpr = adjacent(BLOCK_K, weight.dtype.element_ty.primitive_bitwidth)
    acc = tl.zeros((BLOCK_N, BLOCK_K // together), dtype=tl.float32)
    squares = tl.zeros((columns.shape[0], BLOCK_K // together), dtype=tl.float32)
    for start in tl.static_range(0, COLUMNS, BLOCK_K):
        left = start + columns < COLUMNS
        row = tl.load(x + start + columns, mask=left, other=0.0).to(tl.float32)
        row += tl.load(residual + start + columns, mask=left, other=0.0).to(tl.float32)
        row = round_to(row, residual.dtype.element_ty).to(tl.float32)
        if start < AHEAD * BLOCK_K:
            block = blocks[start // BLOCK_K]
            scale = scales[start // BLOCK_K]
        else:
            block = tl.load(at + start, mask=wanted & left, other=0.0, eviction_policy="evict_first")
            scale = tl.load(norm_weight + start + columns, mask=left, other=0.0)
        squares += in_lanes(row * row, together)
        acc += in_lanes(block.to(tl.float32) * (row * scale.to(tl.float32)), together)
    if WAITING:
        tl.debug_barrier()  # all threads have read before one of them says so
        tl.atomic_add(arrived, 1, sem="release")
    result = tl.sum(acc, axis=1) * tl.rsqrt(tl.sum(squares, axis=1) / COLUMNS + eps)
    tl.store(out + n, round_to(result, out.dtype.element_ty), mask=n < num_outputs)


@kernel
def norm_matvec(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    summed: tl.tensor,
    normed: tl.tensor,
    arrived: tl.tensor,
    weight_stride: int,
    num_outputs: int,
    eps: float,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    WAITING: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `matvec` of the norm of x + residual, one row; the last program writes `summed` and `normed`. x, residual: [COLUMNS].

    WAITING: `summed` is `residual`, and `arrived` counts the programs that have read it.
    """
    release_successor(CHAINED)
    others = tl.num_programs(0) - 1
    if tl.program_id(0) == others:
        leave_norm(x, residual, norm_weight, summed, normed, arrived, others, eps, COLUMNS, BLOCK, WAITING=WAITING, CHAINED=CHAINED)
    else:
        product_of_norm(
            x,
            residual,
            norm_weight,
            weight,
            out,
            arrived,
            weight_stride,
            num_outputs,
            eps,
            COLUMNS,
            BLOCK_N,
            BLOCK_K,
            AHEAD,
            WAITING=WAITING,
            CHAINED=CHAINED,
        )
