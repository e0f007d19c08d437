"""Sums over ranks within the norm behind them: each rank's kernel reads and writes the memory of the others.

    two ranks   own rows, block after block -> the other's part | wait for its block before that one | add up, to the residual, norm
    few rows    own rows, each word with its turn -> all parts | wait for the words of all | add up, add to the residual, norm
    more        shares of own rows -> the ranks that add them up | meet | own share added up -> all parts | meet | add, norm

A program has the same rows on every rank, and meets the programs of its number there. It counts its turns. No two programs of a
rank wait for each other, so that it does not matter which run first. What was written is read before it is overwritten: rows and
sums, as a program comes to a meeting behind what it read; words, as they lie at two places in turn, and whoever writes to one again
has had the words of the turn between, whose kernel began where the one before it had ended; blocks, as they lie at four places in
turn, and whoever sends one has had the other's block but one before it, which the other sent when it had read those before its own
last but one: four before. All rows cross NVLink once each way, as they would by shares, and nobody waits twice.

Words of 64 bits arrive whole, so that one with the number of the turn in its upper half needs no flag behind it and no fence: it
takes twice the bytes and one way over NVLink where a meeting takes more (NCCL's protocol LL does the same).
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import bound, round_to


@kernel
def part_words(addresses: tl.tensor, rank: tl.constexpr) -> tl.tensor:
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
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.atomic_xchg(part_words(addresses, rank) + FLAGS + program * RANKS + RANK, turn, sem="release", scope="sys")
    own = part_words(addresses, RANK)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            _await(own + FLAGS + program * RANKS + rank, turn, own)
    tl.debug_barrier()


@kernel
def _await(flag: tl.tensor, turn: tl.tensor, over: tl.tensor) -> None:
    """Wait until the flag has come to a turn, or nobody is to be waited for any more."""
    while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") - turn < 0) & (tl.load(over, volatile=True) == 0):
        pass


@kernel
def _added_normed(
    values: tl.tensor,
    before: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    inside: tl.tensor,
    eps: float,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Rows' sums and what their residuals were, [rows, columns] of DTYPE both, to the residuals, and their norms to out.

    inside: what is there.
    """
    values = round_to(before.to(tl.float32) + values.to(tl.float32), DTYPE)
    tl.store(residual, values, mask=inside)
    wide = values.to(tl.float32)
    normed = round_to(wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / COLUMNS + eps)[:, None], DTYPE)
    tl.store(out, round_to(normed.to(tl.float32) * scale, out.dtype.element_ty), mask=inside)


@kernel
def sum_norm_few(
    partial: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    partial_stride: int,
    residual_stride: int,
    eps: float,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
    TURNS: tl.constexpr,
    WORDS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `sum_norm`, a row for each program.

    PACKED: numbers in a word, 1 or 2. SLOTS: of a turn, one for each program and rank, of REGION words. WORDS: where they begin in
    a part, in bytes.
    """
    release_successor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    DTYPE: tl.constexpr = partial.dtype.element_ty
    column = tl.arange(0, BLOCK * PACKED)[None, :]
    scale = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    own, word, rank = part_words(addresses, RANK), tl.arange(0, BLOCK), tl.arange(0, BLOCK_RANKS)[:, None]
    there = (rank < RANKS) & (word < COLUMNS // PACKED)[None, :]
    parts = (tl.load(addresses + rank, mask=rank < RANKS, other=0) + WORDS).to(tl.pointer_type(tl.int64))
    arriving = _rows(addresses, RANK, tl.int64, WORDS) + rank * REGION + word[None, :]
    wait_for_predecessor(CHAINED)
    turn = tl.load(own + TURNS + row) + 1
    first = ((turn & 1) * SLOTS + row * RANKS) * REGION
    bits = tl.load((partial + row * partial_stride).to(tl.pointer_type(tl.int32)) + word, mask=word < COLUMNS // PACKED, other=0)
    sent = (turn.to(tl.int64) << 32) | (bits.to(tl.int64) & 0xFFFFFFFF)
    tl.store(tl.multiple_of(parts, [16, 16]) + (first + RANK * REGION + word)[None, :], sent[None, :], mask=there)
    arriving += first
    kept = residual + row * residual_stride + column
    before = tl.load(kept, mask=column < COLUMNS, other=0.0)
    found = tl.load(arriving, mask=there, other=0, volatile=True)
    while (tl.max(((found >> 32 != turn) & there).to(tl.int32)) != 0) & (tl.load(own, volatile=True) == 0):
        found = tl.load(arriving, mask=there, other=0, volatile=True)
    if PACKED == 2:
        lower = tl.sum((found & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32), axis=0)
        upper = tl.sum((found >> 16 & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32), axis=0)
        total = tl.interleave(lower, upper)
    else:
        total = tl.sum(found.to(tl.int32).to(DTYPE, bitcast=True), axis=0)
    _added_normed(
        round_to(total, DTYPE)[None, :], before, kept, out + row * COLUMNS + column, scale, column < COLUMNS, eps, COLUMNS, DTYPE
    )
    tl.store(own + TURNS + row, turn)


@kernel
def sum_norm_of_two(
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
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    TURNS: tl.constexpr,
    FLAGS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `sum_norm`, of any number of rows, EACH in a block. A turn is a block. BLOCKS: where they begin in a part, in bytes; four
    places for each program."""
    release_successor(CHAINED)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    DTYPE: tl.constexpr = partial.dtype.element_ty
    PLACES: tl.constexpr = 4
    column, place = tl.arange(0, BLOCK)[None, :], tl.arange(0, EACH)[:, None]
    scale = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    own, within = part_words(addresses, RANK), program * PLACES * EACH * COLUMNS + place * COLUMNS + column
    flag = FLAGS + program * 2
    arriving = _rows(addresses, RANK, DTYPE, BLOCKS) + within
    leaving = _rows(addresses, 1 - RANK, DTYPE, BLOCKS) + within
    wait_for_predecessor(CHAINED)
    turn = tl.load(own + TURNS + program)
    count = tl.cdiv(tl.cdiv(num_rows, EACH) - program, programs).to(tl.int32)
    for block in range(bound(count + 1)):
        if block < count:  # this one leaves before the one before it is waited for
            row = (program + block * programs) * EACH + place
            inside = (column < COLUMNS) & (row < num_rows)
            values = tl.load(partial + row * partial_stride + column, mask=inside, other=0.0)
            tl.store(leaving + ((turn + block) & (PLACES - 1)) * EACH * COLUMNS, values, mask=inside)
            tl.debug_barrier()
            tl.atomic_xchg(part_words(addresses, 1 - RANK) + flag + RANK, turn + block + 1, sem="release", scope="sys")
        if block > 0:
            row = (program + (block - 1) * programs) * EACH + place
            inside = (column < COLUMNS) & (row < num_rows)
            values = tl.load(partial + row * partial_stride + column, mask=inside, other=0.0).to(tl.float32)
            kept = residual + row * residual_stride + column
            before = tl.load(kept, mask=inside, other=0.0)
            _await(own + flag + 1 - RANK, turn + block, own)
            tl.debug_barrier()
            arrived = arriving + ((turn + block - 1) & (PLACES - 1)) * EACH * COLUMNS
            values += tl.load(arrived, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
            normed = out + row * COLUMNS + column
            _added_normed(round_to(values, DTYPE), before, kept, normed, scale, inside, eps, COLUMNS, DTYPE)
    tl.store(own + TURNS + program, turn + count)


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

    EACH: rows of a program, at most. SHARE: columns that each rank adds up for all. REGION: elements that a program's rows have
    room for. TURNS, FLAGS: where they begin in a part, in words; ROWS, a share from each rank, and SUMS: in bytes. The sum is
    rounded before it is added, as it is where NCCL takes it.
    """
    release_successor(CHAINED)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    DTYPE: tl.constexpr = partial.dtype.element_ty
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    turns = part_words(addresses, RANK) + TURNS + program
    place, lane = tl.arange(0, EACH)[:, None], tl.arange(0, BLOCK_SHARE)[None, :]
    row, region = program + place * programs, program * REGION
    there = (lane < SHARE) & (row < num_rows)
    wait_for_predecessor(CHAINED)
    turn = tl.load(turns) + 1
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            shared = rank * SHARE + lane
            values = tl.load(partial + row * partial_stride + shared, mask=there & (shared < COLUMNS), other=0.0)
            sent = _rows(addresses, rank, DTYPE, ROWS) + region + (place * RANKS + RANK) * SHARE + lane
            tl.store(sent, values, mask=there)
    _meet(addresses, program, turn, FLAGS, RANK, RANKS)
    shared = RANK * SHARE + lane
    within = there & (shared < COLUMNS)
    total = tl.zeros((EACH, BLOCK_SHARE), tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += tl.load(partial + row * partial_stride + shared, mask=within, other=0.0).to(tl.float32)
        else:
            arrived = _rows(addresses, RANK, DTYPE, ROWS) + region + (place * RANKS + rank) * SHARE + lane
            total += tl.load(arrived, mask=within, other=0.0, cache_modifier=".cg").to(tl.float32)
    values = round_to(total, DTYPE)
    for rank in tl.static_range(RANKS):
        tl.store(_rows(addresses, rank, DTYPE, SUMS) + region + place * COLUMNS + shared, values, mask=within)
    inside = (column < COLUMNS) & (row < num_rows)
    kept = residual + row * residual_stride + column
    before = tl.load(kept, mask=inside, other=0.0)
    _meet(addresses, program, turn, FLAGS + MOST_PROGRAMS * RANKS, RANK, RANKS)
    arrived = _rows(addresses, RANK, DTYPE, SUMS) + region + place * COLUMNS + column
    values = tl.load(arrived, mask=inside, other=0.0, cache_modifier=".cg")
    _added_normed(values, before, kept, out + row * COLUMNS + column, scale, inside, eps, COLUMNS, DTYPE)
    tl.store(turns, turn)
