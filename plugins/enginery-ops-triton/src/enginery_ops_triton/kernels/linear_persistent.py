"""y = x W^T + b for up to 8 rows of x: one program a multiprocessor, which has all of x in registers and reads W through a ring.

As `linear_few`, but a program stays for all blocks of outputs that are its own, and blocks of W go through shared memory. So
AHEAD of them are always on their way, also while the warps' sums are added up, and x is read once. Each warp fetches the columns
that it multiplies.

The ring is so large that a multiprocessor has no room for a second one: two programs on one would leave another idle.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon.language.nvidia.ampere import async_copy  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.gluon_launch import constant, kernel, kernel_of_any
from enginery_ops_triton.kernels.launch import release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.linear_few import add_block, addresses, by_quads, columns_of, load_block, outputs_adjacent, sums
from enginery_ops_triton.kernels.precision import bound, round_to


@constant
def fetched(warps: int, columns: int) -> gl.BlockedLayout:
    """[warps, outputs, columns], 16 bytes a thread."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 1, 8], [1, 32 // across, across], [warps, 1, 1], [2, 1, 0])


@kernel
def fetch(
    into: tl.tensor,
    weight: tl.tensor,
    weight_stride: int,
    num_outputs: int,
    first: tl.tensor,
    step: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """into: [warps, outputs, K] in shared memory; first: of these outputs. Behind the last there is nothing to fetch."""
    outputs: tl.constexpr = into.shape[1]
    columns: tl.constexpr = into.shape[2]
    layout: tl.constexpr = fetched(gl.num_warps(), columns)
    n = gl.minimum(first + gl.arange(0, outputs, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))), num_outputs - 1)
    start: tl.constexpr = step * gl.num_warps() * columns
    at = addresses(weight, n, weight_stride, columns, layout) + start
    wanted = first < num_outputs
    if start + gl.num_warps() * columns > COLUMNS:
        wanted = wanted & (start + columns_of(columns, layout) < COLUMNS)
    async_copy.async_copy_global_to_shared(into, at, mask=wanted, eviction_policy="evict_first")
    async_copy.commit_group()


@kernel_of_any("num_rows")
def persistent_linear(
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
    PROGRAMS: tl.constexpr,
    BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [num_rows <= ROWS, COLUMNS]; weight: [num_outputs, COLUMNS]; out: [num_rows, num_outputs] contiguous.

    Rows and outputs behind the last are the last again, as in `linear_few.linear_of_few`.
    """
    release_successor(CHAINED)
    warps: tl.constexpr = gl.num_warps()
    steps: tl.constexpr = (COLUMNS + warps * BLOCK_K - 1) // (warps * BLOCK_K)
    turn: tl.constexpr = PROGRAMS * BLOCK_N
    of_weight: tl.constexpr = by_quads(warps, BLOCK_N, BLOCK_K)
    of_x: tl.constexpr = by_quads(warps, ROWS, BLOCK_K)
    of_result: tl.constexpr = gl.SliceLayout(0, outputs_adjacent(warps))
    of_ring: tl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    ring = gl.allocate_shared_memory(weight.dtype.element_ty, [AHEAD + 1, warps, BLOCK_N, BLOCK_K], of_ring)
    begin = gl.program_id(0) * BLOCK_N
    for early in gl.static_range(AHEAD):
        fetch(ring.index(early), weight, weight_stride, num_outputs, begin + early // steps * turn, early % steps, COLUMNS)
    wait_for_predecessor(CHAINED)
    m = gl.minimum(gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_x))), num_rows - 1)
    x_at = addresses(x, m, x_stride, BLOCK_K, of_x)
    rows = ()  # type: tuple[tl.tensor, ...]
    for step in gl.static_range(steps):
        rows += (load_block(x_at, step, COLUMNS, BLOCK_K, of_x, ""),)
    block_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, of_result))
    m = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, of_result)), 0)
    slot = 0
    for first in range(bound(begin), bound(num_outputs), turn):
        acc = gl.zeros([warps, BLOCK_N, ROWS], gl.float32, layout=sums(warps))
        for step in gl.static_range(steps):
            async_copy.wait_group(AHEAD - 1)
            block = ring.index(slot).load(of_weight)
            free = gl.where(slot == 0, AHEAD, slot - 1)
            later = first + (step + AHEAD) // steps * turn
            fetch(ring.index(free), weight, weight_stride, num_outputs, later, (step + AHEAD) % steps, COLUMNS)
            acc = add_block(acc, block, rows[step])
            slot = gl.where(slot == AHEAD, 0, slot + 1)
        result = gl.sum(gl.convert_layout(acc, outputs_adjacent(warps)), axis=0)
        n = first + block_n
        if BIAS:
            result += gl.expand_dims(gl.load(bias + n, mask=n < num_outputs, other=0.0).to(gl.float32), 1)
        inside = (m < num_rows) & gl.expand_dims(n < num_outputs, 1)
        gl.store(out + m * num_outputs + gl.expand_dims(n, 1), round_to(result, out.dtype.element_ty), mask=inside)
    async_copy.wait_group(0)
