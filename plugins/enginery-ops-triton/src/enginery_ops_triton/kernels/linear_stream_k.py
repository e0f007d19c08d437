"""y = x W^T + b for up to 64 rows of x on Hopper: one program a multiprocessor, each with an equal share of W, whatever W's size.

A tile is BLOCK_N outputs of all rows. It takes `steps` units, of BLOCK_K columns each. As many tiles as make whole rounds of all
programs are computed by one program each. The units of those that are left over are dealt out evenly, and come first: sums that
programs have to add up are added while the next units are on their way ("Stream-K", Osama et al., 2023, arXiv:2301.03598).

Written in Gluon. One warp asks the tensor memory accelerator for units, a ring of them ahead, and begins with those of W before x
is there. Four others multiply: the matrix units' rows are outputs, and their columns are the rows of x.
"""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.gluon_launch import all_threads, constant, kernel, kernel_of_any
from enginery_ops_triton.kernels.launch import release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import bound, round_to


def blocks_of(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For copies of so many rows and columns. matrix begins at, and its rows are apart by, a multiple of 16 bytes."""
    dtype = gl.bfloat16 if matrix.dtype is torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


@constant
def sums(warps: int, rows: int) -> gl.NVMMADistributedLayout:
    """[outputs, rows]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, rows, 16])


@kernel
def place_of(unit: tl.tensor, share: tl.tuple, steps: tl.tensor) -> tl.tuple:
    """The tile and the step of a program's unit: first are its units of shared tiles, and then its own tiles."""
    begin, shared, shared_tiles, _ = share
    own = unit - shared
    tile = gl.where(own < 0, (begin + unit) // steps, shared_tiles + own // steps * gl.num_programs(0) + gl.program_id(0))
    return tile, gl.where(own < 0, (begin + unit) % steps, own % steps)


@kernel
def fetch(
    x: tl.tensor,
    weight: tl.tensor,
    xs: tl.tensor,
    weights: tl.tensor,
    full: tl.tensor,
    free: tl.tensor,
    share: tl.tuple,
    steps: tl.tensor,
    CHAINED: tl.constexpr,
) -> None:
    """Keeps the ring full."""
    count = share[3]
    stages: tl.constexpr = weights.shape[0]
    block_n: tl.constexpr = weights.shape[1]
    block_k: tl.constexpr = weights.shape[2]
    unit_bytes: tl.constexpr = (block_n + xs.shape[1]) * block_k * 2
    ahead = gl.minimum(stages, count)
    for unit in range(bound(ahead)):
        tile, step = place_of(unit, share, steps)
        mbarrier.expect(full.index(unit), unit_bytes)
        tma.async_copy_global_to_shared(weight, [tile * block_n, step * block_k], full.index(unit), weights.index(unit))
    wait_for_predecessor(CHAINED)
    for unit in range(bound(ahead)):
        tile, step = place_of(unit, share, steps)
        tma.async_copy_global_to_shared(x, [0, step * block_k], full.index(unit), xs.index(unit))
    slot = 0
    phase = 0
    for unit in range(bound(ahead), bound(count)):
        tile, step = place_of(unit, share, steps)
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(full.index(slot), unit_bytes)
        tma.async_copy_global_to_shared(weight, [tile * block_n, step * block_k], full.index(slot), weights.index(slot))
        tma.async_copy_global_to_shared(x, [0, step * block_k], full.index(slot), xs.index(slot))
        slot += 1
        if slot == stages:
            slot = 0
            phase ^= 1


@kernel
def multiply(
    xs: tl.tensor,
    weights: tl.tensor,
    full: tl.tensor,
    free: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    share: tl.tuple,
    steps: tl.tensor,
    BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Computes tile after tile. Of a shared tile each program leaves its sums; the last to arrive adds them up in a fixed order."""
    stages: tl.constexpr = weights.shape[0]
    block_n: tl.constexpr = weights.shape[1]
    rows: tl.constexpr = xs.shape[1]
    layout: tl.constexpr = sums(gl.num_warps(), rows)
    n = gl.expand_dims(gl.arange(0, block_n, layout=gl.SliceLayout(1, layout)), 1)
    m = gl.expand_dims(gl.arange(0, rows, layout=gl.SliceLayout(0, layout)), 0)
    in_tile = m * block_n + n
    begin, shared, shared_tiles, count = share
    total = shared_tiles * steps
    sharers = gl.minimum(gl.num_programs(0), total)
    wait_for_predecessor(CHAINED)
    slot = 0
    phase = 0
    done = 0
    while done < count:
        tile, step = place_of(done, share, steps)
        length = gl.minimum(steps - step, gl.where(done < shared, shared, count) - done)
        acc = gl.zeros([block_n, rows], gl.float32, layout=layout)
        for _ in range(bound(length)):
            mbarrier.wait(full.index(slot), phase)
            acc = warpgroup_mma(weights.index(slot), xs.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(slot), count=1)
            slot += 1
            if slot == stages:
                slot = 0
                phase ^= 1
        done += length
        last = length == steps
        if length < steps:
            second = gl.where(begin // steps == tile, 0, 1)  # of the two tiles of which a program may have a part
            gl.store(partial + (gl.program_id(0) * 2 + second) * (block_n * rows) + in_tile, acc)
            all_threads()  # all threads have stored before one of them says so
            first_program = ((tile * steps + 1) * sharers - 1) // total
            last_program = ((tile + 1) * steps * sharers - 1) // total
            last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == last_program - first_program
            if last:
                acc = gl.zeros([block_n, rows], gl.float32, layout=layout)
                for program in range(bound(first_program), bound(last_program + 1)):
                    second = gl.where(program * total // sharers // steps == tile, 0, 1)
                    acc += gl.load(partial + (program * 2 + second) * (block_n * rows) + in_tile, cache_modifier=".cg")
                gl.store(arrived + tile, 0)
        if last:
            output = tile * block_n + n
            if BIAS:
                acc += gl.load(bias + output, mask=output < num_outputs, other=0.0).to(gl.float32)
            inside = (m < num_rows) & (output < num_outputs)
            gl.store(out + m * num_outputs + output, round_to(acc, out.dtype.element_ty), mask=inside)


@kernel_of_any("num_rows", "num_outputs", "columns")
def linear_stream_k(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    num_rows: int,
    num_outputs: int,
    columns: int,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: `blocks_of` [num_rows, columns], all rows at once; weight: `blocks_of` [num_outputs, columns]; out: contiguous.

    partial: [programs, 2, rows of a block of x, outputs of a block] float32; arrived: [tiles], zeros before and after.
    """
    release_successor(CHAINED)
    block_n: tl.constexpr = weight.block_shape[0]
    block_k: tl.constexpr = weight.block_shape[1]
    steps = (columns + block_k - 1) // block_k
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tiles = (num_outputs + block_n - 1) // block_n
    shared_tiles = tiles % programs
    total = shared_tiles * steps
    sharers = gl.maximum(gl.minimum(programs, total), 1)
    begin = gl.minimum(program * total // sharers, total)
    shared = gl.minimum((program + 1) * total // sharers, total) - begin
    count = shared + tiles // programs * steps
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, block_n, block_k], weight.layout)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_shape[0], block_k], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    all_threads()
    share = (begin, shared, shared_tiles, count)
    gl.warp_specialize(
        [
            (multiply, (xs, weights, full, free, bias, out, partial, arrived, num_rows, num_outputs, share, steps, BIAS, CHAINED)),
            (fetch, (x, weight, xs, weights, full, free, share, steps, CHAINED)),
        ],
        [1],  # warps of `fetch`
        [40],  # registers of its threads
    )
