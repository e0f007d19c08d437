"""From logits to tokens without a sort.

The greedy choice, and draws from all tokens, take one pass: several programs of a row each find the best of a block of it, with its
noise in a draw (Gumbel-max, arXiv:1411.0030), and then one the best of these.

The tokens that top-k and top-p keep are those above a pivot, and some of those equal to it. Logits are compared by integer keys in
their order, so the pivot is found exactly, by a search that halves its range twice with each pass: eight passes at most for 16-bit
logits, 16 for float32. Of equal logits at the pivot, those with the lowest indices are kept. The first pass over such a row finds
the largest logit of each group of tokens. A pivot among these alone is no higher than that of all tokens, which have no less above
any key. So the groups whose largest is not below it have all kept tokens, and one program looks at them again: in most
distributions they are few.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel, kernel_at_any, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import INTERPRETED, bound

LOG2_E = tl.constexpr(1.4426950408889634)
SHARE_UNIT = tl.constexpr(2.0**-32 - 2.0**-55)  # so that no share of a uint32 is rounded to one
HALF_UNIT = tl.constexpr(2.0**-33)
GROUP = tl.constexpr(128)  # tokens that are looked at together when tokens are dropped
NO_GROUP = tl.constexpr(1 << 23)  # whose tokens are beyond every vocabulary


@kernel_at_any("values", "indices")
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


@kernel_at_any("values", "indices")
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
def finite_or_zero(x: tl.tensor) -> tl.tensor:
    """A number to subtract from others of which it is the largest."""
    return tl.where((x > float("-inf")) & (x < float("inf")), x, 0.0)


@kernel
def mixed(x: tl.tensor) -> tl.tensor:
    """Another uint32 for each: hash-prospector's [16 21f0aaad 15 d35a2d97 15]."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@kernel
def log2_of(x: tl.tensor) -> tl.tensor:
    """Of normal numbers above zero, off by 2^-22 at most: one instruction."""
    if INTERPRETED:
        return tl.log2(x)
    else:  # noqa: RET505 - the compiler takes only one of them
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@kernel
def noisy(logits: tl.tensor, number: tl.tensor, index: tl.tensor, sharpness: tl.tensor) -> tl.tensor:
    """log2(e) (logit / temperature - log(E)) and the same constant for all. sharpness: log2(e) / temperature.

    E: as `enginery.nn.reference_ops.exponentials` has it, -log(1 - r), by a series where r is small, as 1 - r would round it.
    """
    key = mixed(number.to(tl.uint32, bitcast=True))
    hashed = mixed(key ^ (index.to(tl.uint32) * 0x9E3779B9))
    share = hashed.to(tl.float32) * SHARE_UNIT + HALF_UNIT
    series = share * (share * (share * 0.48089835 + 0.72134752) + 1.44269504)
    noise = tl.where(share < 0.015625, series, -log2_of(1.0 - share))
    return logits * sharpness - log2_of(noise)


@kernel
def order_key(values: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """int32 in the order of float32 values, without the SHIFT bits that their first type did not have."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@kernel
def quarters(low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The keys that part [low, high], int64, into four."""
    span = high - low
    return low + span // 4, low + span // 2, low + span * 3 // 4


@kernel
def narrowed(
    low: tl.tensor, high: tl.tensor, limit: tl.tensor, above_first: tl.tensor, above_second: tl.tensor, above_third: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The quarter of [low, high] with the least key above which there is less than `limit`."""
    first, second, third = quarters(low, high)
    if above_first < limit:
        high = first
    elif above_second < limit:
        low = first + 1
        high = second
    elif above_third < limit:
        low = second + 1
        high = third
    else:
        low = third + 1
    return low, high


@kernel
def find_bound(keys: tl.tensor, amounts: tl.tensor, low: tl.tensor, high: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """The least key in [low, high] above which the amounts are less than `limit`: int64. `high` is one."""
    while low < high:
        first, second, third = quarters(low, high)
        above_first = tl.sum(tl.where(keys > first.to(tl.int32), amounts, 0.0), axis=0)
        above_second = tl.sum(tl.where(keys > second.to(tl.int32), amounts, 0.0), axis=0)
        above_third = tl.sum(tl.where(keys > third.to(tl.int32), amounts, 0.0), axis=0)
        low, high = narrowed(low, high, limit, above_first, above_second, above_third)
    return low


@kernel
def listed_tokens(groups: tl.tensor, start: tl.tensor, num_groups: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """The indices of the tokens of listed groups from `start` on, in their order: [COUNT, GROUP]. Behind the last: too large."""
    at = start + tl.arange(0, COUNT)
    group = tl.load(groups + at, mask=at < num_groups, other=NO_GROUP)
    return group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@kernel
def find_pivot(
    row_at: tl.tensor,
    groups: tl.tensor,
    num_groups: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    limit: tl.tensor,
    centre: tl.tensor,
    sharpness: tl.tensor,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """The least key in [low, high] above which there are less than `limit` listed tokens, or which weigh less: int64."""
    while low < high:
        first, second, third = quarters(low, high)
        above_first = tl.zeros((COUNT, GROUP), dtype=tl.float32)
        above_second = tl.zeros((COUNT, GROUP), dtype=tl.float32)
        above_third = tl.zeros((COUNT, GROUP), dtype=tl.float32)
        for start in range(0, bound(num_groups), COUNT):
            index = listed_tokens(groups, start, num_groups, COUNT)
            values = load_logits(row_at, index, VOCAB)
            key = order_key(values, SHIFT)
            amount = tl.exp2((values - centre) * sharpness) if BY_MASS else tl.full((COUNT, GROUP), 1.0, tl.float32)
            amount = tl.where(index < VOCAB, amount, 0.0)
            above_first += tl.where(key > first.to(tl.int32), amount, 0.0)
            above_second += tl.where(key > second.to(tl.int32), amount, 0.0)
            above_third += tl.where(key > third.to(tl.int32), amount, 0.0)
        low, high = narrowed(low, high, limit, tl.sum(above_first), tl.sum(above_second), tl.sum(above_third))
    return low


@kernel
def weigh(
    row_at: tl.tensor,
    groups: tl.tensor,
    num_groups: tl.tensor,
    pivot: tl.tensor,
    centre: tl.tensor,
    sharpness: tl.tensor,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
    COUNT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What the listed tokens above a pivot weigh, what each of those equal to it does, and how many there are of both."""
    mass_parts = tl.zeros((COUNT, GROUP), dtype=tl.float32)
    each_parts = tl.zeros((COUNT, GROUP), dtype=tl.float32)
    above_parts = tl.zeros((COUNT, GROUP), dtype=tl.int32)
    equal_parts = tl.zeros((COUNT, GROUP), dtype=tl.int32)
    for start in range(0, bound(num_groups), COUNT):
        index = listed_tokens(groups, start, num_groups, COUNT)
        values = load_logits(row_at, index, VOCAB)
        key = order_key(values, SHIFT)
        weights = tl.exp2((values - centre) * sharpness)
        above = (key > pivot.to(tl.int32)) & (index < VOCAB)
        equal = (key == pivot.to(tl.int32)) & (index < VOCAB)
        mass_parts += tl.where(above, weights, 0.0)
        each_parts = tl.maximum(each_parts, tl.where(equal, weights, 0.0))
        above_parts += above.to(tl.int32)
        equal_parts += equal.to(tl.int32)
    return tl.sum(mass_parts), tl.max(each_parts), tl.sum(above_parts), tl.sum(equal_parts)


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


@kernel_at_any("temperature", "top_k", "top_p", "min_p", "uniform", "values", "indices", "masses")
def look_at_block(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    masses: tl.tensor,
    largest: tl.tensor,
    row_stride: int,
    num_blocks: int,
    least_temperature: float,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `best_of_block`, of logits over the temperature with noise. Of rows that drop tokens what `draw_cut_rows` reads.

    values, indices, masses: [N, num_blocks]; largest: [N, num_blocks * BLOCK // GROUP]. A block's mass is a multiple of the weight
    of its best token, whose logit is the value.
    """
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = row * num_blocks + tl.program_id(1)
    heat = tl.load(temperature + row)
    if drops_tokens(row, temperature, top_k, top_p, min_p, least_temperature, VOCAB):
        GROUPS: tl.constexpr = BLOCK // GROUP
        group = tl.arange(0, GROUPS)
        token = tl.program_id(1) * BLOCK + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        in_groups = tl.load(logits + row * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        in_groups = tl.where(in_groups != in_groups, float("inf"), in_groups)
        best_of_group = tl.max(in_groups, axis=1)
        value = tl.max(best_of_group, axis=0)
        weights = tl.exp2((in_groups - finite_or_zero(value)) * (LOG2_E / heat))
        tl.store(largest + at * GROUPS + group, best_of_group)
        tl.store(values + at, value)
        tl.store(masses + at, tl.sum(tl.sum(weights, axis=1), axis=0))
        tl.store(indices + at, 0)
        return
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * row_stride + index, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
    found = tl.where(found != found, float("inf"), found)
    if heat >= least_temperature:
        found = noisy(found, tl.load(uniform + row), index, LOG2_E / heat)
    best = tl.max(found, axis=0)
    tl.store(values + at, best)
    tl.store(indices + at, tl.min(tl.where(found == best, index, 2147483647), axis=0))


@kernel_at_any("temperature", "top_k", "top_p", "min_p", "uniform", "values", "masses")
def draw_cut_rows(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    values: tl.tensor,
    masses: tl.tensor,
    largest: tl.tensor,
    listed: tl.tensor,
    tokens: tl.tensor,
    row_stride: int,
    num_blocks: int,
    num_groups: int,
    least_temperature: float,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    COUNT: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """The token of each row that drops some: the best of the kept with noise.

    values, masses: [N, num_blocks], and largest: [N, num_groups], are of `look_at_block`; listed: [N, num_groups] int32, room;
    tokens: [N] int64. num_blocks <= BLOCKS and num_groups <= GROUPS.
    """
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    if not drops_tokens(row, temperature, top_k, top_p, min_p, least_temperature, VOCAB):
        return
    row_at = logits + row * row_stride
    sharpness = LOG2_E / tl.load(temperature + row)
    wanted = tl.load(top_k + row).to(tl.int32)
    share = tl.load(top_p + row)
    least = tl.load(min_p + row)
    group = tl.arange(0, GROUPS)
    exists = group < num_groups
    tops = tl.load(largest + row * num_groups + group, mask=exists, other=float("-inf"))
    best = tl.max(tops, axis=0)
    centre = finite_or_zero(best)
    top_weights = tl.where(exists, tl.exp2((tops - centre) * sharpness), 0.0)
    top_keys = order_key(tops, SHIFT)
    block = tl.arange(0, BLOCKS)
    tops_of_blocks = tl.load(values + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    masses_of_blocks = tl.load(masses + row * num_blocks + block, mask=block < num_blocks, other=0.0)
    total = tl.sum(masses_of_blocks * tl.exp2((tops_of_blocks - centre) * sharpness), axis=0)

    cut = (wanted > 0) & (wanted < VOCAB)
    highest = order_key(best, SHIFT).to(tl.int64)
    lowest = order_key(tl.full((), float("-inf"), tl.float32), SHIFT).to(tl.int64)
    bottom = lowest
    if best == float("inf"):  # one of these tokens is taken, whatever is kept
        bottom = highest
    elif cut:
        bottom = find_bound(top_keys, exists.to(tl.float32), lowest, highest, wanted.to(tl.float32))
    elif share < 1.0:
        bottom = find_bound(top_keys, top_weights, lowest, highest, share * total)
    looked_at = exists & (top_keys >= bottom.to(tl.int32)) & ((share < 1.0) | (top_weights >= least))
    groups = listed + row * num_groups
    tl.store(groups + tl.cumsum(looked_at.to(tl.int32), axis=0) - 1, group, mask=looked_at)
    num_listed = tl.sum(looked_at.to(tl.int32), axis=0)
    tl.debug_barrier()  # each thread reads groups that others have listed

    pivot = lowest - 1
    num_equal = tl.full((), 0, tl.int32)
    if cut & (best < float("inf")):
        limit = wanted.to(tl.float32)
        pivot = find_pivot(row_at, groups, num_listed, bottom, highest, limit, centre, sharpness, False, VOCAB, SHIFT, COUNT)
        mass, each, num_above, most_equal = weigh(row_at, groups, num_listed, pivot, centre, sharpness, VOCAB, SHIFT, COUNT)
        num_equal = tl.minimum(tl.maximum(wanted - num_above, 0), most_equal)
        total = mass + num_equal.to(tl.float32) * each
    if (share < 1.0) & (best < float("inf")):
        floor = pivot
        allowed = share * total
        low = tl.maximum(floor, bottom)
        pivot = find_pivot(row_at, groups, num_listed, low, highest, allowed, centre, sharpness, True, VOCAB, SHIFT, COUNT)
        mass, each, num_above, most_equal = weigh(row_at, groups, num_listed, pivot, centre, sharpness, VOCAB, SHIFT, COUNT)
        room = tl.ceil(tl.minimum((allowed - mass) / tl.where(each > 0.0, each, 1.0), 1e9)).to(tl.int32)
        fit = tl.where(each > 0.0, tl.minimum(tl.maximum(room, 1), most_equal), most_equal)
        num_equal = tl.where(pivot == floor, tl.minimum(num_equal, fit), fit)

    last_kept = pivot.to(tl.int32)
    number = tl.load(uniform + row)
    most = tl.full((COUNT, GROUP), float("-inf"), tl.float32)
    token = tl.full((COUNT, GROUP), 0, tl.int32)
    equal_before = tl.full((), 0, tl.int32)
    for start in range(0, bound(num_listed), COUNT):
        index = listed_tokens(groups, start, num_listed, COUNT)
        found = tl.load(row_at + index, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
        logit = tl.where(found != found, float("-inf"), found)
        key = order_key(logit, SHIFT)
        equal = ((key == last_kept) & (index < VOCAB)).to(tl.int32)
        equal_here = tl.sum(equal)
        left = num_equal - equal_before
        if equal_here > left:
            before = tl.cumsum(tl.reshape(equal, (COUNT * GROUP,)), axis=0)
            equal = (tl.reshape(before, (COUNT, GROUP)) <= left).to(tl.int32) & equal
        equal_before += equal_here
        kept = ((key > last_kept) | (equal == 1)) & (tl.exp2((logit - centre) * sharpness) >= least)
        value = tl.where(kept, noisy(logit, number, index, sharpness), float("-inf"))
        value = tl.where(found < float("inf"), value, float("inf"))
        token = tl.where(value > most, index, token)
        most = tl.maximum(most, value)
    best = tl.max(most)
    tl.store(tokens + row, tl.min(tl.where(most == best, token, 2147483647)).to(tl.int64))
