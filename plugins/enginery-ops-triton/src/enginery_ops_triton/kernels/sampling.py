"""From logits to tokens without a sort.

The greedy choice, and draws from all tokens, take one pass: several programs of a row each find the best of a block of it, with its
noise in a draw (Gumbel-max, arXiv:1411.0030), and then one the best of these. A row whose draw is cut is one program's.

The tokens that top-k and top-p keep are those above a pivot, and some of those equal to it. Logits are compared by integer keys in
their order, so the pivot is found exactly, by a search that halves its range twice with each pass over the row: eight passes at
most for 16-bit logits, 16 for float32. Of equal logits at the pivot, those with the lowest indices are kept.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel, kernel_at_any, release_successor, wait_for_predecessor

STAGES = tl.constexpr(3)  # blocks of logits on their way


@kernel
def best_of_block(
    logits: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    row_stride: int,
    num_blocks: int,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """The largest logit of each block, and its index: [N, num_blocks] float32 and int32. A NaN counts as infinite."""
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * row_stride + index, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
    found = tl.where(found != found, float("inf"), found)
    best = tl.max(found, axis=0)
    at = row * num_blocks + tl.program_id(1)
    tl.store(values + at, best)
    tl.store(indices + at, tl.min(tl.where(found == best, index, 2147483647), axis=0))


@kernel
def best_of_blocks(
    values: tl.tensor, indices: tl.tensor, tokens: tl.tensor, num_blocks: int, BLOCK: tl.constexpr, CHAINED: tl.constexpr
) -> None:
    """The index of the largest of num_blocks <= BLOCK values, the lowest of equal ones: tokens [N] int64."""
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    found = tl.load(values + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    index = tl.load(indices + row * num_blocks + block, mask=block < num_blocks, other=2147483647)
    tl.store(tokens + row, tl.min(tl.where(found == tl.max(found, axis=0), index, 2147483647), axis=0).to(tl.int64))


@kernel
def load_logits(row_at: tl.tensor, index: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    """float32; beyond the vocabulary, and for a NaN, minus infinity."""
    found = tl.load(row_at + index, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(found != found, float("-inf"), found)


@kernel
def mixed(x: tl.tensor) -> tl.tensor:
    """Another uint32 for each: hash-prospector's [16 21f0aaad 15 d35a2d97 15]."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@kernel
def exponential(number: tl.tensor, index: tl.tensor) -> tl.tensor:
    """`enginery.nn.reference_ops.exponentials`: -log(1 - r), by a series where r is small, as 1 - r would round it."""
    key = mixed(number.to(tl.uint32, bitcast=True))
    hashed = mixed(key ^ (index.to(tl.uint32) * 0x9E3779B9))
    share = (hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    series = share * (share * (share * 0.33333333 + 0.5) + 1.0)
    return tl.where(share < 0.015625, series, -tl.log(tl.maximum(1.0 - share, 5.9604645e-08)))


@kernel
def order_key(values: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """int32 in the order of float32 values, without the SHIFT bits that their first type did not have."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@kernel
def find_pivot(
    row_at: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    limit: tl.tensor,
    centre: tl.tensor,
    sharpness: tl.tensor,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The least key in [low, high] above which there are less than `limit` tokens, or which weigh less: int64. `high` is one."""
    while low < high:
        span = high - low
        first = low + span // 4
        second = low + span // 2
        third = low + span * 3 // 4
        above_first = tl.zeros((BLOCK,), dtype=tl.float32)
        above_second = tl.zeros((BLOCK,), dtype=tl.float32)
        above_third = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=STAGES):
            index = start + tl.arange(0, BLOCK)
            values = load_logits(row_at, index, VOCAB)
            key = order_key(values, SHIFT)
            amount = tl.exp((values - centre) * sharpness) if BY_MASS else tl.full((BLOCK,), 1.0, tl.float32)
            amount = tl.where(index < VOCAB, amount, 0.0)
            above_first += tl.where(key > first.to(tl.int32), amount, 0.0)
            above_second += tl.where(key > second.to(tl.int32), amount, 0.0)
            above_third += tl.where(key > third.to(tl.int32), amount, 0.0)
        if tl.sum(above_first, axis=0) < limit:
            high = first
        elif tl.sum(above_second, axis=0) < limit:
            low = first + 1
            high = second
        elif tl.sum(above_third, axis=0) < limit:
            low = second + 1
            high = third
        else:
            low = third + 1
    return low


@kernel
def drops_tokens(
    row: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    least_temperature: tl.tensor,
    VOCAB: tl.constexpr,
) -> tl.tensor:
    """Whether a row's token is drawn from a part of the vocabulary."""
    wanted = tl.load(top_k + row)
    cut = ((wanted > 0) & (wanted < VOCAB)) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)
    return cut & (tl.load(temperature + row) >= least_temperature)


@kernel_at_any("temperature", "top_k", "top_p", "min_p", "uniform", "values", "indices")
def best_noisy_of_block(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    row_stride: int,
    num_blocks: int,
    least_temperature: float,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `best_of_block`, of logits over the temperature with noise. Rows that drop tokens are not looked at, and have zeros."""
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = row * num_blocks + tl.program_id(1)
    if drops_tokens(row, temperature, top_k, top_p, min_p, least_temperature, VOCAB):
        tl.store(values + at, 0.0)
        tl.store(indices + at, 0)
        return
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * row_stride + index, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
    found = tl.where(found != found, float("inf"), found)
    best = tl.max(found, axis=0)
    heat = tl.load(temperature + row)
    if heat >= least_temperature:
        centre = tl.where(best == float("-inf"), 0.0, best)
        weights = tl.exp((found - centre) * (1.0 / heat))
        found = tl.where(found < float("inf"), weights / exponential(tl.load(uniform + row), index), float("inf"))
        best = tl.max(found, axis=0)
        noisy = centre / heat + tl.log(tl.where(best > 0.0, best, 1.0))
        tl.store(values + at, tl.where(best > 0.0, noisy, float("-inf")))
    else:
        tl.store(values + at, best)
    tl.store(indices + at, tl.min(tl.where(found == best, index, 2147483647), axis=0))


@kernel_at_any("temperature", "top_k", "top_p", "min_p", "uniform")
def draw_cut_rows(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    tokens: tl.tensor,
    row_stride: int,
    least_temperature: float,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """The token of each row that drops some: the best of the kept with noise. tokens: [N] int64."""
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    if not drops_tokens(row, temperature, top_k, top_p, min_p, least_temperature, VOCAB):
        return
    row_at = logits + row * row_stride
    sharpness = 1.0 / tl.load(temperature + row)
    wanted = tl.load(top_k + row).to(tl.int32)
    share = tl.load(top_p + row)
    least = tl.load(min_p + row)
    number = tl.load(uniform + row)
    best_parts = tl.full((BLOCK,), float("-inf"), tl.float32)
    worst_parts = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=STAGES):
        index = start + tl.arange(0, BLOCK)
        values = load_logits(row_at, index, VOCAB)
        best_parts = tl.maximum(best_parts, values)
        worst_parts = tl.minimum(worst_parts, tl.where(index < VOCAB, values, float("inf")))
    best = tl.max(best_parts, axis=0)
    centre = tl.where(best == float("-inf"), 0.0, best)
    highest = order_key(best, SHIFT).to(tl.int64)
    pivot = order_key(tl.min(worst_parts, axis=0), SHIFT).to(tl.int64) - 1
    num_equal = tl.full((), 0, tl.int32)
    each = tl.full((), 0.0, tl.float32)
    cut = (wanted > 0) & (wanted < VOCAB)
    if wanted == 1:
        pivot = highest
        num_equal = num_equal + 1
        each = each + 1.0
    elif cut:
        pivot = find_pivot(row_at, pivot, highest, wanted.to(tl.float32), centre, sharpness, False, VOCAB, SHIFT, BLOCK)
    if (cut & (wanted > 1)) | (share < 1.0):
        floor = pivot
        allowed = tl.full((), 0.0, tl.float32)
        for stage in tl.static_range(2):
            if (stage == 0) | (share < 1.0):
                mass_parts = tl.zeros((BLOCK,), dtype=tl.float32)
                each_parts = tl.zeros((BLOCK,), dtype=tl.float32)
                above_parts = tl.zeros((BLOCK,), dtype=tl.int32)
                equal_parts = tl.zeros((BLOCK,), dtype=tl.int32)
                for start in tl.range(0, VOCAB, BLOCK, num_stages=STAGES):
                    index = start + tl.arange(0, BLOCK)
                    values = load_logits(row_at, index, VOCAB)
                    key = order_key(values, SHIFT).to(tl.int64)
                    weights = tl.exp((values - centre) * sharpness)
                    above = (key > pivot) & (index < VOCAB)
                    equal = (key == pivot) & (index < VOCAB)
                    mass_parts += tl.where(above, weights, 0.0)
                    each_parts = tl.maximum(each_parts, tl.where(equal, weights, 0.0))
                    above_parts += above.to(tl.int32)
                    equal_parts += equal.to(tl.int32)
                mass_above = tl.sum(mass_parts, axis=0)
                each = tl.max(each_parts, axis=0)
                if stage == 0:
                    num_equal = tl.where(cut, tl.maximum(wanted - tl.sum(above_parts, axis=0), 0), 0)
                    allowed = share * (mass_above + num_equal.to(tl.float32) * each)
                    if share < 1.0:
                        pivot = find_pivot(row_at, pivot, highest, allowed, centre, sharpness, True, VOCAB, SHIFT, BLOCK)
                else:
                    room = tl.ceil(tl.minimum((allowed - mass_above) / tl.where(each > 0.0, each, 1.0), 1e9)).to(tl.int32)
                    fit = tl.where(each > 0.0, tl.maximum(room, 1), tl.sum(equal_parts, axis=0))
                    num_equal = tl.where(pivot == floor, tl.minimum(num_equal, fit), fit)
                    num_equal = tl.minimum(num_equal, tl.sum(equal_parts, axis=0))
    PART: tl.constexpr = BLOCK // 2  # for which there are registers
    last_kept = pivot.to(tl.int32)
    most = tl.zeros((PART,), dtype=tl.float32)
    token = tl.arange(0, PART)
    equal_before = tl.full((), 0, tl.int32)
    for start in tl.range(0, VOCAB, PART, num_stages=STAGES):
        index = start + tl.arange(0, PART)
        found = tl.load(row_at + index, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
        values = tl.where(found != found, float("-inf"), found)
        key = order_key(values, SHIFT)
        equal = ((key == last_kept) & (index < VOCAB)).to(tl.int32)
        equal_here = tl.sum(equal, axis=0)
        room = num_equal - equal_before
        if equal_here > room:
            equal = (tl.cumsum(equal, axis=0) <= room).to(tl.int32) & equal
        equal_before += equal_here
        weights = tl.exp((values - centre) * sharpness)
        kept = ((key > last_kept) | (equal == 1)) & (weights >= least)
        noisy = tl.where(kept, weights / exponential(number, index), 0.0)
        noisy = tl.where(found < float("inf"), noisy, float("inf"))
        token = tl.where(noisy > most, index, token)
        most = tl.maximum(most, noisy)
    best = tl.max(most, axis=0)
    tl.store(tokens + row, tl.min(tl.where(most == best, token, 2147483647), axis=0).to(tl.int64))
