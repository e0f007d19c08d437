"""Pairs of a token and an expert, sorted by expert and cut into tiles for the products of experts.py.

Few pairs are sorted by `sort_pairs`, where a program for each expert reads all of them. Many are counted, by three kernels:
`count_chunks` counts each expert's pairs in each chunk of CHUNK pairs. `place_chunks` adds the counts up: an expert's pairs begin
behind those of lower experts, and a chunk's behind those of earlier chunks. `scatter_pairs` moves pairs to where they belong, each
behind those of its expert that are before it in the chunk. So pairs of an expert stay in order, whatever order programs run in.
EXPERTS is the power of two that has room for all experts.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel, kernel_of_any, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import bound


@kernel
def write_tiles(
    tiles: tl.tensor,
    slot: tl.tensor,
    number: tl.tensor,
    num_slots: tl.tensor,
    expert: tl.tensor,
    lower: tl.tensor,
    count: tl.tensor,
    block_m: int,
) -> None:
    """Fill an expert's slots of these numbers, as far as it has them: see `sort_pairs`. Experts may be along another dimension."""
    begin = number * block_m
    at = tiles + (slot + number) * 3
    wanted = number < num_slots
    tl.store(at, tl.where(begin < count, expert, -1), mask=wanted)
    tl.store(at + 1, lower + begin, mask=wanted)
    tl.store(at + 2, lower + count + 0 * number, mask=wanted)


@kernel_of_any("num_pairs", "block_m", "sparse")
def sort_pairs(
    ids: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    num_pairs: int,
    block_m: int,
    sparse: int,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """ids: [num_pairs]; order: [num_pairs], pairs by expert; tiles: [slots, 3], each an expert, its first place in order, its end.

    Program e writes expert e's part. Its pairs begin at `lower`, the number of pairs with a lower expert, and its slots at
    e + lower // block_m (sparse: at lower), which leaves enough for each expert without knowing the others' counts. Slots without
    pairs hold expert -1.
    """
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    expert = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    below = tl.zeros((BLOCK,), dtype=tl.int32)
    here = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, bound(num_pairs), BLOCK):
        inside = start + offset < num_pairs
        found = tl.load(ids + start + offset, mask=inside, other=0)
        below += (inside & (found < expert)).to(tl.int32)
        here += (inside & (found == expert)).to(tl.int32)
    lower = tl.sum(below, axis=0)
    count = tl.sum(here, axis=0)
    slot = tl.where(sparse != 0, lower, expert + lower // block_m)
    num_slots = tl.where(sparse != 0, count, 1 + (lower + count) // block_m - lower // block_m)
    for start in range(0, bound(num_slots), BLOCK):
        write_tiles(tiles, slot, start + offset, num_slots, expert, lower, count, block_m)
    if count > 0:
        place = lower
        for start in range(0, bound(num_pairs), BLOCK):
            inside = start + offset < num_pairs
            mine = inside & (tl.load(ids + start + offset, mask=inside, other=0) == expert)
            ordinal = tl.cumsum(mine.to(tl.int32), axis=0)
            tl.store(order + place + ordinal - 1, start + offset, mask=mine)
            place += tl.max(ordinal, axis=0)


@kernel_of_any("num_pairs")
def count_chunks(
    ids: tl.tensor,
    counts: tl.tensor,
    totals: tl.tensor,
    num_pairs: int,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """ids: [num_pairs]; counts: [chunks, EXPERTS]; totals: [EXPERTS], zeros before."""
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = pair < num_pairs
    found = tl.histogram(tl.load(ids + pair, mask=inside, other=0), EXPERTS, mask=inside)
    expert = tl.arange(0, EXPERTS)
    tl.store(counts + tl.program_id(0) * EXPERTS + expert, found)
    tl.atomic_add(totals + expert, found, mask=found > 0, sem="relaxed")


@kernel_of_any("num_chunks", "num_experts", "block_m")
def place_chunks(
    counts: tl.tensor,
    totals: tl.tensor,
    tiles: tl.tensor,
    num_chunks: int,
    num_experts: int,
    block_m: int,
    EXPERTS: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """counts: how many pairs a chunk has of each expert -> where the first one goes. tiles: as `sort_pairs` has them.

    A program does it for SHARE experts, ROWS chunks or tiles at a time.
    """
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    expert = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    every = tl.arange(0, EXPERTS)
    total = tl.load(totals + every)
    lower = tl.sum(tl.where(every[None, :] < expert[:, None], total[None, :], 0), axis=1)
    count = tl.sum(tl.where(every[None, :] == expert[:, None], total[None, :], 0), axis=1)
    row = tl.arange(0, ROWS)
    begin = lower
    for first in range(0, bound(num_chunks), ROWS):
        at = counts + (first + row)[:, None] * EXPERTS + expert[None, :]
        inside = (first + row < num_chunks)[:, None]
        found = tl.load(at, mask=inside, other=0)
        tl.store(at, begin[None, :] + tl.cumsum(found, axis=0) - found, mask=inside)
        begin += tl.sum(found, axis=0)
    slot = expert + lower // block_m
    num_slots = tl.where(expert < num_experts, 1 + (lower + count) // block_m - lower // block_m, 0)
    for first in range(0, bound(tl.max(num_slots, axis=0)), ROWS):
        number = (first + row)[:, None]
        write_tiles(tiles, slot[None, :], number, num_slots[None, :], expert[None, :], lower[None, :], count[None, :], block_m)


@kernel_of_any("num_pairs")
def scatter_pairs(
    ids: tl.tensor,
    starts: tl.tensor,
    order: tl.tensor,
    num_pairs: int,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """starts: [chunks, EXPERTS], of `place_chunks`; order: [num_pairs], pairs by expert."""
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    place = tl.arange(0, CHUNK)
    pair = tl.program_id(0) * CHUNK + place
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    before = (expert[None, :] == expert[:, None]) & (place[None, :] < place[:, None])
    start = tl.load(starts + tl.program_id(0) * EXPERTS + expert, mask=pair < num_pairs, other=0)
    tl.store(order + start + tl.sum(before.to(tl.int32), axis=1), pair, mask=pair < num_pairs)
