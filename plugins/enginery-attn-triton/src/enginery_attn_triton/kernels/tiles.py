"""The one loop of all kernels: fold tiles of keys and values into a running softmax (FlashAttention-2, arXiv:2307.08691).

M rows, N keys of a tile. A key has D main dims and P more, which have a dot product of their own, so that 512 + 64 and 128 + 64
need no padding to a power of two; P is 0 where there are none. V value dims. A name in capitals is known when a kernel is compiled.
Scores are in base 2: exp2 is what the hardware has.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_attn_triton.spec import is_interpreted

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOTHING: tl.constexpr = tl.constexpr(-1.0e30)  # a masked score: finite, so that a row with no key in a tile makes no NaN


if is_interpreted():

    def inlined(function: Any) -> Any:
        """What kernels call. Interpreted, it is called as it is: the interpreter is slow to enter a function."""
        return function

    def bound(number: Any) -> int:
        """Of a loop: the interpreter has arrays of one element for scalars, and Python's range, from numpy 2.4 on, takes none."""
        return number if isinstance(number, int) else int(number.handle.data.item())

else:
    inlined = triton.jit

    @inlined  # type: ignore[untyped-decorator,unused-ignore]
    def bound(number: tl.tensor) -> tl.tensor:
        """Of a loop: itself."""
        return number


@inlined  # type: ignore[untyped-decorator,unused-ignore]
def slots_of(keys: tl.tensor, pages: tl.tensor, inside: tl.tensor, PAGE_SIZE: tl.constexpr) -> tl.tensor:
    """[N] int64: where each key is in the pool, from the request's list of pages. Wide, because slot times stride exceeds 2^31."""
    page = tl.load(pages + keys // PAGE_SIZE, mask=inside, other=0)
    return page.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE


@inlined  # type: ignore[untyped-decorator,unused-ignore]
def load_rows(
    base: tl.tensor,
    rows: tl.tensor,
    inside: tl.tensor,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """[rows, BLOCK]: the first DIM values of each row, zeros after them and in rows that are not `inside`."""
    dims = tl.arange(0, BLOCK)
    places = base + rows[:, None] * STRIDE + dims[None, :]
    if MASKED:
        if DIM == BLOCK:
            return tl.load(places, mask=inside[:, None], other=0.0)
        return tl.load(places, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    if DIM == BLOCK:
        return tl.load(places)
    return tl.load(places, mask=(dims < DIM)[None, :], other=0.0)


@inlined  # type: ignore[untyped-decorator,unused-ignore]
def soft_capped(scores: tl.tensor, inner: tl.tensor, outer: tl.tensor) -> tl.tensor:
    """outer tanh(inner scores), by an exponential that cannot overflow."""
    scaled = scores * inner
    small = tl.exp2(-2.0 * LOG2_E * tl.abs(scaled))
    size = outer * (1.0 - small) / (1.0 + small)
    return tl.where(scaled < 0.0, -size, size)


@inlined  # type: ignore[untyped-decorator,unused-ignore]
def fold_tiles(
    acc: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    q_main: tl.tensor,
    q_rope: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    first_slot: tl.tensor,
    positions: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    num_keys: tl.tensor,
    tree: tl.tensor,
    tree_rows: tl.tensor,
    tree_first: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    PAGED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    TREES: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """Fold keys [first, last) into acc [M, V], total [M] and top [M], and return the three.

    q_main: [M, D], q_rope: [M, P]. k, v: the pool or a tensor, at this head. pages: the request's, where PAGED; else its keys
    begin at row `first_slot`. positions: [M], of the rows, among num_keys keys. MASKED: with keys that not every row sees. SHARED:
    the first V dims of a key are its value (MLA), and are loaded once. tree: with TREES and CAUSAL, [tree_rows, tree_rows] uint8,
    which of the keys from `tree_first` on the rows at these positions see. DOT: what is multiplied.
    """
    columns = tl.arange(0, BLOCK_N)
    for start in range(bound(first), bound(last), BLOCK_N):
        keys = start + columns
        inside = keys < num_keys
        if PAGED:
            if MASKED:
                slots = slots_of(keys, pages, inside, PAGE_SIZE)
            else:
                slots = tl.load(pages + keys // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
        else:
            slots = first_slot.to(tl.int64) + keys
        key_tile = load_rows(k, slots, inside, K_STRIDE, D, BLOCK_D, MASKED).to(DOT)
        scores = tl.dot(q_main, tl.trans(key_tile), input_precision="ieee")
        if P > 0:
            rope_tile = load_rows(k + D, slots, inside, K_STRIDE, P, BLOCK_P, MASKED).to(DOT)
            scores = tl.dot(q_rope, tl.trans(rope_tile), acc=scores, input_precision="ieee")
        if SOFTCAP:
            scores = soft_capped(scores, inner, outer)
        else:
            scores = scores * inner
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= positions[:, None])
            if WINDOW > 0:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            if TREES:
                nodes, places = positions[:, None] - tree_first, keys[None, :] - tree_first
                asked = seen & (places >= 0) & (nodes < tree_rows)
                seen = seen & (tl.load(tree + nodes * tree_rows + places, mask=asked, other=1) != 0)
            scores = tl.where(seen, scores, NOTHING)
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if SHARED:
            value_tile = key_tile
        else:
            value_tile = load_rows(v, slots, inside, V_STRIDE, V, BLOCK_V, MASKED).to(DOT)
        acc = tl.dot(weights.to(v.dtype.element_ty).to(DOT), value_tile, acc=acc, input_precision="ieee")
        top = new_top
    return acc, total, top
