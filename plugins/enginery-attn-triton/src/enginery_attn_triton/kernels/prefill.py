"""Tiles of rows against all keys that they see, in pages or given in one piece.

    keys of a tile's rows    [ window's edge | seen by every row .......... | diagonal ]
                               masked          not masked                     masked

Of prompts that are too few rows to fill the device, a program has a part of a tile's keys, and `merge` follows, as in decode.py.

H query heads, K KV heads, S rows, V value dims. The query heads of a KV head are rows of one tile: GROUP heads of TOKENS tokens.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_attn_triton.kernels.tiles import LOG2_E, NOTHING, fold_tiles, load_rows


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def prefill(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    parts: tl.tensor,
    part_sums: tl.tensor,
    splits: tl.tensor,
    tiles: tl.tensor,
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
    BLOCK_G: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGED: tl.constexpr,
    SHARED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    LSE: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid: (K * HEAD_BLOCKS, tiles). lse: [S, H] float32, natural, written where LSE.

    tiles: [., 8] int32: the request's first row, the tile's first token of it, its rows, its keys, first of its pages or of its
    keys; first and end of the keys that the program looks at, multiples of BLOCK_N, and which part of its rows they are, or -1 if
    they are all. BLOCK_G: of a tile's rows, those of one token, which are query heads of one KV head. parts, part_sums: as `decode`
    has them, splits: as `merge`.
    """
    tile = tiles + tl.program_id(1) * 8
    first_row, token, num_rows = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    num_keys, base = tl.load(tile + 3), tl.load(tile + 4)
    first_key, end_key, index = tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7)
    kv_head, block = tl.program_id(0) // HEAD_BLOCKS, tl.program_id(0) % HEAD_BLOCKS

    places = tl.arange(0, BLOCK_M)
    tokens = token + places // BLOCK_G
    in_group = block * BLOCK_G + places % BLOCK_G
    heads = kv_head * GROUP + in_group
    real = (places < TOKENS * BLOCK_G) & (tokens < num_rows) & (in_group < GROUP)
    rows = (first_row + tokens).to(tl.int64)
    dims = tl.arange(0, BLOCK_V)
    out_places = out + (rows * OUT_STRIDE + heads * OUT_HEAD)[:, None] + dims[None, :]
    wanted = real[:, None] & (dims < V)[None, :]
    if num_keys == 0:
        tl.store(out_places, tl.full([BLOCK_M, BLOCK_V], 0.0, dtype=out.dtype.element_ty), mask=wanted)
        if LSE:
            tl.store(lse + rows * NUM_HEADS + heads, tl.full([BLOCK_M], float("-inf"), dtype=tl.float32), mask=real)
        return
    q_places = rows * Q_STRIDE + heads * Q_HEAD
    q_main = load_rows(q, q_places, real, 1, D, BLOCK_D, True).to(DOT)
    q_rope = q_main
    if P > 0:
        q_rope = load_rows(q + D, q_places, real, 1, P, BLOCK_P, True).to(DOT)

    positions = num_keys - num_rows + tokens
    if CAUSAL:
        lowest = num_keys - num_rows + token
        highest = tl.minimum(num_keys - num_rows + token + TOKENS, num_keys) - 1
        end = highest + 1
        full = (lowest + 1) // BLOCK_N * BLOCK_N
    else:
        end = num_keys
        full = num_keys // BLOCK_N * BLOCK_N
    begin = 0
    edge = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        edge = tl.maximum(highest - WINDOW + BLOCK_N, 0) // BLOCK_N * BLOCK_N
        full = tl.maximum(full, begin)
        edge = tl.minimum(tl.maximum(edge, begin), full)

    acc = tl.full([BLOCK_M, BLOCK_V], 0.0, dtype=tl.float32)
    total = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    top = tl.full([BLOCK_M], NOTHING, dtype=tl.float32)
    k_head = k + kv_head * K_HEAD
    v_head = v + kv_head * V_HEAD
    first_page = pages + base
    for part in tl.static_range(3):
        if part == 0:
            start, stop = begin, edge
        elif part == 1:
            start, stop = edge, full
        else:
            start, stop = full, end
        start, stop = tl.maximum(start, first_key), tl.minimum(stop, end_key)
        if WINDOW > 0 or part > 0:
            acc, total, top = fold_tiles(
                acc,
                total,
                top,
                q_main,
                q_rope,
                k_head,
                v_head,
                first_page,
                base,
                positions,
                start,
                stop,
                num_keys,
                first_page,
                0,
                0,
                inner,
                outer,
                PAGED=PAGED,
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
                MASKED=part != 1,
                CAUSAL=CAUSAL,
                WINDOW=WINDOW,
                TREES=False,
                DOT=DOT,
            )

    if index < 0:
        if LSE:
            tl.store(lse + rows * NUM_HEADS + heads, (top + tl.log2(total)) / LOG2_E, mask=real)
        if SINKS:
            total += tl.exp2(tl.load(sinks + heads, mask=real, other=0.0) * LOG2_E - tl.where(real, top, 0.0))
        tl.store(out_places, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)
    else:
        total = tl.where(total > 0.0, total, 1.0)  # of no key at all: `top` says that it weighs nothing
        places_of_parts = tl.load(splits + rows * 2, mask=real, other=0) + index
        entries = places_of_parts.to(tl.int64) * NUM_HEADS + heads
        tl.store(parts + entries[:, None] * V + dims[None, :], acc / total[:, None], mask=wanted)
        tl.store(part_sums + entries, top + tl.log2(total), mask=real)
