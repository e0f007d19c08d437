"""Sums over ranks within the norm behind them: each rank's kernel reads and writes the memory of the others.

    two ranks   own block -> the other's part | wait for its block AHEAD before | add up, add to the residual, norm
    more        shares of own block -> the ranks that add them up | wait for all | own share of the block AHEAD before added up
                -> all parts | flags | of the block AHEAD before that one: add to the residual, norm
    few rows    own rows, each word with its turn -> all parts | wait for the words of all | add up, add to the residual, norm

A program has the same rows on every rank, in blocks, and meets the programs of its number there alone. It counts its turns. No two
programs of a rank wait for each other, and the lowest that has not ended runs on every rank, so it does not matter how many run
at once. What was written is read before it is overwritten:

- Two ranks: blocks lie at 2 AHEAD + 2 places in turn. Whoever sends block n has had the other's block n - 1 - AHEAD, which the
  other sent when it had read those up to n - 2 - 2 AHEAD. The first blocks of a kernel follow the last of the one before it, of
  that program, so each program has its own places, whatever sizes of rows lie there.
- More ranks: one flag of a rank says in turn b that its shares of block b have left and its sums of block b - AHEAD, and that it
  has read what it needed until then. Whoever sends shares of block n has had all flags of turn n - 1 - AHEAD, so all have read
  shares up to block n - 1 - 2 AHEAD: 2 AHEAD + 1 places. Whoever sends sums of block n, in turn n + AHEAD, has had all flags of
  turn n, so that all have ended turn n - 1, and read sums up to block n - 1 - 2 AHEAD: as many places. A kernel ends when it has
  had all flags of the last turn that has them, so nobody reads shares of it any more; before the first sums of the next one
  leave, all ranks have begun that one. So places may lie elsewhere in every kernel.
- Few rows: words lie at two places in turn. Whoever writes to one again has had the words of the turn between, or flags of one,
  whose kernel began where the one before it had ended.

Of two ranks all rows cross NVLink once each way, as they would by shares, and nobody waits twice. Of R, 2 (R - 1) / R of them do.

Words of 64 bits arrive whole, so that one with the number of the turn in its upper half needs no flag behind it and no fence: it
takes twice the bytes and one way over NVLink where a flag takes more (NCCL's protocol LL does the same).
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel, kernel_of_any, release_successor, wait_for_predecessor
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
def _await(flag: tl.tensor, turn: tl.tensor, over: tl.tensor) -> None:
    """Wait until the flag has come to a turn, or nobody is to be waited for any more."""
    while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") - turn < 0) & (tl.load(over, volatile=True) == 0):
        pass


@kernel
def _raise_all(flags: tl.tensor, turn: tl.tensor, others: tl.tensor) -> None:
    """Tell the others, [ranks], of a turn: what this program wrote before is seen behind it, and what it read was read."""
    tl.debug_barrier()
    tl.atomic_xchg(flags, turn, mask=others, sem="release", scope="sys")


@kernel
def _await_all(flags: tl.tensor, turn: tl.tensor, others: tl.tensor, over: tl.tensor) -> None:
    """Wait until the flags of all others, [ranks], have come to a turn, or nobody is to be waited for any more."""
    while (_most_behind(flags, turn, others) > 0) & (tl.load(over, volatile=True) == 0):
        pass
    tl.debug_barrier()


@kernel
def _most_behind(flags: tl.tensor, turn: tl.tensor, others: tl.tensor) -> tl.tensor:
    """By how many turns the last of the others is."""
    return tl.max(tl.where(others, turn - tl.atomic_add(flags, 0, mask=others, sem="acquire", scope="sys"), 0))


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
    AHEAD: tl.constexpr,
    PLACES: tl.constexpr,
    PLACE: tl.constexpr,
    TURNS: tl.constexpr,
    FLAGS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `sum_norm`. A turn is a block. BLOCKS: where they begin in a part, in bytes: PLACES of each program, of PLACE elements."""
    release_successor(CHAINED)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    DTYPE: tl.constexpr = partial.dtype.element_ty
    column, place = tl.arange(0, BLOCK)[None, :], tl.arange(0, EACH)[:, None]
    scale = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    own, within = part_words(addresses, RANK), program * PLACES * PLACE + place * COLUMNS + column
    flag = FLAGS + program * 2
    arriving = _rows(addresses, RANK, DTYPE, BLOCKS) + within
    leaving = _rows(addresses, 1 - RANK, DTYPE, BLOCKS) + within
    wait_for_predecessor(CHAINED)
    turn = tl.load(own + TURNS + program)
    count = tl.cdiv(tl.cdiv(num_rows, EACH) - program, programs).to(tl.int32)
    for block in range(bound(count + AHEAD)):
        if block < count:  # this one leaves before one that is waited for
            row = (program + block * programs) * EACH + place
            inside = (column < COLUMNS) & (row < num_rows)
            values = tl.load(partial + row * partial_stride + column, mask=inside, other=0.0)
            tl.store(leaving + ((turn + block) & (PLACES - 1)) * PLACE, values, mask=inside)
            tl.debug_barrier()
            tl.atomic_xchg(part_words(addresses, 1 - RANK) + flag + RANK, turn + block + 1, sem="release", scope="sys")
        awaited = block - AHEAD
        if awaited >= 0:
            row = (program + awaited * programs) * EACH + place
            inside = (column < COLUMNS) & (row < num_rows)
            values = tl.load(partial + row * partial_stride + column, mask=inside, other=0.0).to(tl.float32)
            kept = residual + row * residual_stride + column
            before = tl.load(kept, mask=inside, other=0.0)
            _await(own + flag + 1 - RANK, turn + awaited + 1, own)
            tl.debug_barrier()
            arrived = arriving + ((turn + awaited) & (PLACES - 1)) * PLACE
            values += tl.load(arrived, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
            normed = out + row * COLUMNS + column
            _added_normed(round_to(values, DTYPE), before, kept, normed, scale, inside, eps, COLUMNS, DTYPE)
    tl.store(own + TURNS + program, turn + count)


@kernel_of_any("turn")
def sum_norm_of_sent(
    partial: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    arriving: tl.tensor,
    own: tl.tensor,
    num_rows: int,
    piece_rows: int,
    partial_stride: int,
    residual_stride: int,
    eps: float,
    turn: int,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    FLAG: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `sum_norm_of_two`, of rows that copy engines bring: arriving [N, COLUMNS]. A program has EACH rows.

    own: this rank's part, of int32. FLAG: a word of it, the turn of the last piece that has arrived; the first piece's is `turn`.
    """
    release_successor(CHAINED)
    first = tl.program_id(0) * EACH
    DTYPE: tl.constexpr = partial.dtype.element_ty
    column, row = tl.arange(0, BLOCK)[None, :], first.to(tl.int64) + tl.arange(0, EACH)[:, None]
    inside = (column < COLUMNS) & (row < num_rows)
    scale = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    wait_for_predecessor(CHAINED)
    values = tl.load(partial + row * partial_stride + column, mask=inside, other=0.0).to(tl.float32)
    kept = residual + row * residual_stride + column
    before = tl.load(kept, mask=inside, other=0.0)
    last = tl.minimum(first + EACH, num_rows) - 1
    _await(own + FLAG, turn + last // piece_rows, own)
    tl.debug_barrier()
    values += tl.load(arriving + row * COLUMNS + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    _added_normed(round_to(values, DTYPE), before, kept, out + row * COLUMNS + column, scale, inside, eps, COLUMNS, DTYPE)


@kernel_of_any("turn")
def await_sent(own: tl.tensor, turn: int, FLAG: tl.constexpr, CHAINED: tl.constexpr) -> None:
    """Wait for a piece. One program."""
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    _await(own + FLAG, turn, own)


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
    BLOCK_RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_SHARE: tl.constexpr,
    AHEAD: tl.constexpr,
    PLACES: tl.constexpr,
    TURNS: tl.constexpr,
    FLAGS: tl.constexpr,
    SHARES: tl.constexpr,
    SUMS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """partial, residual: [N, COLUMNS] with their row strides; out: [N, COLUMNS] contiguous; addresses: [RANKS] int64, of parts.

    EACH: rows of a block. SHARE: columns that each rank adds up for all. AHEAD: blocks whose shares leave before those of the
    first are waited for, and as many whose sums do. TURNS, FLAGS: where they begin in a part, in words; SHARES and SUMS: in bytes,
    of each program PLACES, of a block: one [EACH, RANKS - 1, SHARE], without own, the other [EACH, COLUMNS]. The sum is rounded
    before it is added, as it is where NCCL takes it.
    """
    release_successor(CHAINED)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    DTYPE: tl.constexpr = partial.dtype.element_ty
    column, place = tl.arange(0, BLOCK)[None, :], tl.arange(0, EACH)[:, None]
    scale = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    own, rank = part_words(addresses, RANK), tl.arange(0, BLOCK_RANKS)
    others = (rank < RANKS) & (rank != RANK)
    theirs = tl.load(addresses + rank, mask=others, other=0).to(tl.pointer_type(tl.int32)) + FLAGS + program * RANKS + RANK
    flags = own + FLAGS + program * RANKS + rank
    SHARES_PLACE: tl.constexpr = EACH * (RANKS - 1) * SHARE
    first, lane = program * PLACES * SHARES_PLACE, tl.arange(0, BLOCK_SHARE)[None, :]
    adds, each, share = rank[:, None, None], place[None, :, :], lane[None, :, :]  # shares by the rank that adds them up
    parts = (tl.load(addresses + adds, mask=adds < RANKS, other=0) + SHARES).to(tl.pointer_type(DTYPE))
    sender = RANK - (adds < RANK).to(tl.int32)  # its number among those that are not the rank that adds up
    leaving = tl.multiple_of(parts, [16, 16, 16]) + first + (each * (RANKS - 1) + sender) * SHARE + share
    to_send = (adds < RANKS) & (adds != RANK) & (share < SHARE) & (adds * SHARE + share < COLUMNS)
    arriving = _rows(addresses, RANK, DTYPE, SHARES) + first + place * (RANKS - 1) * SHARE + lane
    shared = RANK * SHARE + lane
    to_add = (lane < SHARE) & (shared < COLUMNS)
    sums = ()  # of this program, in the parts of all, own first
    for other in tl.static_range(RANKS):
        there = _rows(addresses, (other + RANK) % RANKS, DTYPE, SUMS) + program * PLACES * EACH * COLUMNS
        sums += (there,)  # type: ignore[assignment]
    wait_for_predecessor(CHAINED)
    turn = tl.load(own + TURNS + program)
    count = tl.cdiv(tl.cdiv(num_rows, EACH) - program, programs).to(tl.int32)
    for block in range(bound(count + 2 * AHEAD)):
        row = (program + block * programs) * EACH + each
        leaves = to_send & (row < num_rows)
        shares = tl.load(partial + row * partial_stride + (adds * SHARE + share), mask=leaves, other=0.0)
        tl.store(leaving + ((turn + block) & (PLACES - 1)) * SHARES_PLACE, shares, mask=leaves)
        added, normed = block - AHEAD, block - 2 * AHEAD
        row = (program + added * programs) * EACH + place
        within = to_add & (row >= 0) & (row < num_rows)
        total = tl.load(partial + row * partial_stride + shared, mask=within, other=0.0).to(tl.float32)
        row = (program + normed * programs) * EACH + place
        inside = (column < COLUMNS) & (row >= 0) & (row < num_rows)
        kept = residual + row * residual_stride + column
        before = tl.load(kept, mask=inside, other=0.0)
        if added >= 0:
            _await_all(flags, turn + added + 1, others, own)
        if added < count:
            if added >= 0:
                at = (turn + added) & (PLACES - 1)
                for other in tl.static_range(RANKS):
                    if other != RANK:
                        arrived = arriving + at * SHARES_PLACE + (other - (other > RANK)) * SHARE
                        total += tl.load(arrived, mask=within, other=0.0, cache_modifier=".cg").to(tl.float32)
                for other in tl.static_range(RANKS):
                    summed = sums[other] + at * EACH * COLUMNS + place * COLUMNS + shared
                    tl.store(summed, round_to(total, DTYPE), mask=within)
            _raise_all(theirs, turn + block + 1, others)
        if normed >= 0:
            at = (turn + normed) & (PLACES - 1)
            arrived = sums[0] + at * EACH * COLUMNS + place * COLUMNS + column  # type: ignore[misc]
            values = tl.load(arrived, mask=inside, other=0.0, cache_modifier=".cg")
            _added_normed(values, before, kept, out + row * COLUMNS + column, scale, inside, eps, COLUMNS, DTYPE)
    tl.store(own + TURNS + program, turn + count + AHEAD)
