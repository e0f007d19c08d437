"""As `decode`, for few requests: what takes long is then the way of one program, and not the memory.

Written in Gluon, which leaves to the kernel which thread has which values. Keys, values and queries go from memory to the registers
of the matrix units, whose 16 rows are keys and then dims of values, and whose 8 columns are rows of queries. The warps of a program
have keys of their own, and need each other only when their results are added up at the end. Which dims the matrix units multiply
together is free as long as both sides agree, and so is the order in which dims of values come out.

Where keys are is read before the predecessor has ended; keys are not, as it may write the last one.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon.language.nvidia.ampere import mma_v2  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_attn_triton.kernels.chaining import release_successor, wait_for_predecessor
from enginery_attn_triton.kernels.gluon_launch import constant, kernel
from enginery_attn_triton.kernels.tiles import LOG2_E, NOTHING, bound, soft_capped


@constant
def by_quads(warps: int, rows: int, dims: int) -> gl.DistributedLinearLayout:
    """[warps, rows, dims], eight dims a lane at a time."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    registers += [[0, 8 << bit, 0] for bit in range((rows // 8).bit_length() - 1)]
    registers += [[0, 0, 32 << bit] for bit in range((dims // 32).bit_length() - 1)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    of_warps = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, rows, dims])


@constant
def by_lanes(warps: int, keys: int, dims: int) -> gl.DistributedLinearLayout:
    """[warps, keys, dims], an eighth of the dims a lane."""
    run = dims // 8
    registers = [[0, 0, 1 << bit] for bit in range(run.bit_length() - 1)]
    registers += [[0, 1, 0], *([0, 8 << bit, 0] for bit in range((keys // 8).bit_length() - 1))]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, run], [0, 0, 2 * run], [0, 0, 4 * run]]
    of_warps = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, keys, dims])


@constant
def products(warps: int) -> gl.NVMMADistributedLayout:
    """[warps, keys or dims, rows]."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@constant
def dims_adjacent(warps: int, dims: int) -> gl.BlockedLayout:
    """[warps, dims, rows], a thread has what all warps have of some dims."""
    return gl.BlockedLayout([warps, dims // 16, 1], [1, 16, 2], [1, 1, warps], [1, 2, 0])


@constant
def dims_adjacent_of_two(warps: int, dims: int) -> gl.BlockedLayout:
    """The same of two numbers each."""
    return gl.BlockedLayout([warps, dims // 16, 1, 2], [1, 16, 2, 1], [1, 1, warps, 1], [3, 1, 2, 0])


@kernel
def in_order_of_products(values: tl.tensor) -> tl.tensor:
    """[warps, N, D] with dims in the order in which the matrix units have them: of a lane's eight, two at a time."""
    warps: tl.constexpr = values.shape[0]
    rows: tl.constexpr = values.shape[1]
    dims: tl.constexpr = values.shape[2]
    parts = gl.permute(gl.reshape(values, [warps, rows, dims // 32, 4, 2, 2, 2]), [0, 1, 2, 4, 5, 3, 6])
    return gl.reshape(parts, [warps, rows, dims])


@kernel
def transposed(values: tl.tensor) -> tl.tensor:
    """[warps, keys, V] -> [warps, V, keys], the dims in the order in which lanes have them."""
    warps: tl.constexpr = values.shape[0]
    keys: tl.constexpr = values.shape[1]
    dims: tl.constexpr = values.shape[2]
    parts = gl.permute(gl.reshape(values, [warps, keys, 8, dims // 8]), [0, 3, 2, 1])
    return gl.reshape(parts, [warps, dims, keys])


@kernel
def of_warps(ROWS: tl.constexpr, APART: tl.constexpr, LAYOUT: tl.constexpr) -> tl.tensor:
    """[warps, ROWS]: a warp's rows, which are so far from those of the warp before."""
    warp = gl.arange(0, gl.num_warps(), layout=gl.SliceLayout(1, LAYOUT))
    return gl.expand_dims(warp * APART, 1) + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT)), 0)


@kernel
def addresses(base: tl.tensor, rows: tl.tensor, STRIDE: tl.constexpr, DIMS: tl.constexpr, LAYOUT: tl.constexpr) -> tl.tensor:
    """[warps, rows, DIMS] of rows [warps, rows], int64."""
    dims = gl.arange(0, DIMS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return base + gl.expand_dims(rows * STRIDE, 2) + gl.expand_dims(gl.expand_dims(dims, 0), 1)


@kernel
def slots_from(
    first: tl.tensor, last: tl.tensor, pages: tl.tensor, PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr, LAYOUT: tl.constexpr
) -> tl.tensor:
    """[warps, KEYS] int64: where the keys from `first` on are in the pool; behind the last it is the last again."""
    keys = gl.minimum(first + of_warps(KEYS, KEYS, LAYOUT), last - 1)
    return gl.load(pages + keys // PAGE_SIZE).to(gl.int64) * PAGE_SIZE + keys % PAGE_SIZE


@kernel
def fold(
    acc: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    scores: tl.tensor,
    v_tile: tl.tensor,
    start: tl.tensor,
    last: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """As in `tiles.fold_tiles`, each warp for its own keys. scores: [warps, KEYS, ROWS], v_tile: [warps, KEYS, V]."""
    layout: tl.constexpr = scores.type.layout
    keys = gl.expand_dims(start + of_warps(scores.shape[1], scores.shape[1], gl.SliceLayout(2, layout)), 2)
    scores = gl.where(keys < last, scores, NOTHING)
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    shrink = gl.exp2(top - new_top)
    weights = gl.exp2(scores - gl.expand_dims(new_top, 1))
    total = total * shrink + gl.sum(weights, axis=1)
    weights = gl.convert_layout(weights.to(v_tile.dtype), gl.DotOperandLayout(1, layout, 2))
    values = gl.convert_layout(transposed(v_tile), gl.DotOperandLayout(0, layout, 2))
    return mma_v2(values, weights, acc * gl.expand_dims(shrink, 1)), total, new_top


@kernel
def decode_few(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_sums: tl.tensor,
    items: tl.tensor,
    splits: tl.tensor,
    pages: tl.tensor,
    sinks: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    Q_STRIDE: tl.constexpr,
    Q_HEAD: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    K_STRIDE: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_HEAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Grid: (K, items). KEYS: of a warp at a time. ROWS: as many as an item's rows have heads of one KV head, at the most.

    q, out, parts, part_sums, items and splits: as in `decode`, of requests of one row.
    """
    release_successor(CHAINED)
    item = items + gl.program_id(1) * 8
    first, last = gl.load(item + 2), gl.load(item + 3)
    if first >= last:
        if gl.program_id(1) == 0:
            wait_for_predecessor(CHAINED)
        return
    row, base, index, count = gl.load(item), gl.load(item + 1), gl.load(item + 4), gl.load(item + 5)
    warps: tl.constexpr = gl.num_warps()
    of_k: tl.constexpr = by_quads(warps, KEYS, D)
    of_v: tl.constexpr = by_lanes(warps, KEYS, V)
    of_q: tl.constexpr = by_quads(warps, ROWS, D)
    of_products: tl.constexpr = products(warps)
    of_all: tl.constexpr = dims_adjacent(warps, V)
    of_result: tl.constexpr = gl.SliceLayout(0, of_all)
    kv_head = gl.program_id(0)
    k += kv_head * K_HEAD
    v += kv_head * V_HEAD
    pages += base
    k_slots = slots_from(first, last, pages, PAGE_SIZE, KEYS, gl.SliceLayout(2, of_k))
    v_slots = slots_from(first, last, pages, PAGE_SIZE, KEYS, gl.SliceLayout(2, of_v))
    place = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, of_result)), 0)
    real = place < count * GROUP
    heads = kv_head * GROUP + place % GROUP
    sink = place.to(gl.float32)  # nobody reads it
    if SINKS:
        sink = gl.load(sinks + heads, mask=real, other=0.0) * LOG2_E
    part = gl.load(splits + (row + place // GROUP) * 2, mask=real, other=0) + index
    wait_for_predecessor(CHAINED)
    q_place = gl.minimum(of_warps(ROWS, 0, gl.SliceLayout(2, of_q)), count * GROUP - 1)
    q_rows = (row + q_place // GROUP).to(gl.int64) * Q_STRIDE + (kv_head * GROUP + q_place % GROUP) * Q_HEAD
    q_tile = gl.load(addresses(q, q_rows, 1, D, of_q))
    queries = gl.convert_layout(
        gl.permute(in_order_of_products(q_tile), [0, 2, 1]), gl.DotOperandLayout(1, of_products, 2), assert_trivial=True
    )
    acc = gl.zeros([warps, V, ROWS], gl.float32, layout=of_products)
    total = gl.zeros([warps, ROWS], gl.float32, layout=gl.SliceLayout(1, of_products))
    top = total + NOTHING
    for start in range(bound(first), bound(last), warps * KEYS):
        v_tile = gl.load(addresses(v, v_slots, V_STRIDE, V, of_v), volatile=True)
        k_tile = gl.load(addresses(k, k_slots, K_STRIDE, D, of_k), volatile=True)
        k_slots = slots_from(start + warps * KEYS, last, pages, PAGE_SIZE, KEYS, gl.SliceLayout(2, of_k))
        v_slots = slots_from(start + warps * KEYS, last, pages, PAGE_SIZE, KEYS, gl.SliceLayout(2, of_v))
        keys = gl.convert_layout(in_order_of_products(k_tile), gl.DotOperandLayout(0, of_products, 2), assert_trivial=True)
        scores = mma_v2(keys, queries, gl.zeros([warps, KEYS, ROWS], gl.float32, layout=of_products))
        if SOFTCAP:
            scores = soft_capped(scores, inner, outer)
        else:
            scores = scores * inner
        acc, total, top = fold(acc, total, top, scores, v_tile, start, last)
    both = gl.convert_layout(gl.join(top, total), gl.SliceLayout(1, dims_adjacent_of_two(warps, V)))
    tops, totals = gl.split(both)
    tops = gl.expand_dims(gl.convert_layout(tops, gl.SliceLayout(1, of_all), assert_trivial=True), 1)
    totals = gl.expand_dims(gl.convert_layout(totals, gl.SliceLayout(1, of_all), assert_trivial=True), 1)
    in_lanes = gl.permute(gl.reshape(acc, [warps, V // 8, 8, ROWS]), [0, 2, 1, 3])
    values = gl.convert_layout(gl.reshape(in_lanes, [warps, V, ROWS]), of_all)
    best = gl.max(tops, axis=0)
    factors = gl.exp2(tops - gl.expand_dims(best, 0))
    all_total = gl.sum(totals * factors, axis=0)
    if SINKS:
        all_total += gl.where(index < 0, gl.exp2(sink - best), 0.0)
    result = gl.sum(values * factors, axis=0) / all_total
    dims = gl.expand_dims(gl.arange(0, V, layout=gl.SliceLayout(1, of_result)), 1)
    wanted = real & (dims < V)
    if index < 0:
        places = (row + place // GROUP).to(gl.int64) * OUT_STRIDE + heads * OUT_HEAD
        gl.store(out + places + dims, result.to(out.dtype.element_ty), mask=wanted)
    else:
        entries = part.to(gl.int64) * NUM_HEADS + heads
        gl.store(parts + entries * V + dims, result, mask=wanted)
        gl.store(part_sums + entries, best + gl.log2(all_total), mask=real)
