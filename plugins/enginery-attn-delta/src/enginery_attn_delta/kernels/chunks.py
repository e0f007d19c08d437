"""Linear attention over prompts, CHUNK tokens at a time, as products of matrices (arXiv:2312.06635; Mamba2: arXiv:2405.21060).

Within a chunk, with d_t the decay of token t, c_t = log d_1 + ... + log d_t, and S the state before it, as rows of [V, K]:

    o_t = scale (exp(c_t) S q_t + sum over s <= t of exp(c_t - c_s) (k_s . q_t) v_s) + skip x_t
    S'  = exp(c_last) S + sum over s of exp(c_last - c_s) v_s k_s^T

v = dt x with STEPS, else v = x. The state stays in registers in float32; what products take is rounded to the type of x.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_attn_delta.kernels.launch import (
    INTERPRETED,
    bound,
    kernel,
    kernel_of_rows,
    release_successor,
    round_to,
    softplus,
    wait_for_predecessor,
)


@kernel
def _product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """In float32, of which nothing is cut. The interpreter has no products of bfloat16."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@kernel_of_rows
def linear_chunks(
    x: tl.tensor,
    gates: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    first_rows: tl.tensor,
    stop_rows: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    log_decay: tl.tensor,
    skip: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    gates_stride: int,
    scale: float,
    least_step: float,
    most_step: float,
    q_at: int,
    k_at: int,
    v_at: int,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STEPS: tl.constexpr,
    CONSTANT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program a request, head and block of values. What it is given is as `recur` has it."""
    release_successor(CHAINED)
    request = tl.program_id(0)
    head = tl.program_id(1)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    token = tl.arange(0, CHUNK)
    has_key = key < KEY_DIM
    has_value = value < VALUE_DIM
    here = has_value[:, None] & has_key[None, :]
    place = head * VALUE_DIM * KEY_DIM + value[:, None] * KEY_DIM + key[None, :]
    size = HEADS * VALUE_DIM * KEY_DIM
    shift = 0.0
    skipped = 0.0
    if CONSTANT:
        rate = tl.load(log_decay + head)
    else:
        rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    if HAS_BIAS:
        shift = tl.load(dt_bias + head).to(tl.float32)
    if HAS_SKIP:
        skipped = tl.load(skip + head).to(tl.float32)
    first = tl.load(first_rows + request).to(tl.int64)
    length = (tl.load(stop_rows + request).to(tl.int64) - first).to(tl.int32)
    q_at += (head // GROUP) * KEY_DIM
    k_at += (head // GROUP) * KEY_DIM
    v_at += head * VALUE_DIM
    wait_for_predecessor(CHAINED)
    page = tl.load(reads + request).to(tl.int64)
    state = tl.load(states + page * size + place, mask=here & (page >= 0), other=0.0)  # [V, K]
    for begin in range(0, bound(length), CHUNK):
        is_token = begin + token < length
        row = first + begin + token
        at = x + row * x_stride
        q = tl.load(at[:, None] + q_at + key[None, :], mask=is_token[:, None] & has_key[None, :], other=0.0)
        k = tl.load(at[:, None] + k_at + key[None, :], mask=is_token[:, None] & has_key[None, :], other=0.0)
        v = tl.load(at[:, None] + v_at + value[None, :], mask=is_token[:, None] & has_value[None, :], other=0.0)
        written = v.to(tl.float32)
        if CONSTANT:
            logs = tl.where(is_token, rate, 0.0)
        else:
            raw = tl.load(gates + row * gates_stride + head, mask=is_token, other=0.0).to(tl.float32)
            step = tl.minimum(tl.maximum(softplus(raw + shift), least_step), most_step)
            logs = tl.where(is_token, rate * step, 0.0)
            if STEPS:
                written = written * step[:, None]
        decays = tl.cumsum(logs, axis=0)
        last = tl.sum(logs, axis=0)
        seen = _product(q, tl.trans(round_to(state, q.dtype))) * tl.exp(decays)[:, None]
        apart = tl.where(token[:, None] >= token[None, :], decays[:, None] - decays[None, :], float("-inf"))
        weights = _product(q, tl.trans(k)) * tl.exp(apart)
        seen += _product(round_to(weights, q.dtype), round_to(written, q.dtype))
        made = seen * scale
        if HAS_SKIP:
            made += skipped * v.to(tl.float32)
        to = out + (row[:, None] * HEADS + head) * VALUE_DIM + value[None, :]
        tl.store(to, round_to(made, out.dtype.element_ty), mask=is_token[:, None] & has_value[None, :])
        fading = round_to(written * tl.exp(last - decays)[:, None], q.dtype)
        state = state * tl.exp(last) + _product(tl.trans(fading), k)
    page_to = tl.load(writes + request).to(tl.int64)
    tl.store(states + page_to * size + place, state, mask=here & (page_to >= 0))
