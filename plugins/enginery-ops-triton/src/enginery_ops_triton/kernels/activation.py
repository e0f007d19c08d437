"""Gates: those of MLPs, and that of attention's output."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.gates import ROOT_2_BY_PI
from enginery_ops_triton.kernels.launch import kernel, release_successor, wait_for_predecessor
from enginery_ops_triton.kernels.precision import round_to


@kernel
def silu_times(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """Of the type of both. Rounds silu, as the torch reference does."""
    wide = gate.to(tl.float32)
    silu = round_to(wide / (1.0 + tl.exp(-wide)), gate.dtype)
    return round_to(silu.to(tl.float32) * up.to(tl.float32), gate.dtype)


@kernel
def gelu_times(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """The same with GELU by tanh: (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)), by an exponential that cannot overflow."""
    wide = gate.to(tl.float32)
    twice = 2.0 * ROOT_2_BY_PI * (wide + 0.044715 * wide * wide * wide)
    small = tl.exp(-tl.abs(twice))
    gelu = round_to(wide * tl.where(twice < 0.0, small, 1.0) / (1.0 + small), gate.dtype)
    return round_to(gelu.to(tl.float32) * up.to(tl.float32), gate.dtype)


@kernel
def gated_halves(
    x: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x: [N, 2 COLUMNS] with its row stride; out: [N, COLUMNS] contiguous. GELU by tanh, or SiLU."""
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    at = x + row * x_stride + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + COLUMNS, mask=inside, other=0.0)
    made = gelu_times(gate, up) if GELU else silu_times(gate, up)
    tl.store(out + row * COLUMNS + column, made, mask=inside)


@kernel
def gated_sigmoid(
    x: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    gate_stride: int,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """x, gate: [N, COLUMNS] with their row strides; out: [N, COLUMNS] contiguous. Rounds the sigmoid, as the reference does."""
    release_successor(CHAINED)
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    given = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    opened = round_to(1.0 / (1.0 + tl.exp(-given.to(tl.float32))), gate.dtype.element_ty)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * COLUMNS + column, round_to(values * opened.to(tl.float32), out.dtype.element_ty), mask=inside)
