"""Which tokens of a row top-k and top-p keep, without a sort.

The tokens that top-k and top-p keep are those above a pivot, and some of those equal to it. Logits are compared by integer keys in
their order, so the pivot is found exactly, by a search that halves its range twice with each pass: eight passes at most for 16-bit
logits, 16 for float32. Of equal logits at the pivot, those with the lowest indices are kept. The first pass over such a row finds
the largest logit of each group of tokens. A pivot among these alone is no higher than that of all tokens, which have no less above
any key. So the groups whose largest is not below it have all kept tokens, and one program looks at them again: in most
distributions they are few.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel
from enginery_ops_triton.kernels.precision import bound

GROUP = tl.constexpr(128)  # tokens that are looked at together when tokens are dropped
NO_GROUP = tl.constexpr(1 << 23)  # whose tokens are beyond every vocabulary


@kernel
def load_logits(row_at: tl.tensor, index: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    """float32; beyond the vocabulary, and for a NaN, minus infinity."""
    found = tl.load(row_at + index, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(found != found, float("-inf"), found)


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
def amounts_above(keys: tl.tensor, amounts: tl.tensor, low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The amounts of what is above each of the `quarters`, and 0 of the rest."""
    first, second, third = quarters(low, high)
    return (
        tl.where(keys > first.to(tl.int32), amounts, 0.0),
        tl.where(keys > second.to(tl.int32), amounts, 0.0),
        tl.where(keys > third.to(tl.int32), amounts, 0.0),
    )


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
        first, second, third = amounts_above(keys, amounts, low, high)
        low, high = narrowed(low, high, limit, tl.sum(first), tl.sum(second), tl.sum(third))
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
        above_first = tl.zeros((COUNT, GROUP), dtype=tl.float32)
        above_second = tl.zeros((COUNT, GROUP), dtype=tl.float32)
        above_third = tl.zeros((COUNT, GROUP), dtype=tl.float32)
        for start in range(0, bound(num_groups), COUNT):
            index = listed_tokens(groups, start, num_groups, COUNT)
            values = load_logits(row_at, index, VOCAB)
            amount = tl.exp2((values - centre) * sharpness) if BY_MASS else tl.full((COUNT, GROUP), 1.0, tl.float32)
            amount = tl.where(index < VOCAB, amount, 0.0)
            first, second, third = amounts_above(order_key(values, SHIFT), amount, low, high)
            above_first += first
            above_second += second
            above_third += third
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
