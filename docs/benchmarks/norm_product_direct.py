"""For `kernels_norm_product.py`: `linear_of_few` of one row which norms the row itself."""

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl

from enginery_ops_triton.kernels.gluon_launch import kernel
from enginery_ops_triton.kernels.launch import release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.linear_few import add_block, addresses, by_quads, load_block, outputs_adjacent, sums
from enginery_ops_triton.kernels.precision import round_to


@kernel
def leave_norm(
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
    """The sum and the norm, as `add_rms_norm` makes them."""
    of_row: tl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    column = gl.arange(0, BLOCK, layout=of_row)
    inside = column < COLUMNS
    scale = gl.load(norm_weight + column, mask=inside, other=0.0).to(gl.float32)
    wait_for_predecessor(CHAINED)
    values = gl.load(x + column, mask=inside, other=0.0).to(gl.float32)
    values += gl.load(residual + column, mask=inside, other=0.0).to(gl.float32)
    kept = round_to(values, summed.dtype.element_ty)
    wide = kept.to(gl.float32)
    result = round_to(wide * gl.rsqrt(gl.sum(wide * wide, axis=0) / COLUMNS + eps), kept.dtype)
    gl.store(normed + column, round_to(result.to(gl.float32) * scale, normed.dtype.element_ty), mask=inside)
    gl.store(summed + column, kept, mask=inside)


@kernel
def added(x: tl.tensor, residual: tl.tensor) -> tl.tensor:
    """In float32, rounded as the residual stream is."""
    return round_to(x.to(gl.float32) + residual.to(gl.float32), residual.dtype).to(gl.float32)


@kernel
def product_of_norm(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    weight_stride: int,
    num_outputs: int,
    eps: float,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    X_AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Some outputs. The sum of squares is taken with the products and divided out of them."""
    warps: tl.constexpr = gl.num_warps()
    steps: tl.constexpr = (COLUMNS + warps * BLOCK_K - 1) // (warps * BLOCK_K)
    of_weight: tl.constexpr = by_quads(warps, BLOCK_N, BLOCK_K)
    of_x: tl.constexpr = by_quads(warps, 8, BLOCK_K)
    first = gl.program_id(0) * BLOCK_N
    n = gl.minimum(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_weight))), num_outputs - 1)
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_x))) * 0  # the matrix units' 8 rows are one here
    weight_at = addresses(weight, n, weight_stride, BLOCK_K, of_weight)
    x_at = addresses(x, m, 0, BLOCK_K, of_x)
    residual_at = addresses(residual, m, 0, BLOCK_K, of_x)
    scale_at = addresses(norm_weight, m, 0, BLOCK_K, of_x)
    blocks = ()  # type: tuple[tl.tensor, ...]
    scales = ()  # type: tuple[tl.tensor, ...]
    for step in gl.static_range(min(AHEAD, steps)):
        blocks += (load_block(weight_at, step, COLUMNS, BLOCK_K, of_weight, "evict_first"),)
    for step in gl.static_range(min(X_AHEAD, steps)):
        scales += (load_block(scale_at, step, COLUMNS, BLOCK_K, of_x, ""),)
    wait_for_predecessor(CHAINED)
    rows = ()  # type: tuple[tl.tensor, ...]
    streams = ()  # type: tuple[tl.tensor, ...]
    for step in gl.static_range(min(X_AHEAD, steps)):
        rows += (load_block(x_at, step, COLUMNS, BLOCK_K, of_x, ""),)
        streams += (load_block(residual_at, step, COLUMNS, BLOCK_K, of_x, ""),)
    acc = gl.zeros([warps, BLOCK_N, 8], gl.float32, layout=sums(warps))
    squares = gl.zeros([warps, 8], gl.float32, layout=gl.SliceLayout(2, of_x))
    for step in gl.static_range(steps):
        row = added(rows[step], streams[step])
        squares += gl.sum(row * row, axis=2)
        acc = add_block(acc, blocks[step], round_to(row * scales[step].to(gl.float32), x.dtype.element_ty))
        if step + X_AHEAD < steps:
            rows += (load_block(x_at, step + X_AHEAD, COLUMNS, BLOCK_K, of_x, ""),)
            streams += (load_block(residual_at, step + X_AHEAD, COLUMNS, BLOCK_K, of_x, ""),)
            scales += (load_block(scale_at, step + X_AHEAD, COLUMNS, BLOCK_K, of_x, ""),)
        if step + AHEAD < steps:
            blocks += (load_block(weight_at, step + AHEAD, COLUMNS, BLOCK_K, of_weight, "evict_first"),)
    of_result: tl.constexpr = gl.SliceLayout(0, outputs_adjacent(warps))
    n = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, of_result))
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, of_result))
    mean = gl.convert_layout(gl.sum(squares, axis=0), gl.SliceLayout(0, of_result)) / COLUMNS
    result = gl.sum(gl.convert_layout(acc, outputs_adjacent(warps)), axis=0) * gl.expand_dims(gl.rsqrt(mean + eps), 0)
    at = out + gl.expand_dims(m, 0) * num_outputs + gl.expand_dims(n, 1)
    inside = gl.expand_dims(m < 1, 0) & gl.expand_dims(n < num_outputs, 1)
    gl.store(at, round_to(result, out.dtype.element_ty), mask=inside)


@kernel
def norm_direct(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
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
    X_AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `norm_matvec`, whose last program writes `summed` and `normed` too; they are no memory that others read."""
    release_successor(CHAINED)
    if gl.program_id(0) == gl.num_programs(0) - 1:
        leave_norm(x, residual, norm_weight, summed, normed, eps, COLUMNS, BLOCK, CHAINED=CHAINED)
    else:
        product_of_norm(
            x,
            residual,
            norm_weight,
            weight,
            out,
            weight_stride,
            num_outputs,
            eps,
            COLUMNS,
            BLOCK_N,
            BLOCK_K,
            AHEAD,
            X_AHEAD,
            CHAINED=CHAINED,
        )
