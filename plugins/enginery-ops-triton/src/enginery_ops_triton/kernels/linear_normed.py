"""y = norm(x + residual) W^T + b of one row, without a kernel for the norm, nor one for the gate that may be behind it.

Every program of the product adds and norms the row for itself, and one more leaves the sum and the norm for others. The
sum has memory of its own: where it takes the residual stream's, that one program has to wait until all others have read.

The product is of the norm before that is rounded, as it is stored nowhere; the norm that is left for others is rounded, as that of
`norm.rms_norm`. So half of a bfloat16 product's numbers are others than the product of the stored norm has, by a rounding, and the
product is nearer to that of exact numbers: off by 1.7e-3 of its size, not by 2.9e-3, with 4,096 columns.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.activation import silu_times
from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import round_to
from enginery_ops_triton.kernels.sums_in_lanes import adjacent, in_lanes


@kernel
def normed_matvec(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    summed: tl.tensor,
    normed: tl.tensor,
    weight_stride: int,
    num_outputs: int,
    eps: float,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x, residual, norm_weight, summed, normed: [COLUMNS]; weight: [num_outputs, COLUMNS]; out: [num_outputs].

    The first program is for the sum and the norm, the others for outputs, as those of `linear.matvec`. GATED: these are gates, and
    then as many ups, and out [num_outputs / 2] is silu(gate) * up of both after they are rounded.
    """
    release_successor(CHAINED)
    if tl.program_id(0) == 0:
        _leave_norm(x, residual, norm_weight, summed, normed, eps, COLUMNS, BLOCK, CHAINED=CHAINED)
    else:
        _product(
            x,
            residual,
            norm_weight,
            weight,
            bias,
            out,
            weight_stride,
            num_outputs,
            eps,
            COLUMNS,
            BLOCK_N,
            BLOCK_K,
            AHEAD,
            BIAS=BIAS,
            GATED=GATED,
            CHAINED=CHAINED,
        )


@kernel
def _leave_norm(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    summed: tl.tensor,
    normed: tl.tensor,
    eps: float,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `norm.rms_norm`."""
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(CHAINED)
    values = tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    kept = round_to(values, summed.dtype.element_ty)
    tl.store(summed + column, kept, mask=inside)
    wide = kept.to(tl.float32)
    result = round_to(wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps), kept.dtype)
    tl.store(normed + column, round_to(result.to(tl.float32) * scale, normed.dtype.element_ty), mask=inside)


@kernel
def _product(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    weight_stride: int,
    num_outputs: int,
    eps: float,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Some outputs. The sum of squares is taken with the products and divided out of them. AHEAD blocks are all columns."""
    n = (tl.program_id(0) - 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < num_outputs
    if GATED:  # of each gate its up is next
        n = n // 2 + n % 2 * (num_outputs // 2)
    k = tl.arange(0, BLOCK_K)
    wanted = real[:, None]
    at = weight + n[:, None].to(tl.int64) * weight_stride + k[None, :]
    columns = tl.broadcast_to(k[None, :], (BLOCK_N, BLOCK_K)) if AHEAD > 1 else k[None, :]
    blocks = ()  # type: tuple[tl.tensor, ...]
    scales = ()  # type: tuple[tl.tensor, ...]
    for start in tl.static_range(0, AHEAD * BLOCK_K, BLOCK_K):
        inside = wanted & (start + k[None, :] < COLUMNS)
        blocks += (tl.load(at + start, mask=inside, other=0.0, eviction_policy="evict_first"),)
        scales += (tl.load(norm_weight + start + columns, mask=start + columns < COLUMNS, other=0.0),)
    offset = tl.load(bias + n, mask=real, other=0.0).to(tl.float32) if BIAS else 0.0
    wait_for_predecessor(CHAINED)
    together: tl.constexpr = adjacent(BLOCK_K, weight.dtype.element_ty.primitive_bitwidth)
    acc = tl.zeros((BLOCK_N, BLOCK_K // together), dtype=tl.float32)
    squares = tl.zeros((columns.shape[0], BLOCK_K // together), dtype=tl.float32)
    for start in tl.static_range(0, AHEAD * BLOCK_K, BLOCK_K):
        left = start + columns < COLUMNS
        row = tl.load(x + start + columns, mask=left, other=0.0).to(tl.float32)
        row += tl.load(residual + start + columns, mask=left, other=0.0).to(tl.float32)
        row = round_to(row, residual.dtype.element_ty).to(tl.float32)
        squares += in_lanes(row * row, together)
        scaled = row * scales[start // BLOCK_K].to(tl.float32)
        acc += in_lanes(blocks[start // BLOCK_K].to(tl.float32) * scaled, together)
    result = tl.sum(acc, axis=1) * tl.rsqrt(tl.sum(squares, axis=1) / COLUMNS + eps) + offset
    result = round_to(result, out.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.reshape(result, (BLOCK_N // 2, 2)))
        n = (tl.program_id(0) - 1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        tl.store(out + n, silu_times(gate, up), mask=n < num_outputs // 2)
    else:
        tl.store(out + n, result, mask=real)
