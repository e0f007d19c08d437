"""y = x W^T + b for up to 8 rows of x: weights go from memory to the registers of the matrix units.

Written in Gluon, which leaves to the kernel which thread has which values. The matrix units' 16 rows are 16 outputs, and their 8
columns are the rows of x. The warps of a program share its outputs and have columns of their own, in turn, so that they need each
other only for the sums at the end. Four lanes share a row, of W or of x, and have 16 bytes each of 32 columns. Which columns the
matrix units multiply together is free as long as both sides agree, so no value moves between threads before the sums do.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon.language.nvidia.ampere import mma_v2  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.gluon_launch import constant, kernel, kernel_of_any
from enginery_ops_triton.kernels.launch import release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import round_to


@constant
def by_quads(warps: int, rows: int, columns: int) -> gl.DistributedLinearLayout:
    """[warps, rows, columns], eight columns a lane at a time."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    registers += [[0, 8 << bit, 0] for bit in range((rows // 8).bit_length() - 1)]
    registers += [[0, 0, 32 << bit] for bit in range((columns // 32).bit_length() - 1)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    of_warps = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, rows, columns])


@constant
def sums(warps: int) -> gl.NVMMADistributedLayout:
    """[warps, outputs, rows]."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@constant
def outputs_adjacent(warps: int) -> gl.BlockedLayout:
    """[warps, outputs, rows], a thread has all warps' sums of an output."""
    return gl.BlockedLayout([warps, 1, 1], [1, 16, 2], [1, 1, warps], [0, 1, 2])


@kernel
def in_order_of_products(values: tl.tensor) -> tl.tensor:
    """[warps, N, K] with columns in the order in which the matrix units have them: of a lane's eight, two at a time."""
    warps: tl.constexpr = values.shape[0]
    rows: tl.constexpr = values.shape[1]
    columns: tl.constexpr = values.shape[2]
    parts = gl.permute(gl.reshape(values, [warps, rows, columns // 32, 4, 2, 2, 2]), [0, 1, 2, 4, 5, 3, 6])
    return gl.reshape(parts, [warps, rows, columns])


@kernel
def add_block(acc: tl.tensor, weight: tl.tensor, x: tl.tensor) -> tl.tensor:
    """acc [warps, N, M] and weight [warps, N, K] times x [warps, M, K]."""
    layout: tl.constexpr = acc.type.layout
    weight = gl.convert_layout(in_order_of_products(weight), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    x = gl.permute(in_order_of_products(x), [0, 2, 1])
    return mma_v2(weight, gl.convert_layout(x, gl.DotOperandLayout(1, layout, 2), assert_trivial=True), acc)


@kernel
def addresses(base: tl.tensor, row: tl.tensor, stride: tl.tensor, BLOCK_K: tl.constexpr, LAYOUT: tl.constexpr) -> tl.tensor:
    """[warps, N, K], of the first block of columns."""
    column = columns_of(BLOCK_K, LAYOUT)
    return base + gl.expand_dims(gl.expand_dims(row.to(gl.int64) * stride, 0), 2) + column


@kernel
def columns_of(BLOCK_K: tl.constexpr, LAYOUT: tl.constexpr) -> tl.tensor:
    """[warps, 1, K]: warps have BLOCK_K columns each, in turn."""
    of_column: tl.constexpr = gl.SliceLayout(1, LAYOUT)
    warp = gl.arange(0, gl.num_warps(), layout=gl.SliceLayout(1, of_column))
    k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, of_column))
    return gl.expand_dims(gl.expand_dims(warp * BLOCK_K, 1) + gl.expand_dims(k, 0), 1)


@kernel
def load_block(
    at: tl.tensor, step: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, LAYOUT: tl.constexpr, POLICY: tl.constexpr
) -> tl.tensor:
    """The block of columns so many steps further on; zeros behind the last column."""
    start: tl.constexpr = step * gl.num_warps() * BLOCK_K
    if start + gl.num_warps() * BLOCK_K <= COLUMNS:
        return gl.load(at + start, eviction_policy=POLICY)
    return gl.load(at + start, mask=start + columns_of(BLOCK_K, LAYOUT) < COLUMNS, other=0.0, eviction_policy=POLICY)


@kernel_of_any("num_rows")
def linear_of_few(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    x_stride: int,
    weight_stride: int,
    num_outputs: int,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    X_AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [num_rows <= 8, COLUMNS]; weight: [num_outputs, COLUMNS]; out: [num_rows, num_outputs] contiguous.

    AHEAD blocks of the weight are on their way before x is waited for, and then X_AHEAD blocks of x. Rows and outputs behind the
    last are the last again: they read nothing more, and are not stored.
    """
    release_successor(CHAINED)
    warps: tl.constexpr = gl.num_warps()
    steps: tl.constexpr = (COLUMNS + warps * BLOCK_K - 1) // (warps * BLOCK_K)
    of_weight: tl.constexpr = by_quads(warps, BLOCK_N, BLOCK_K)
    of_x: tl.constexpr = by_quads(warps, 8, BLOCK_K)
    first = gl.program_id(0) * BLOCK_N
    n = gl.minimum(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_weight))), num_outputs - 1)
    m = gl.minimum(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_x))), num_rows - 1)
    weight_at = addresses(weight, n, weight_stride, BLOCK_K, of_weight)
    x_at = addresses(x, m, x_stride, BLOCK_K, of_x)
    blocks = ()  # type: tuple[tl.tensor, ...]
    for step in gl.static_range(min(AHEAD, steps)):
        blocks += (load_block(weight_at, step, COLUMNS, BLOCK_K, of_weight, "evict_first"),)
    of_result: tl.constexpr = gl.SliceLayout(0, outputs_adjacent(warps))
    n = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, of_result))
    offset = n  # nothing reads it
    if BIAS:
        offset = gl.load(bias + n, mask=n < num_outputs, other=0.0)
    wait_for_predecessor(CHAINED)
    rows = ()  # type: tuple[tl.tensor, ...]
    for step in gl.static_range(min(X_AHEAD, steps)):
        rows += (load_block(x_at, step, COLUMNS, BLOCK_K, of_x, ""),)
    acc = gl.zeros([warps, BLOCK_N, 8], gl.float32, layout=sums(warps))
    for step in gl.static_range(steps):
        acc = add_block(acc, blocks[step], rows[step])
        if step + X_AHEAD < steps:
            rows += (load_block(x_at, step + X_AHEAD, COLUMNS, BLOCK_K, of_x, ""),)
        if step + AHEAD < steps:
            blocks += (load_block(weight_at, step + AHEAD, COLUMNS, BLOCK_K, of_weight, "evict_first"),)
    result = gl.sum(gl.convert_layout(acc, outputs_adjacent(warps)), axis=0)
    if BIAS:
        result += gl.expand_dims(offset.to(gl.float32), 1)
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, of_result))
    at = out + gl.expand_dims(m, 0) * num_outputs + gl.expand_dims(n, 1)
    inside = gl.expand_dims(m < num_rows, 0) & gl.expand_dims(n < num_outputs, 1)
    gl.store(at, round_to(result, out.dtype.element_ty), mask=inside)
