"""Packed weights times x for up to 16 pairs of an expert: weights go from memory to the registers of the matrix units.

Written in Gluon, which leaves to the kernel which thread has which values. Four lanes of a warp share a row and have 16 bytes each
of a group's 64: eight words, which give eight adjacent columns in each of the four matrices [rows, 32]. Of x, which is in shared
memory, a lane takes the same columns of its row. Which columns the matrix units multiply together is free as long as both sides
agree, so weights never move between threads, and a loop takes 2.5 instructions a value where the other one takes 3.2.

A group's words and its x are on their way while the STAGES - 1 groups before it are multiplied. The one barrier of a group, which
x needs, also keeps the compiler from loading the words of several groups together.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.experts_float4 import GROUP_COLUMNS, LANES, tiny
from enginery_ops_triton.kernels.gluon_launch import constant, kernel
from enginery_ops_triton.kernels.launch import wait_for_predecessor


@constant
def by_quads(rows: int, warps: int, *, shared: bool) -> gl.DistributedLinearLayout:
    """[rows, 32], eight columns a lane. Warps have 16 rows each, in turn; shared: all have all of them."""
    registers, first = [[0, 1], [0, 2], [0, 4]], 8
    if not shared:
        registers, first = [*registers, [8, 0]], 16 * warps
    while first < rows:
        registers, first = [*registers, [first, 0]], 2 * first
    powers = [1 << bit for bit in range(warps.bit_length() - 1)]
    of_warps = [[0 if shared else 16 * power, 0] for power in powers]
    return gl.DistributedLinearLayout(registers, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], of_warps, [], [rows, 32])


@constant
def sums(warps: int) -> gl.NVMMADistributedLayout:
    """[rows, pairs]."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@kernel
def in_order_of_products(values: tl.tensor) -> tl.tensor:
    """[N, 32] with columns in the order in which the matrix units have them: of a lane's eight, two at a time."""
    parts = gl.permute(gl.reshape(values, [values.shape[0], 4, 2, 2, 2]), [0, 2, 3, 1, 4])
    return gl.reshape(parts, [values.shape[0], 32])


@constant
def fetched(warps: int) -> gl.BlockedLayout:
    """[4 pairs, 32]: a group's columns of x, a matrix after the other, eight columns a lane."""
    return gl.BlockedLayout([1, 8], [8, 4], [warps, 1], [1, 0])


@kernel
def columns_of(M: tl.constexpr, LAYOUT: tl.constexpr) -> tl.tensor:
    """[4 M, 32], of a group."""
    place = gl.arange(0, 4 * M, layout=gl.SliceLayout(1, LAYOUT)) // M
    return gl.expand_dims(place * LANES, 1) + gl.expand_dims(gl.arange(0, LANES, layout=gl.SliceLayout(0, LAYOUT)), 0)


@kernel
def fetch_x(into: tl.tensor, x_at: tl.tensor, wanted: tl.tensor, left: tl.tensor) -> None:
    """into: [4 M, 32] in shared memory; left: columns of x from there on. What is not wanted, or behind them, is zero."""
    column = columns_of(x_at.shape[0] // 4, fetched(gl.num_warps()))
    async_copy.async_copy_global_to_shared(into, x_at, mask=wanted & (column < left))
    async_copy.commit_group()


@kernel
def add_group(acc: tl.tensor, words: tl.tensor, exponents: tl.tensor, x: tl.tensor) -> tl.tensor:
    """acc [N, M] and a group's columns of words [N, 32] times those of x, [4 M, 32] in shared memory."""
    layout: tl.constexpr = acc.type.layout
    rows: tl.constexpr = gl.DotOperandLayout(0, layout, 2)
    columns: tl.constexpr = gl.DotOperandLayout(1, layout, 2)
    of_x: tl.constexpr = by_quads(acc.shape[1], gl.num_warps(), shared=True)
    words = gl.convert_layout(in_order_of_products(words), rows, assert_trivial=True)
    exponents = gl.convert_layout(exponents, gl.SliceLayout(1, rows), assert_trivial=True)
    for place in gl.static_range(4):
        bits = (exponents << 7 if place % 2 == 0 else exponents >> 1) & 0x7F807F80  # of two places
        bits = (bits if place < 2 else bits >> 16).to(gl.int16)
        weight = tiny(words, place) * gl.expand_dims(bits.to(gl.bfloat16, bitcast=True), 1)
        part = gl.permute(in_order_of_products(x.slice(place * acc.shape[1], acc.shape[1]).load(of_x)), [1, 0])
        acc = mma_v2(weight, gl.convert_layout(part, columns, assert_trivial=True), acc)
    return acc


@kernel
def product(
    words: tl.tensor,
    exponents: tl.tensor,
    x: tl.tensor,
    row: tl.tensor,
    wanted: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    WAITS: tl.constexpr,
) -> tl.tensor:
    """As `experts_float4.product`. x: [4 M] pointers to rows, all of them four times; wanted: [4 M].

    STAGES: at least two, and at most a part's groups. WAITS: for the kernel that writes x, once the first groups are on their way.
    """
    groups: tl.constexpr = (COLUMNS + GROUP_COLUMNS - 1) // GROUP_COLUMNS
    each: tl.constexpr = (groups + SPLIT - 1) // SPLIT
    gl.static_assert(STAGES >= 2)
    gl.static_assert(each >= STAGES)
    begin = gl.program_id(1) * each
    count = each if groups % SPLIT == 0 else gl.minimum(each, groups - begin)
    pairs: tl.constexpr = x.shape[0] // 4
    x_at = gl.expand_dims(x + begin * GROUP_COLUMNS, 1) + columns_of(pairs, fetched(gl.num_warps()))
    wanted = gl.expand_dims(wanted, 1)
    left = COLUMNS - begin * GROUP_COLUMNS
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, row.type.layout.parent))
    words_at = words + begin * (ROWS * LANES) + gl.expand_dims(row, 1) * LANES + gl.expand_dims(lane, 0)
    exponents_at = exponents + begin * ROWS + row
    acc = gl.zeros([row.shape[0], pairs], gl.float32, layout=sums(gl.num_warps()))
    plain: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ahead = ()  # type: tuple[tl.tensor, ...]
    ring = ()  # type: tuple[tl.tensor, ...]
    for stage in gl.static_range(STAGES):
        ahead += (load_group(words_at, exponents_at, stage, stage < count, ROWS),)
        ring += (gl.allocate_shared_memory(gl.bfloat16, [4 * pairs, LANES], plain),)
    wait_for_predecessor(WAITS)
    for stage in gl.static_range(STAGES - 1):
        fetch_x(ring[stage], x_at, wanted, left)
        x_at += GROUP_COLUMNS
        left -= GROUP_COLUMNS
    for _ in range(each // STAGES):
        words_at += STAGES * ROWS * LANES
        exponents_at += STAGES * ROWS
        count -= STAGES
        behind = ()  # type: tuple[tl.tensor, ...]
        for stage in gl.static_range(STAGES):
            async_copy.wait_group(STAGES - 2)
            fetch_x(ring[(stage + STAGES - 1) % STAGES], x_at, wanted, left)
            x_at += GROUP_COLUMNS
            left -= GROUP_COLUMNS
            acc = add_group(acc, ahead[stage][0], ahead[stage][1], ring[stage])
            behind += (load_group(words_at, exponents_at, stage, stage < count, ROWS),)
        ahead = behind
    async_copy.wait_group(0)
    for stage in gl.static_range(each % STAGES):
        acc = add_group(acc, ahead[stage][0], ahead[stage][1], ring[stage])
    return acc


@kernel
def load_group(
    words_at: tl.tensor, exponents_at: tl.tensor, stage: tl.constexpr, there: tl.tensor, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Words and exponents so many groups further on, which are there, or zeros."""
    words = gl.load(words_at + stage * (ROWS * LANES), mask=there, other=0, cache_modifier=".cg")
    return words, gl.load(exponents_at + stage * ROWS, mask=there, other=0, cache_modifier=".cg")
