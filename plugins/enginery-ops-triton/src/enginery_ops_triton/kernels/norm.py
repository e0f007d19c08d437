"""RMSNorm with a row in registers: of rows, with or without adding to the residual stream first, and of heads with gates."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import round_to


@kernel
def rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    residual_stride: int,
    eps: float,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x, residual: [N, COLUMNS] with their row strides; out: [N, COLUMNS] contiguous. Rounds where the torch reference does."""
    release_successor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(CHAINED)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if ADD:
        at = residual + row * residual_stride + column
        summed = tl.load(at, mask=inside, other=0.0).to(tl.float32) + values.to(tl.float32)
        values = round_to(summed, residual.dtype.element_ty)
        tl.store(at, values, mask=inside)
    wide = values.to(tl.float32)
    normed = round_to(wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps), values.dtype)
    tl.store(out + row * COLUMNS + column, round_to(normed.to(tl.float32) * scale, out.dtype.element_ty), mask=inside)


@kernel
def gated_rms_norm(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    gate_stride: int,
    eps: float,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BY_HEAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x, gate: [T, HEADS, DIM] with the strides of their tokens; out: the same, contiguous. Programs: tokens, blocks of heads.

    weight: [DIM], or BY_HEAD [HEADS, DIM].
    """
    release_successor(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    inside = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    place = head[:, None] * DIM + dim[None, :]
    if BY_HEAD:
        scale = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    else:
        scale = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)[None, :]
    wait_for_predecessor(CHAINED)
    values = tl.load(x + token * x_stride + place, mask=inside, other=0.0)
    given = tl.load(gate + token * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    opened = 1.0 / (1.0 + tl.exp(-given))
    if not SIGMOID:
        opened = given * opened
    wide = values.to(tl.float32)
    if GATE_FIRST:
        wide = wide * opened
    normed = round_to(wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None], values.dtype)
    result = normed.to(tl.float32) * scale
    if not GATE_FIRST:
        result = round_to(result, out.dtype.element_ty).to(tl.float32) * opened
    tl.store(out + token * (HEADS * DIM) + place, round_to(result, out.dtype.element_ty), mask=inside)
