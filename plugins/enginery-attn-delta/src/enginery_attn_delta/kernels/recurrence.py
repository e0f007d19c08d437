"""The matrix recurrences of linear attention, token after token, with the state in registers.

linear: S_t = d_t S_(t-1) + v_t k_t^T (arXiv:2312.06635; STEPS, Mamba2: v = dt x, k = B, q = C: arXiv:2405.21060).
delta:  S_t = d_t S_(t-1) + beta_t (v_t - d_t S_(t-1) k_t) k_t^T (arXiv:2412.06464; a decay for each channel: arXiv:2510.26692).
Both:   o_t = scale S_t q_t + skip v_t. A state is [H, V, K] float32. H value heads, K, V: dims of a head.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_attn_delta.kernels.conv import convolved_before, move_on
from enginery_attn_delta.kernels.launch import (
    kernel,
    kernel_of_rows,
    release_successor,
    round_to,
    sigmoid,
    silu,
    softplus,
    wait_for_predecessor,
)


@kernel
def row_inputs(
    row: tl.tensor,
    stop: tl.tensor,
    q_at: tl.tensor,
    k_at: tl.tensor,
    v_at: tl.tensor,
    decays_at: tl.tensor,
    beta_at: tl.tensor,
    x_stride: int,
    gates_stride: int,
    has_key: tl.tensor,
    has_value: tl.tensor,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What a head is given of a row before `stop`: q, k [K], v [V], what decays are made of and beta.

    All but `row` and `stop`: as of row 0. decays_at: [K] with a decay for each channel.
    """
    there = row < stop
    q = tl.load(q_at + row * x_stride, mask=has_key & there, other=0.0)
    k = tl.load(k_at + row * x_stride, mask=has_key & there, other=0.0)
    v = tl.load(v_at + row * x_stride, mask=has_value & there, other=0.0)
    decays = tl.full([], 0.0, tl.float32)
    beta = decays
    if DECAY == "head":
        decays = tl.load(decays_at + row * gates_stride, mask=there, other=0.0).to(tl.float32)
    if DECAY == "channel":
        decays = tl.load(decays_at + row * gates_stride, mask=has_key & there, other=0.0)
    if DELTA:
        beta = tl.load(beta_at + row * gates_stride, mask=there, other=0.0).to(tl.float32)
    return q, k, v, decays, beta


@kernel_of_rows
def recur(
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
    conv: tl.tensor,
    conv_bias: tl.tensor,
    inputs: tl.tensor,
    arrived: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    gates_stride: int,
    channel_stride: int,
    tap_stride: int,
    channels: int,
    scale: float,
    floor: float,
    least_step: float,
    most_step: float,
    q_at: int,
    k_at: int,
    v_at: int,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr,
    STEPS: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    ONE_EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    CONV_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program a request, head and block of values; those that run side by side read and write what lies side by side.

    x: [T, ...] with a row stride, in which q, k and v of head 0 begin at the columns q_at, k_at, v_at; GROUP value heads share a
    key head. gates: [T, G], see `advance` of the backend. states: [pages, H, V, K]; reads, writes: [B] int32, which may be equal; a
    request that reads page -1 begins from zeros, one that writes to it leaves no state. first_rows, stop_rows: [B] int32. DECAY:
    "head", "channel" or "constant". ONE_EACH: every request has one token. out: [T, H, V].

    WIDTH: above 0, x is convolved first, of one token each: conv: [C, WIDTH] with its strides; conv_bias: [C]; inputs: [pages,
    WIDTH - 1, C], the states of the convolution. All programs of a key head read its inputs; the last to have done so, by arrived
    [B, key heads] int32, zeros before and after, moves them on.
    """
    release_successor(CHAINED)
    request = tl.program_id(2)
    head = tl.program_id(1)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key = key < KEY_DIM
    has_value = value < VALUE_DIM
    here = has_value[:, None] & has_key[None, :]
    place = head * VALUE_DIM * KEY_DIM + value[:, None] * KEY_DIM + key[None, :]
    size = HEADS * VALUE_DIM * KEY_DIM
    page = tl.load(reads + request).to(tl.int64)
    if not ONE_EACH:  # rows that turned out right were written in the same step
        wait_for_predecessor(CHAINED)
    state = tl.load(states + page * size + place, mask=here & (page >= 0), other=0.0)
    if DECAY == "constant":
        decay = tl.exp(tl.load(log_decay + head))
    else:
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    shift = 0.0
    shift_of_key = tl.zeros((BLOCK_K,), tl.float32)
    if HAS_BIAS:
        if DECAY == "head":
            shift = tl.load(dt_bias + head).to(tl.float32)
        if DECAY == "channel":
            shift_of_key = tl.load(dt_bias + head * KEY_DIM + key, mask=has_key, other=0.0).to(tl.float32)
    if HAS_SKIP:
        skipped = tl.load(skip + head).to(tl.float32)
    q_column = q_at + (head // GROUP) * KEY_DIM + key
    k_column = k_at + (head // GROUP) * KEY_DIM + key
    v_column = v_at + head * VALUE_DIM + value
    q_from, k_from, v_from = x + q_column, x + k_column, x + v_column
    if DECAY == "channel":
        decays_from = gates + head * KEY_DIM + key
    else:
        decays_from = gates + (HEADS if DELTA else 0) + head
    beta_from = gates + (HEADS * KEY_DIM if DECAY == "channel" else 0) + head
    row = tl.load(first_rows + request).to(tl.int64)
    stop = row + 1 if ONE_EACH else tl.load(stop_rows + request).to(tl.int64)
    if WIDTH > 0:
        tl.static_assert(ONE_EACH)
        old = inputs + page * (WIDTH - 1) * channels
        q_before, q_tap, q_kept = convolved_before(
            old, page >= 0, conv, channel_stride, tap_stride, conv_bias, q_column, has_key, channels, CONV_BIAS, WIDTH
        )
        k_before, k_tap, k_kept = convolved_before(
            old, page >= 0, conv, channel_stride, tap_stride, conv_bias, k_column, has_key, channels, CONV_BIAS, WIDTH
        )
        v_before, v_tap, v_kept = convolved_before(
            old, page >= 0, conv, channel_stride, tap_stride, conv_bias, v_column, has_value, channels, CONV_BIAS, WIDTH
        )
        tl.debug_barrier()  # all threads have read the key head's inputs
        arrival = arrived + request * (HEADS // GROUP) + head // GROUP
        is_last = tl.atomic_add(arrival, 1, sem="acq_rel") == GROUP * tl.num_programs(0) - 1
    if ONE_EACH:
        wait_for_predecessor(CHAINED)
    page_to = tl.load(writes + request).to(tl.int64)
    next_q, next_k, next_v, next_decays, next_beta = row_inputs(
        row, stop, q_from, k_from, v_from, decays_from, beta_from, x_stride, gates_stride, has_key, has_value, DELTA, DECAY
    )
    while row < stop:
        q, k, v = next_q.to(tl.float32), next_k.to(tl.float32), next_v.to(tl.float32)
        raw, beta = next_decays, next_beta
        if not ONE_EACH:  # the next row's are on their way
            next_q, next_k, next_v, next_decays, next_beta = row_inputs(
                row + 1,
                stop,
                q_from,
                k_from,
                v_from,
                decays_from,
                beta_from,
                x_stride,
                gates_stride,
                has_key,
                has_value,
                DELTA,
                DECAY,
            )
        if WIDTH > 0:
            q_input, k_input, v_input = q, k, v
            q, k, v = q_before + q * q_tap, k_before + k * k_tap, v_before + v * v_tap
            if ACTIVATES:
                q, k, v = silu(q), silu(k), silu(v)
        written = v
        if DELTA:
            q = q * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6)
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        if DECAY == "head":
            step = softplus(raw + shift)
            step = tl.minimum(tl.maximum(step, least_step), most_step)
            decay = tl.exp(-rate * step)
            if STEPS:
                written = v * step
        if DECAY == "channel":
            raws = raw.to(tl.float32) + shift_of_key
            if HAS_FLOOR:
                state = state * tl.exp(floor * sigmoid(rate * raws))[None, :]
            else:
                state = state * tl.exp(-rate * softplus(raws))[None, :]
        else:
            state = state * decay
        if DELTA:
            written = (v - tl.sum(state * k[None, :], axis=1)) * sigmoid(beta)
        state += written[:, None] * k[None, :]
        seen = tl.sum(state * q[None, :], axis=1) * scale
        if HAS_SKIP:
            seen += skipped * v
        tl.store(out + (row * HEADS + head) * VALUE_DIM + value, round_to(seen, out.dtype.element_ty), mask=has_value)
        if WIDTH > 0:
            new, goes_on = inputs + page_to * (WIDTH - 1) * channels, page_to >= 0
            move_on(new, q_kept, q_input, q_column, has_key & goes_on & is_last, channels, WIDTH)
            move_on(new, k_kept, k_input, k_column, has_key & goes_on & is_last, channels, WIDTH)
            move_on(new, v_kept, v_input, v_column, has_value & goes_on, channels, WIDTH)
            tl.store(arrival, 0, mask=is_last)
        row += 1
    tl.store(states + page_to * size + place, state, mask=here & (page_to >= 0))


@kernel
def scan_inputs(
    row: tl.tensor,
    stop: tl.tensor,
    value_at: tl.tensor,
    step_at: tl.tensor,
    b_at: tl.tensor,
    x_stride: int,
    gates_stride: int,
    inside: tl.tensor,
    has_index: tl.tensor,
    STATE_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """x, dt [C], B, C [N] of a row before `stop`. value_at, step_at, b_at: of row 0."""
    there = row < stop
    value = tl.load(value_at + row * x_stride, mask=inside & there, other=0.0)
    step = tl.load(step_at + row * gates_stride, mask=inside & there, other=0.0)
    b = tl.load(b_at + row * gates_stride, mask=has_index & there, other=0.0)
    c = tl.load(b_at + STATE_DIM + row * gates_stride, mask=has_index & there, other=0.0)
    return value, step, b, c


@kernel_of_rows
def scan(
    x: tl.tensor,
    gates: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    first_rows: tl.tensor,
    stop_rows: tl.tensor,
    a_log: tl.tensor,
    skip: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    gates_stride: int,
    channels: int,
    scale: float,
    HAS_SKIP: tl.constexpr,
    STATE_DIM: tl.constexpr,
    ONE_EACH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Mamba's selective scan (arXiv:2312.00752): h_t = exp(dt A) h_(t-1) + dt B_t x_t, y_t = scale C_t h_t + D x_t,
    A = -exp(a_log).

    One program a request and block of channels. x: [T, C]; gates: [T, C + 2 N]: dt after its softplus, B, C; a_log: [C, N]; skip:
    [C]; states: [pages, C, N] float32; out: [T, C].
    """
    release_successor(CHAINED)
    request = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    index = tl.arange(0, BLOCK_N)
    inside = channel < channels
    has_index = index < STATE_DIM
    here = inside[:, None] & has_index[None, :]
    place = channel[:, None] * STATE_DIM + index[None, :]
    size = channels * STATE_DIM
    if not ONE_EACH:  # as `recur`
        wait_for_predecessor(CHAINED)
    page = tl.load(reads + request).to(tl.int64)
    state = tl.load(states + page * size + place, mask=here & (page >= 0), other=0.0)
    rate = -tl.exp(tl.load(a_log + place, mask=here, other=0.0).to(tl.float32))
    if HAS_SKIP:
        skipped = tl.load(skip + channel, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(first_rows + request).to(tl.int64)
    stop = row + 1 if ONE_EACH else tl.load(stop_rows + request).to(tl.int64)
    value_at, step_at = x + channel, gates + channel
    b_at = gates + channels + index
    if ONE_EACH:
        wait_for_predecessor(CHAINED)
    next_value, next_step, next_b, next_c = scan_inputs(
        row, stop, value_at, step_at, b_at, x_stride, gates_stride, inside, has_index, STATE_DIM
    )
    while row < stop:
        value, step, b, c = next_value.to(tl.float32), next_step.to(tl.float32), next_b.to(tl.float32), next_c.to(tl.float32)
        if not ONE_EACH:  # the next row's are on their way
            next_value, next_step, next_b, next_c = scan_inputs(
                row + 1, stop, value_at, step_at, b_at, x_stride, gates_stride, inside, has_index, STATE_DIM
            )
        state = state * tl.exp(rate * step[:, None]) + (step * value)[:, None] * b[None, :]
        seen = tl.sum(state * c[None, :], axis=1) * scale
        if HAS_SKIP:
            seen += skipped * value
        tl.store(out + row * channels + channel, round_to(seen, out.dtype.element_ty), mask=inside)
        row += 1
    page_to = tl.load(writes + request).to(tl.int64)
    tl.store(states + page_to * size + place, state, mask=here & (page_to >= 0))
