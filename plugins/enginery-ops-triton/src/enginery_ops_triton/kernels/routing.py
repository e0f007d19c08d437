"""The experts of a token, one program a token: scores, groups, the best few, weights.

Scores are compared by integer keys in their order, and of equal ones the lower index is taken, so that any bits in the logits, also
NaN, give experts that exist. A warp has one instruction for the largest or smallest of its integers of 32 bits. Logits of two bytes
that rank as their scores do leave room for the index in the key, so that one such instruction finds an expert, and not two.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor

LEAST_KEY = tl.constexpr(-(1 << 31))  # less than any other
BEHIND_ALL = tl.constexpr((1 << 31) - 1)  # no expert's index, and no packed key
LAST_INDEX = tl.constexpr(0xFFFE)  # that a packed key has room for


@kernel
def ranking_key(value: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Of float32, int32: the larger first."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LEAST_KEY + 1)
    return tl.where(inside, ordered, LEAST_KEY)


@kernel
def packed_key(logit: tl.tensor, index: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Of logits of two bytes, int32, no two alike: the larger first, of equal ones the lower index."""
    bits = logit.to(tl.int16, bitcast=True).to(tl.int32)
    ordered = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    return tl.where(inside, (ordered << 16) | (LAST_INDEX - index), LEAST_KEY)


@kernel
def first_of(key: tl.tensor, index: tl.tensor, top: tl.tensor) -> tl.tensor:
    """The lowest index of each row at which key is top. key, index: [G, N]; top: [G, 1], or one for all rows."""
    return tl.min(tl.where(key == top, index, BEHIND_ALL), axis=1)


@kernel
def score_of(logit: tl.tensor, peak: tl.tensor, mass: tl.tensor, SIGMOID: tl.constexpr) -> tl.tensor:
    """peak, mass: of the token's softmax."""
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logit))
    return tl.exp(logit - peak) / mass


@kernel
def route(
    logits: tl.tensor,
    bias: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    row_stride: int,
    scale: float,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    SIGMOID: tl.constexpr,
    PACKED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """logits: [T, NUM_EXPERTS] with its row stride; ids, weights: [T, NUM_COLUMNS] contiguous, the shared experts last.

    PACKED: logits are of two bytes, and rank as scores do. GATED: behind a row's logits is the gate of its shared experts.
    """
    release_successor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    members: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    group = tl.arange(0, BLOCK_GROUPS)
    member = tl.arange(0, BLOCK_MEMBERS)
    expert = group[:, None] * members + member[None, :]
    inside = (group[:, None] < NUM_GROUPS) & (member[None, :] < members)
    correction = tl.load(bias + expert, mask=inside, other=0.0) if BIAS else 0.0
    wait_for_predecessor(CHAINED)
    at = logits + row * row_stride
    given = tl.load(at + expert, mask=inside, other=float("-inf"))  # [groups, members]
    logit = given.to(tl.float32)
    behind = tl.load(at + NUM_EXPERTS).to(tl.float32) if GATED else 0.0
    peak = tl.max(tl.max(logit, axis=1), axis=0)
    mass = tl.sum(tl.sum(tl.exp(logit - peak), axis=1), axis=0)
    ranked = score_of(logit, peak, mass, SIGMOID) + correction
    if NUM_GROUPS > 1:
        known = tl.where(inside, ranked, float("-inf"))
        best = tl.max(known, axis=1)
        if TOP2:
            key = ranking_key(ranked, inside)
            is_first = expert == first_of(key, expert, tl.max(key, axis=1)[:, None])[:, None]
            best += tl.max(tl.where(is_first, float("-inf"), known), axis=1)
        group_key = ranking_key(best, group < NUM_GROUPS)
        chosen = group < 0
        for _ in range(TOP_GROUPS):
            now = group == tl.min(tl.where(group_key == tl.max(group_key, axis=0), group, BEHIND_ALL), axis=0)
            chosen = chosen | now
            group_key = tl.where(now, LEAST_KEY, group_key)
        ranked = tl.where(chosen[:, None], ranked, float("-inf"))
    place = tl.arange(0, BLOCK_TOP)
    picked = tl.zeros((BLOCK_TOP,), dtype=tl.int32)
    if PACKED:
        key = packed_key(given, expert, inside)
        top = BEHIND_ALL
        for step in range(TOP_K):
            below = tl.max((key - top).to(tl.uint32, bitcast=True), axis=1)  # the next below: of others it is less
            top += tl.max(below, axis=0).to(tl.int32, bitcast=True)
            picked = tl.where(place == step, LAST_INDEX - (top & 0xFFFF), picked)
    else:
        key = ranking_key(ranked, inside)
        for step in range(TOP_K):
            top = tl.max(tl.max(key, axis=1), axis=0)
            first = tl.min(first_of(key, expert, top), axis=0)
            picked = tl.where(place == step, first, picked)
            key = tl.where(expert == first, LEAST_KEY, key)
    wanted = place < TOP_K
    weight = score_of(tl.load(at + picked, mask=wanted, other=0.0).to(tl.float32), peak, mass, SIGMOID)
    if RENORMALISE:
        weight /= tl.sum(tl.where(wanted, weight, 0.0), axis=0) + 1e-20
    columns = row * NUM_COLUMNS + place
    tl.store(ids + columns, tl.where(wanted, picked, NUM_EXPERTS + place - TOP_K), mask=place < NUM_COLUMNS)
    shared = 1.0 / (1.0 + tl.exp(-behind)) if GATED else 1.0
    tl.store(weights + columns, tl.where(wanted, weight * scale, shared), mask=place < NUM_COLUMNS)
