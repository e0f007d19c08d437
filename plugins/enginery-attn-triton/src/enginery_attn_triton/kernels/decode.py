"""One row per request, its keys split over programs; then the parts are merged (arXiv:2311.01282).

    request 0   [ item 0: first keys of both | item 1 | item 2 ]   -> parts 0 1 2 -> merged
    request 1   [ item 0                     | item 3 ]            -> parts 3 4   -> merged
    request 2   [ item 4 ]                                         -> written as it is

H query heads, K KV heads, V value dims. A program has up to BLOCK_M query heads of one KV head, of one request or of several that
begin with the same pages, so keys are read once for all of them. Where drafts are verified, a request has several rows, and a
program has as many of them as fit; each sees the keys up to its own, or of a tree of drafts those on its way.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_attn_triton.kernels.chaining import release_successor, wait_for_predecessor
from enginery_attn_triton.kernels.tiles import LOG2_E, NOTHING, bound, fold_tiles, load_rows


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def decode(
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
    lengths: tl.tensor,
    trees: tl.tensor,
    request_rows: tl.tensor,
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
    BLOCK_G: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SHARED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    VERIFIES: tl.constexpr,
    LENGTHS: tl.constexpr,
    WINDOW: tl.constexpr,
    TREES: tl.constexpr,
    CHAINED: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid: (K * HEAD_BLOCKS, items). BLOCK_G: of a program's rows, those of one token.

    items: [., 8] int32: row, first of its pages, first key, end of keys, which part of its row or -1, how many rows from `row` on,
    and with VERIFIES alone the position of `row`. WINDOW: 0 for none; without VERIFIES and LENGTHS the first key tells.
    request_rows: of each request, N. lengths: [.] int32, with LENGTHS the keys of each request, no more than its items have: an
    item behind them has a part that weighs nothing.
    trees: [., N, N] uint8, with TREES and VERIFIES, by request: which of its last N keys each row sees.
    parts: [., H, V] float32, part_sums: [., H] float32, base 2: of items with a part; others write to `out`. splits: as in `merge`.
    """
    release_successor(CHAINED)
    item = items + tl.program_id(1) * 8
    first, last = tl.load(item + 2), tl.load(item + 3)
    if first >= last:
        if tl.program_id(1) == 0:
            wait_for_predecessor(CHAINED)
        return
    row, base, index, count = tl.load(item), tl.load(item + 1), tl.load(item + 4), tl.load(item + 5)
    kv_head, block = tl.program_id(0) // HEAD_BLOCKS, tl.program_id(0) % HEAD_BLOCKS
    places = tl.arange(0, BLOCK_M)
    in_group = block * BLOCK_G + places % BLOCK_G
    real = (places // BLOCK_G < count) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    sink = tl.load(sinks + heads, mask=real, other=0.0) * LOG2_E if SINKS else 0.0  # early: at the end nothing else is on its way
    wait_for_predecessor(CHAINED)
    rows = row + places // BLOCK_G
    if LENGTHS:
        length = tl.load(lengths + row // request_rows)
        last = tl.minimum(last, length)
        position = length - request_rows + row % request_rows
    elif VERIFIES:
        position = tl.load(item + 6)
    else:
        position = row  # nobody reads it
    positions = position + places // BLOCK_G
    tree = trees
    tree_first = position - row % request_rows
    if TREES:
        tree = trees + row // request_rows * request_rows * request_rows
    q_places = rows.to(tl.int64) * Q_STRIDE + heads * Q_HEAD
    q_main = load_rows(q, q_places, real, 1, D, BLOCK_D, True).to(DOT)
    q_rope = q_main
    if P > 0:
        q_rope = load_rows(q + D, q_places, real, 1, P, BLOCK_P, True).to(DOT)
    acc = tl.full([BLOCK_M, BLOCK_V], 0.0, dtype=tl.float32)
    total = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    top = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    acc, total, top = fold_tiles(
        acc,
        total,
        top,
        q_main,
        q_rope,
        k + kv_head * K_HEAD,
        v + kv_head * V_HEAD,
        pages + base,
        first,
        positions,
        first,
        last,
        last,
        tree,
        request_rows,
        tree_first,
        inner,
        outer,
        PAGED=True,
        PAGE_SIZE=PAGE_SIZE,
        K_STRIDE=K_STRIDE,
        V_STRIDE=V_STRIDE,
        D=D,
        P=P,
        V=V,
        BLOCK_D=BLOCK_D,
        BLOCK_P=BLOCK_P,
        BLOCK_V=BLOCK_V,
        BLOCK_N=BLOCK_N,
        SHARED=SHARED,
        SOFTCAP=SOFTCAP,
        MASKED=True,
        CAUSAL=VERIFIES,
        WINDOW=WINDOW if VERIFIES or LENGTHS else 0,
        TREES=TREES,
        DOT=DOT,
    )
    if LENGTHS:
        total = tl.where(total > 0.0, total, 1.0)  # of no key at all: `top` says that it weighs nothing
    dims = tl.arange(0, BLOCK_V)
    wanted = real[:, None] & (dims < V)[None, :]
    if index < 0:
        if SINKS:
            total += tl.exp2(sink - tl.where(real, top, 0.0))
        out_places = rows.to(tl.int64) * OUT_STRIDE + heads * OUT_HEAD
        tl.store(out + out_places[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)
    else:
        part = tl.load(splits + rows * 2, mask=real, other=0) + index
        entries = part.to(tl.int64) * NUM_HEADS + heads
        tl.store(parts + entries[:, None] * V + dims[None, :], acc / total[:, None], mask=wanted)
        tl.store(part_sums + entries, top + tl.log2(total), mask=real)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def merge(
    out: tl.tensor,
    parts: tl.tensor,
    part_sums: tl.tensor,
    splits: tl.tensor,
    sinks: tl.tensor,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SINKS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Grid: (programs of a request, which share its H heads; requests).

    splits: [., 2] int32: a request's first part and how many it has; 0 where its row is written already.
    """
    release_successor(CHAINED)
    row = tl.program_id(1)
    first, count = tl.load(splits + row * 2), tl.load(splits + row * 2 + 1)
    wait_for_predecessor(CHAINED)
    if count == 0:
        return
    dims, some = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
    for head in range(bound(tl.program_id(0)), NUM_HEADS, bound(tl.num_programs(0))):
        sink = tl.load(sinks + head) * LOG2_E if SINKS else 0.0
        acc = tl.full([BLOCK_V], 0.0, dtype=tl.float32)
        total, top = 0.0, NOTHING
        for start in range(0, bound(count), BLOCK_S):
            real = start + some < count
            entries = (first + start + some).to(tl.int64) * NUM_HEADS + head
            sums = tl.load(part_sums + entries, mask=real, other=NOTHING)
            values = tl.load(parts + entries[:, None] * V + dims[None, :], mask=real[:, None] & (dims < V)[None, :], other=0.0)
            new_top = tl.maximum(top, tl.max(sums, 0))
            weights = tl.where(real, tl.exp2(sums - new_top), 0.0)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 0)
            acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
            top = new_top
        if SINKS:
            total += tl.exp2(sink - top)
        places = out + row.to(tl.int64) * OUT_STRIDE + head * OUT_HEAD + dims
        tl.store(places, (acc / total).to(out.dtype.element_ty), mask=dims < V)
