"""Causal convolution of each channel over its last W tokens, then SiLU: of chunks, of single tokens, and within other kernels.

A state holds the W - 1 inputs before a request's next token, the oldest first: [W - 1, C]. T tokens, C channels, B requests.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_attn_delta.kernels.launch import kernel, kernel_of_rows, release_successor, round_to, silu, wait_for_predecessor


@kernel_of_rows
def convolve_tokens(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    first_rows: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    channel_stride: int,
    tap_stride: int,
    channels: int,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """As `convolve`, of one token of each request: all but that token is read before the kernel waits."""
    release_successor(CHAINED)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    request = tl.program_id(1)
    inside = channel < channels
    row = tl.load(first_rows + request).to(tl.int64)
    page = tl.load(reads + request).to(tl.int64)
    page_to = tl.load(writes + request).to(tl.int64)
    old = states + page * (WIDTH - 1) * channels
    acc, tap, kept = convolved_before(
        old, page >= 0, weight, channel_stride, tap_stride, bias, channel, inside, channels, HAS_BIAS, WIDTH
    )
    wait_for_predecessor(CHAINED)
    newest = tl.load(x + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    acc += newest * tap
    if ACTIVATES:
        acc = silu(acc)
    tl.store(out + row * channels + channel, round_to(acc, out.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # all threads have read the old state
    move_on(states + page_to * (WIDTH - 1) * channels, kept, newest, channel, inside & (page_to >= 0), channels, WIDTH)


@kernel_of_rows
def convolve(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    first_rows: tl.tensor,
    stop_rows: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    channel_stride: int,
    tap_stride: int,
    channels: int,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program a tile and block of channels.

    x: [T, C] with a row stride; weight: [C, W] with its strides; bias: [C]; states: [pages, W - 1, C]; reads, writes: [B] int32,
    pages; first_rows, stop_rows: [B] int32, each request's rows; tiles: [N, 2] int32, request and its first token there; out:
    [T, C]. A request that reads page -1 begins from zeros, one that writes to it leaves no state. A request's first tile reads its
    old state and writes the new one, so the two pages may be one. Its tiles are of BLOCK_T >= W - 1 tokens.
    """
    release_successor(CHAINED)
    request = tl.load(tiles + 2 * tl.program_id(0))
    begin = tl.load(tiles + 2 * tl.program_id(0) + 1)
    row = tl.load(first_rows + request).to(tl.int64)
    count = (tl.load(stop_rows + request) - row).to(tl.int32)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    page = tl.load(reads + request).to(tl.int64)
    has_old = page >= 0
    old = states + page * (WIDTH - 1) * channels
    token = begin + tl.arange(0, BLOCK_T)
    acc = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    taps = ()  # type: tuple[tl.tensor, ...]
    for tap in tl.static_range(WIDTH):
        taps += (tl.load(weight + channel * channel_stride + tap * tap_stride, mask=inside, other=0.0).to(tl.float32),)
    wait_for_predecessor(CHAINED)
    for tap in tl.static_range(WIDTH):
        at = token + tap - (WIDTH - 1)
        of_step = tl.load(
            x + (row + at)[:, None] * x_stride + channel[None, :],
            mask=((at >= 0) & (at < count))[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        of_state = tl.load(
            old + (WIDTH - 1 + at)[:, None] * channels + channel[None, :],
            mask=((at < 0) & has_old)[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        acc += (of_step + of_state) * taps[tap][None, :]
    if ACTIVATES:
        acc = silu(acc)
    tl.store(
        out + (row + token)[:, None] * channels + channel[None, :],
        round_to(acc, out.dtype.element_ty),
        mask=(token < count)[:, None] & inside[None, :],
    )
    if begin == 0:
        tl.debug_barrier()  # the threads that read the old state are not those that write the new one
        page_to = tl.load(writes + request).to(tl.int64)
        new = states + page_to * (WIDTH - 1) * channels
        for place in tl.static_range(WIDTH - 1):
            source = count - (WIDTH - 1) + place
            if source >= 0:
                kept = tl.load(x + (row + source) * x_stride + channel, mask=inside, other=0.0).to(states.dtype.element_ty)
            else:
                kept = tl.load(old + (WIDTH - 1 + source) * channels + channel, mask=inside & has_old, other=0.0)
            tl.store(new + place * channels + channel, kept, mask=inside & (page_to >= 0))


@kernel
def convolved_before(
    old: tl.tensor,
    has_old: tl.tensor,
    weight: tl.tensor,
    channel_stride: int,
    tap_stride: int,
    bias: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    channels: int,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tuple[tl.tensor, ...]]:
    """What a token's state gives of its convolution and the weight of its own input, [N] float32 both, and the state's inputs but
    for the oldest, [N] each.

    old: the state, [W - 1, C]; weight: [C, W] with its strides; channel: [N].
    """
    taps = weight + channel * channel_stride
    acc = tl.zeros(channel.shape, tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    kept = ()  # type: tuple[tl.tensor, ...]
    for tap in tl.static_range(WIDTH - 1):
        value = tl.load(old + tap * channels + channel, mask=inside & has_old, other=0.0)
        acc += value.to(tl.float32) * tl.load(taps + tap * tap_stride, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            kept += (value,)
    return acc, tl.load(taps + (WIDTH - 1) * tap_stride, mask=inside, other=0.0).to(tl.float32), kept


@kernel
def move_on(
    new: tl.tensor,
    kept: tl.tuple,
    newest: tl.tensor,
    channel: tl.tensor,
    wanted: tl.tensor,
    channels: int,
    WIDTH: tl.constexpr,
) -> None:
    """The state behind a token, [W - 1, C]: what `convolved_before` kept, and the token's input. newest: [N] float32."""
    for place in tl.static_range(WIDTH - 2):
        tl.store(new + place * channels + channel, kept[place], mask=wanted)
    tl.store(new + (WIDTH - 2) * channels + channel, round_to(newest, new.dtype.element_ty), mask=wanted)
