"""From logits to tokens without a sort.

The greedy choice, and draws from all tokens, take one pass: several programs of a row each find the best of a block of it, with its
noise in a draw (Gumbel-max, arXiv:1411.0030), and then one the best of these.

Of a row that drops tokens the first pass finds the largest logit of each group of tokens, and one program looks again at those
groups alone that can have kept ones: see kernels/pivots.py.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel, kernel_at_any, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.pivots import GROUP, find_bound, find_pivot, listed_tokens, order_key, weigh
from enginery_ops_triton.kernels.precision import INTERPRETED, bound

LOG2_E = tl.constexpr(1.4426950408889634)
SHARE_UNIT = tl.constexpr(2.0**-32 - 2.0**-55)  # so that no share of a uint32 is rounded to one
HALF_UNIT = tl.constexpr(2.0**-33)


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
