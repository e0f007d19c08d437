"""Sums over ranks within the norm behind them: each rank's kernel reads and writes the memory of the others.

    one shot    own rows -> own part | meet | add up all parts, add to the residual, norm
    two shots   own rows -> own part | meet | add up a share of the columns, to all parts | meet | add to the residual, norm

A program has the same rows on every rank, and meets the programs of its number there. It counts its turns; rows lie at a place of
its own in its part, of two that it takes in turn: when it writes to one again, every rank has begun its kernel of the turn between,
and so ended the one that read it. No two programs of a rank wait for each other, so that it does not matter which run first.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import round_to


@kernel
def _words(addresses: tl.tensor, rank: tl.constexpr) -> tl.tensor:
    """A rank's part as int32."""
    return tl.load(addresses + rank).to(tl.pointer_type(tl.int32))


@kernel
def _rows(addresses: tl.tensor, rank: tl.constexpr, DTYPE: tl.constexpr, BEGIN: tl.constexpr) -> tl.tensor:
    """Where rows begin in a rank's part, BEGIN bytes behind its own begin."""
    return tl.multiple_of((tl.load(addresses + rank) + BEGIN).to(tl.pointer_type(DTYPE)), 16)


@kernel
def _meet(
    addresses: tl.tensor, program: tl.tensor, turn: tl.tensor, FLAGS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr
) -> None:
    """Wait until this program has come here on every rank in this turn: what each wrote before is seen behind it.

    FLAGS: where flags begin in a part, in words; [programs, RANKS], each of the last turn that a rank came in. The first word of a
    part is not 0 when nobody is to be waited for any more.
    """
    tl.debug_barrier()
    own = _words(addresses, RANK)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.atomic_xchg(_words(addresses, rank) + FLAGS + program * RANKS + RANK, turn, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = own + FLAGS + program * RANKS + rank
            while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") - turn < 0) & (tl.load(own, volatile=True) == 0):
                pass
    tl.debug_barrier()


@kernel
def _total(
    addresses: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
) -> tl.tensor:
    """The numbers at these places of all ranks' rows, added up in the order of ranks: [BLOCK] float32."""
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        values = tl.load(_rows(addresses, rank, DTYPE, ROWS) + at, mask=inside, other=0.0, cache_modifier=".cg")
        total += values.to(tl.float32)
    return total


@kernel
def sum_norm(
    partial: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    num_rows: int,
    partial_stride: int,
    residual_stride: int,
    eps: float,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_SHARE: tl.constexpr,
    MOST_PROGRAMS: tl.constexpr,
    REGION: tl.constexpr,
    TURNS: tl.constexpr,
    FLAGS: tl.constexpr,
    ROWS: tl.constexpr,
    SUMS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """partial, residual: [N, COLUMNS] with their row strides; out: [N, COLUMNS] contiguous; addresses: [RANKS] int64, of parts.

    EACH: rows of a program, at most. SHARE: columns that each rank adds up for all; 0: in one shot. REGION: elements that a
    program's rows have room for. TURNS, FLAGS: where they begin in a part, in words; ROWS, SUMS: in bytes. The sum is rounded
    before it is added, as it is where NCCL takes it.
    """
    release_successor(CHAINED)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    DTYPE: tl.constexpr = partial.dtype.element_ty
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    turns = _words(addresses, RANK) + TURNS + program
    wait_for_predecessor(CHAINED)
    turn = tl.load(turns) + 1
    region = ((turn & 1) * MOST_PROGRAMS + program) * REGION
    for place in range(EACH):
        row = program + place * programs
        inside = (column < COLUMNS) & (row < num_rows)
        values = tl.load(partial + row * partial_stride + column, mask=inside, other=0.0)
        tl.store(_rows(addresses, RANK, DTYPE, ROWS) + region + place * COLUMNS + column, values, mask=inside)
    _meet(addresses, program, turn, FLAGS, RANK, RANKS)
    if SHARE:
        lane = tl.arange(0, BLOCK_SHARE)
        shared = RANK * SHARE + lane
        for place in range(EACH):
            within = (lane < SHARE) & (shared < COLUMNS) & (program + place * programs < num_rows)
            at = region + place * COLUMNS + shared
            total = round_to(_total(addresses, at, within, BLOCK_SHARE, DTYPE, ROWS, RANKS), DTYPE)
            for rank in tl.static_range(RANKS):
                tl.store(_rows(addresses, rank, DTYPE, SUMS) + program * REGION + place * COLUMNS + shared, total, mask=within)
        _meet(addresses, program, turn, FLAGS + MOST_PROGRAMS * RANKS, RANK, RANKS)
    for place in range(EACH):
        row = program + place * programs
        inside = (column < COLUMNS) & (row < num_rows)
        if SHARE:
            at = _rows(addresses, RANK, DTYPE, SUMS) + program * REGION + place * COLUMNS + column
            values = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        else:
            at = region + place * COLUMNS + column
            values = round_to(_total(addresses, at, inside, BLOCK, DTYPE, ROWS, RANKS), DTYPE)
        kept = residual + row * residual_stride + column
        added = tl.load(kept, mask=inside, other=0.0).to(tl.float32) + values.to(tl.float32)
        values = round_to(added, DTYPE)
        tl.store(kept, values, mask=inside)
        wide = values.to(tl.float32)
        normed = round_to(wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps), DTYPE)
        tl.store(out + row * COLUMNS + column, round_to(normed.to(tl.float32) * scale, out.dtype.element_ty), mask=inside)
    tl.store(turns, turn)
