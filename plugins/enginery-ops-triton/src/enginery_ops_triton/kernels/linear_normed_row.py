"""As `linear_normed`, in Gluon: by the matrix units, and with x from shared memory, which a program's warps norm together.

What takes long where rows are short is the way from the predecessor's end to the product's, as weights are there by then: 100
instructions of a warp, not 370. The matrix units' rows are outputs. Their columns are all the one row of x, as in `linear_few`.

The product is of the sum times the norm's weight, rounded; the row's size is divided out of it.

Where outputs are gates, and then ups, eight of each 16 rows of the matrix units are gates, and the next their ups. So a thread has
the sums of both, which are eight rows apart there.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.activation import silu_times
from enginery_ops_triton.kernels.gluon_launch import constant, kernel
from enginery_ops_triton.kernels.launch import release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.linear_few import add_block, by_quads, sums
from enginery_ops_triton.kernels.precision import round_to

COLUMNS_OF_UNITS: tl.constexpr = tl.constexpr(8)
CHAINS: tl.constexpr = tl.constexpr(4)  # of products that wait for each other


@constant
def in_turn(warps: int) -> gl.BlockedLayout:
    """[columns], eight a thread."""
    return gl.BlockedLayout([8], [32], [warps], [0])


@constant
def halves_adjacent(warps: int) -> gl.BlockedLayout:
    """[warps, outputs / 16, 8, rows of x, 2]: a thread has all warps' sums of two outputs, which are 8 apart."""
    return gl.BlockedLayout([warps, 1, 1, 1, 2], [1, 1, 8, 4, 1], [1, 1, 1, warps, 1], [4, 3, 2, 1, 0])


@kernel
def normed_row(
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
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `linear_normed.normed_matvec`, but the first program leaves the sum and the norm besides. BLOCK: COLUMNS or a little more.

    Outputs behind the last are the last again, and are not stored.
    """
    release_successor(CHAINED)
    warps: tl.constexpr = gl.num_warps()
    BLOCK_K: tl.constexpr = BLOCK // (warps * CHAINS)
    of_weight: tl.constexpr = by_quads(warps, BLOCK_N, BLOCK_K)
    of_x: tl.constexpr = by_quads(warps, COLUMNS_OF_UNITS, BLOCK_K)
    begin = gl.program_id(0) * BLOCK_N
    m = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_weight)))
    n = output_at(begin + m, num_outputs, GATED)
    k = columns_of_warps(BLOCK // warps, BLOCK_K, of_weight)
    weight_at = weight + gl.expand_dims(gl.expand_dims(n.to(gl.int64) * weight_stride, 0), 2) + k
    blocks = ()  # type: tuple[tl.tensor, ...]
    for chain in gl.static_range(CHAINS):
        blocks += (
            gl.load(weight_at + chain * BLOCK_K, mask=k + chain * BLOCK_K < COLUMNS, other=0.0, eviction_policy="evict_first"),
        )
    column = gl.arange(0, BLOCK, layout=in_turn(warps))
    inside = column < COLUMNS
    scale = gl.load(norm_weight + column, mask=inside, other=0.0).to(gl.float32)
    shared = gl.allocate_shared_memory(weight.dtype.element_ty, [BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    wait_for_predecessor(CHAINED)
    values = gl.load(residual + column, mask=inside, other=0.0).to(gl.float32)
    values += gl.load(x + column, mask=inside, other=0.0).to(gl.float32)
    kept = round_to(values, summed.dtype.element_ty)
    wide = kept.to(gl.float32)
    scaled = round_to(wide * scale, weight.dtype.element_ty)
    shared.store(scaled)
    factor = gl.rsqrt(gl.sum(wide * wide, axis=0) / COLUMNS + eps)
    by_warps = shared.reshape([warps, BLOCK // warps])
    acc = gl.zeros([warps, BLOCK_N, COLUMNS_OF_UNITS], gl.float32, layout=sums(warps))
    for chain in gl.static_range(CHAINS):
        row = gl.expand_dims(by_warps.slice(chain * BLOCK_K, BLOCK_K, dim=1).load(gl.SliceLayout(1, of_x)), 1)
        rows, _ = gl.broadcast(row, gl.zeros([warps, COLUMNS_OF_UNITS, BLOCK_K], row.dtype, layout=of_x))
        acc += add_block(gl.zeros([warps, BLOCK_N, COLUMNS_OF_UNITS], gl.float32, layout=sums(warps)), blocks[chain], rows)
    first, second = in_halves(acc)  # [BLOCK_N / 16, 8, columns]
    first, second = first * factor, second * factor
    of_one: tl.constexpr = first.type.layout
    column_of = column_in(of_one, COLUMNS_OF_UNITS)
    place = place_in(begin, of_one, BLOCK_N // 16) + column_of * 0
    n_first, n_second = output_at(place, num_outputs, GATED), output_at(place + 8, num_outputs, GATED)
    is_row = column_of == 0
    if BIAS:
        first += gl.load(bias + n_first).to(gl.float32)
        second += gl.load(bias + n_second).to(gl.float32)
    first, second = round_to(first, out.dtype.element_ty), round_to(second, out.dtype.element_ty)
    if GATED:
        gl.store(out + n_first, silu_times(first, second), mask=is_row & (place // 16 * 8 + place % 8 < num_outputs // 2))
    else:
        gl.store(out + n_first, first, mask=is_row & (place < num_outputs))
        gl.store(out + n_second, second, mask=is_row & (place + 8 < num_outputs))
    if gl.program_id(0) == 0:
        gl.store(summed + column, kept, mask=inside)
        whole = round_to(wide * factor, kept.dtype)
        gl.store(normed + column, round_to(whole.to(gl.float32) * scale, normed.dtype.element_ty), mask=inside)


@kernel
def columns_of_warps(APART: tl.constexpr, BLOCK_K: tl.constexpr, LAYOUT: tl.constexpr) -> tl.tensor:
    """[warps, 1, BLOCK_K]: the first columns of each warp, which has APART of them."""
    of_column: tl.constexpr = gl.SliceLayout(1, LAYOUT)
    warp = gl.arange(0, gl.num_warps(), layout=gl.SliceLayout(1, of_column))
    k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, of_column))
    return gl.expand_dims(gl.expand_dims(warp * APART, 1) + gl.expand_dims(k, 0), 1)


@kernel
def output_at(place: tl.tensor, num_outputs: int, GATED: tl.constexpr) -> tl.tensor:
    """Which output a place among the rows of all programs is for. Places behind the last output are for the last again."""
    if GATED:
        return gl.minimum(place // 16 * 8 + place % 8, num_outputs // 2 - 1) + place // 8 % 2 * (num_outputs // 2)
    return gl.minimum(place, num_outputs - 1)


@kernel
def in_halves(acc: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The sums over warps of acc [warps, N, M], of the first and the second half of each 16 rows: [N / 16, 8, M] each."""
    warps: tl.constexpr = acc.shape[0]
    blocks: tl.constexpr = acc.shape[1] // 16
    pairs = gl.permute(gl.reshape(acc, [warps, blocks, 2, 8, acc.shape[2]]), [0, 1, 3, 4, 2])
    first, second = gl.split(gl.sum(gl.convert_layout(pairs, halves_adjacent(warps)), axis=0))
    return first, second


@kernel
def place_in(first: tl.tensor, LAYOUT: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    """[BLOCKS, 8, 1] int32: where the first halves' rows are among those of a program, of which `first` is the first."""
    block = gl.expand_dims(gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1)
    row = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    return first + gl.expand_dims(block * 16 + row, 2)


@kernel
def column_in(LAYOUT: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """[1, 1, COLUMNS] int32: which row of x."""
    return gl.expand_dims(gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))), 0), 0)
