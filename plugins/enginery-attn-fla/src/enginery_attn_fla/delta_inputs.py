"""What chunks of a delta rule are computed from, in one kernel: queries and keys of length 1, values, decays, betas.

S rows, C channels, KH, H: key and value heads, K, V: dims of a head's key and value. torch would take some fifteen launches for it,
whose way through the host is longer than a short prompt's time on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery.api import RecurrentFacts, RecurrentWeights
from enginery_attn_delta.backend import heads_of
from enginery_attn_delta.kernels.launch import next_power_of_2, round_to, sigmoid, softplus

_ROWS: Final = 8  # of a program


class DeltaInputs(NamedTuple):
    """q, k: [1, S, KH, K], v: [1, S, H, V], of the dtype of what they are made of; log_decay: [1, S, H] or [1, S, H, K], beta: [1,
    S, H], float32. All contiguous.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def _of_any_rows(function: Callable[..., Any]) -> Any:
    """A kernel of which one variant serves any number of rows."""
    return triton.jit(function, do_not_specialize=["num_rows"])


@_of_any_rows
def prepare(
    mixed: tl.tensor,
    gates: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    log_decay: tl.tensor,
    beta: tl.tensor,
    num_rows: int,
    mixed_stride: int,
    gates_stride: int,
    floor: float,
    least_step: float,
    most_step: float,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program a block of rows and value head; a key head is written with the first of its value heads.

    mixed: [S, C] and gates: [S, G] with row strides: queries, keys and values of all heads; raw decays and betas as `recur` of
    enginery-attn-delta has them. Outputs as `DeltaInputs`.
    """
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    head = tl.program_id(1)
    key = tl.arange(0, BLOCK_K)
    value = tl.arange(0, BLOCK_V)
    is_row = row < num_rows
    has_key = is_row[:, None] & (key < KEY_DIM)[None, :]
    has_value = is_row[:, None] & (value < VALUE_DIM)[None, :]
    at = mixed + row[:, None] * mixed_stride
    group: tl.constexpr = HEADS // KEY_HEADS
    if head % group == 0:
        key_column = head // group * KEY_DIM + key[None, :]
        key_place = row[:, None] * (KEY_HEADS * KEY_DIM) + key_column
        queries = tl.load(at + key_column, mask=has_key, other=0.0).to(tl.float32)
        keys = tl.load(at + KEY_HEADS * KEY_DIM + key_column, mask=has_key, other=0.0).to(tl.float32)
        queries = queries * tl.rsqrt(tl.sum(queries * queries, axis=1) + 1e-6)[:, None]
        keys = keys * tl.rsqrt(tl.sum(keys * keys, axis=1) + 1e-6)[:, None]
        tl.store(q + key_place, round_to(queries, q.dtype.element_ty), mask=has_key)
        tl.store(k + key_place, round_to(keys, k.dtype.element_ty), mask=has_key)
    value_column = head * VALUE_DIM + value[None, :]
    values = tl.load(at + 2 * KEY_HEADS * KEY_DIM + value_column, mask=has_value, other=0.0)
    tl.store(v + row[:, None] * (HEADS * VALUE_DIM) + value_column, values, mask=has_value)
    gate = gates + row * gates_stride
    raw_beta = tl.load(gate + (HEADS * KEY_DIM if BY_CHANNEL else 0) + head, mask=is_row, other=0.0).to(tl.float32)
    tl.store(beta + row * HEADS + head, sigmoid(raw_beta), mask=is_row)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    if BY_CHANNEL:
        column = head * KEY_DIM + key[None, :]
        raw = tl.load(gate[:, None] + column, mask=has_key, other=0.0).to(tl.float32)
        if HAS_BIAS:
            raw += tl.load(dt_bias + column, mask=(key < KEY_DIM)[None, :], other=0.0).to(tl.float32)
    else:
        raw = tl.load(gate + HEADS + head, mask=is_row, other=0.0).to(tl.float32)
        if HAS_BIAS:
            raw += tl.load(dt_bias + head).to(tl.float32)
    if HAS_FLOOR:
        made = floor * sigmoid(rate * raw)
    else:
        made = -rate * tl.minimum(tl.maximum(softplus(raw), least_step), most_step)
    if BY_CHANNEL:
        tl.store(log_decay + row[:, None] * (HEADS * KEY_DIM) + column, made, mask=has_key)
    else:
        tl.store(log_decay + row * HEADS + head, made, mask=is_row)


def prepare_delta(mixed: torch.Tensor, gates: torch.Tensor, facts: RecurrentFacts, weights: RecurrentWeights) -> DeltaInputs:
    """mixed: [S, C], after the convolution; gates: [S, G]."""
    heads, num_rows, by_channel = heads_of(facts), len(mixed), facts.decay == "channel"
    assert weights.a_log is not None, "a decay that is not constant has a_log"
    decays = (1, num_rows, heads.num_values, heads.key_dim) if by_channel else (1, num_rows, heads.num_values)
    made = DeltaInputs(
        q=mixed.new_empty(1, num_rows, heads.num_keys, heads.key_dim),
        k=mixed.new_empty(1, num_rows, heads.num_keys, heads.key_dim),
        v=mixed.new_empty(1, num_rows, heads.num_values, heads.value_dim),
        log_decay=torch.empty(decays, dtype=torch.float32, device=mixed.device),
        beta=torch.empty((1, num_rows, heads.num_values), dtype=torch.float32, device=mixed.device),
    )
    prepare[(-(-num_rows // _ROWS), heads.num_values)](
        mixed,
        gates,
        weights.a_log,
        weights.a_log if weights.dt_bias is None else weights.dt_bias,
        *made,
        num_rows,
        mixed.stride(0),
        gates.stride(0),
        0.0 if facts.gate_floor is None else facts.gate_floor,
        *facts.step_limits,
        KEY_HEADS=heads.num_keys,
        HEADS=heads.num_values,
        KEY_DIM=heads.key_dim,
        VALUE_DIM=heads.value_dim,
        BY_CHANNEL=by_channel,
        HAS_BIAS=weights.dt_bias is not None,
        HAS_FLOOR=facts.gate_floor is not None,
        BLOCK_T=_ROWS,
        BLOCK_K=next_power_of_2(heads.key_dim),
        BLOCK_V=next_power_of_2(heads.value_dim),
    )
    return made
