"""The best token of logits whose columns several ranks have: each sends its own best to all, and chooses among those of all.

    own columns -> best of each block | best of the blocks -> two words to all parts | wait for the words of all | the best

A row is one program's, which meets those of the row on the other ranks. Words carry the turn, and lie at two places in turn, as
those of few rows do (`kernels/sums.py`).
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.sums import part_words

_NONE = tl.constexpr(2147483647)


@kernel
def best_of_ranks(
    logits: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    tokens: tl.tensor,
    addresses: tl.tensor,
    row_stride: int,
    num_blocks: int,
    first: int,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    TURNS: tl.constexpr,
    WORDS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """values, indices: [N, num_blocks <= BLOCK], of this rank's logits [N, COLUMNS], which begin at column `first` -> tokens [N].

    TURNS: where they begin in a part, in int32. WORDS: in bytes; [2, MOST_ROWS, 2, RANKS] int64, values and then indices.
    """
    release_successor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    own, rank, block = part_words(addresses, RANK), tl.arange(0, BLOCK_RANKS), tl.arange(0, BLOCK)
    parts = tl.load(addresses + rank, mask=rank < RANKS, other=0) + WORDS
    arriving = tl.load(addresses + RANK) + WORDS
    wait_for_predecessor(CHAINED)
    turn = tl.load(own + TURNS + row) + 1
    place = ((turn & 1) * MOST_ROWS + row) * (2 * RANKS)
    found = tl.load(values + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    index = tl.load(indices + row * num_blocks + block, mask=block < num_blocks, other=_NONE)
    value = tl.max(found, axis=0)
    index = tl.min(tl.where(found == value, index, _NONE), axis=0)
    if COLUMNS > 0:  # infinite stands for NaN too
        value = tl.load(logits + row * row_stride + index).to(tl.float32)
    tag, word = turn.to(tl.int64) << 32, tl.zeros((BLOCK_RANKS,), tl.int64)
    to = parts.to(tl.pointer_type(tl.int64)) + place + RANK
    tl.store(to, word + (tag | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)), mask=rank < RANKS)
    tl.store(to + RANKS, word + (tag | (index + first).to(tl.int64)), mask=rank < RANKS)
    at = arriving.to(tl.pointer_type(tl.int64)) + place + rank
    best = tl.load(at, mask=rank < RANKS, other=0, volatile=True)
    where = tl.load(at + RANKS, mask=rank < RANKS, other=0, volatile=True)
    while (tl.max(((best >> 32 != turn) | (where >> 32 != turn)) & (rank < RANKS), axis=0) != 0) & (
        tl.load(own, volatile=True) == 0
    ):
        best = tl.load(at, mask=rank < RANKS, other=0, volatile=True)
        where = tl.load(at + RANKS, mask=rank < RANKS, other=0, volatile=True)
    found = tl.where(rank < RANKS, best.to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
    is_nan = tl.max((found != found).to(tl.int32), axis=0) != 0
    index = tl.where((found == tl.max(found, axis=0)) & (rank < RANKS), where.to(tl.int32), _NONE)
    tl.store(tokens + row, tl.where(is_nan, -1, tl.min(index, axis=0)).to(tl.int64))
    tl.store(own + TURNS + row, turn)
