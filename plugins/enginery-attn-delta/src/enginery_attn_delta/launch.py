"""From tensors to kernels. T tokens, B requests, C channels, H value heads, K, V: dims of a head's key and value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from enginery_attn_delta.kernels import chunks, conv, recurrence
from enginery_attn_delta.kernels.launch import next_power_of_2

CHUNK_ROWS: Final = 8  # of a tile of the convolution
_CHANNELS: Final = 256
_VALUES_OF_ONE_TOKEN: Final = 8  # of a head in a program, which is one warp: docs/log.md, 2026-12-01
_VALUES: Final = 16
_SCANNED: Final = 32  # channels, of one warp too
_CHUNK: Final = 32  # tokens of linear attention at once, and the most values of a head in one program


Decay = Literal["head", "channel", "constant"]


def can_chain(device: torch.device) -> bool:
    """Whether it has programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Where the rows and states of B requests are, on the device.

    first_rows, stop_rows: [B] int32; reads, writes: [B] int32, pages, -1 to begin from zeros and to leave no state; tiles: [N, 2]
    int32, request and first token of each tile of the convolution, of CHUNK_ROWS; None: every request has one token; longest: the
    most tokens of a request.
    chained: kernels start while the one before them still runs (compute capability 9.0). arrived: [layers, N] int32,
    N >= B times a layer's key heads, for recurrences that convolve what they read, see `Conv`; None: a kernel before them does.
    """

    first_rows: torch.Tensor
    stop_rows: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor
    tiles: torch.Tensor | None
    longest: int
    chained: bool = False
    arrived: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How a layer's channels are laid out: q, k and v of head 0 begin at these columns; num_keys heads of keys serve num_values."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    q_at: int
    k_at: int
    v_at: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Gating:
    """What makes decays out of gates: a_log, log_decay, skip: [H] float32; dt_bias: [H], or [H, K] of a decay for each channel.

    steps: as of Mamba2, dt multiplies what is written; step_limits: dt is no smaller, no larger.
    """

    decay: Decay
    delta: bool
    a_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    log_decay: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    floor: float | None = None
    steps: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True, kw_only=True, eq=False)
class Conv:
    """A convolution within a recurrence. weight: [C, W]; bias: [C]; states: [pages, W - 1, C], whose write pages are written.

    arrived: B times key heads int32, zeros before and after, which no other kernel of the step uses.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    states: torch.Tensor
    activates: bool
    arrived: torch.Tensor


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    states: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
    activates: bool = True,
) -> None:
    """x: [T, C]; weight: [C, W]; bias: [C]; states: [pages, W - 1, C], of which the write pages are written; out: [T, C]."""
    channels, width = weight.shape
    given: dict[str, Any] = dict(HAS_BIAS=bias is not None, ACTIVATES=activates, WIDTH=width, BLOCK_C=_CHANNELS)
    chained: dict[str, Any] = dict(CHAINED=rows.chained, launch_pdl=rows.chained)
    tensors = (x, weight, weight if bias is None else bias, states, rows.reads, rows.writes, rows.first_rows)
    sizes, blocks = (x.stride(0), *weight.stride(), channels), -(-channels // _CHANNELS)
    if rows.tiles is None:
        conv.convolve_tokens[(blocks, len(rows.reads))](*tensors, out, *sizes, **given, **chained)
        return
    grid = (len(rows.tiles), blocks)
    conv.convolve[grid](*tensors, rows.stop_rows, rows.tiles, out, *sizes, BLOCK_T=CHUNK_ROWS, **given, **chained)


def recur(
    x: torch.Tensor,
    gates: torch.Tensor | None,
    *,
    states: torch.Tensor,
    rows: Rows,
    heads: Heads,
    gating: Gating,
    scale: float,
    out: torch.Tensor,
    conv: Conv | None = None,
) -> None:
    """x: [T, C]; gates: [T, G]; states: [pages, H, V, K] float32, of which the write pages are written; out: [T, H, V].

    conv: of x, which has not passed it yet; for requests of one token each.
    """
    gates = x if gates is None else gates
    unused = x
    one_each = rows.tiles is None
    block_v = min(next_power_of_2(heads.value_dim), _VALUES_OF_ONE_TOKEN if one_each else _VALUES)
    recurrence.recur[(-(-heads.value_dim // block_v), heads.num_values, len(rows.reads))](
        x,
        gates,
        states,
        rows.reads,
        rows.writes,
        rows.first_rows,
        rows.stop_rows,
        *_tensors_of(gating, unused),
        unused if conv is None else conv.weight,
        unused if conv is None or conv.bias is None else conv.bias,
        unused if conv is None else conv.states,
        rows.reads if conv is None else conv.arrived,
        out,
        x.stride(0),
        gates.stride(0),
        *((0, 0) if conv is None else conv.weight.stride()),
        0 if conv is None else len(conv.weight),
        scale,
        0.0 if gating.floor is None else gating.floor,
        *gating.step_limits,
        heads.q_at,
        heads.k_at,
        heads.v_at,
        **_constants_of(heads, gating),
        DELTA=gating.delta,
        DECAY=gating.decay,
        HAS_FLOOR=gating.floor is not None,
        ONE_EACH=one_each,
        WIDTH=0 if conv is None else conv.weight.shape[1],
        CONV_BIAS=conv is not None and conv.bias is not None,
        ACTIVATES=conv is not None and conv.activates,
        BLOCK_K=next_power_of_2(heads.key_dim),
        BLOCK_V=block_v,
        CHAINED=rows.chained,
        launch_pdl=rows.chained,
        num_warps=1,
    )


def linear_chunks(
    x: torch.Tensor,
    gates: torch.Tensor,
    *,
    states: torch.Tensor,
    rows: Rows,
    heads: Heads,
    gating: Gating,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Linear attention in chunks. What it is given is as `recur` has it; x: [T, C] of the type in which products are taken.

    Blocks have 32 rows, for which Triton takes mma.sync: of 64 it takes wgmma, several of which in one kernel ptxas of CUDA 12.8
    and 13.0 compiles to reads beyond the shared memory (triton-lang/triton#11366, fla-org/flash-linear-attention#1262).
    """
    block_k = max(16, next_power_of_2(heads.key_dim))
    block_v = max(16, min(next_power_of_2(heads.value_dim), _CHUNK))
    chunks.linear_chunks[(rows.reads.shape[0], heads.num_values, -(-heads.value_dim // block_v))](
        x,
        gates,
        states,
        rows.reads,
        rows.writes,
        rows.first_rows,
        rows.stop_rows,
        *_tensors_of(gating, x),
        out,
        x.stride(0),
        gates.stride(0),
        scale,
        *gating.step_limits,
        heads.q_at,
        heads.k_at,
        heads.v_at,
        **_constants_of(heads, gating),
        CONSTANT=gating.decay == "constant",
        CHUNK=_CHUNK,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        CHAINED=rows.chained,
        launch_pdl=rows.chained,
        num_warps=4,
        num_stages=1 if x.element_size() > 2 else 3,
    )


def _tensors_of(gating: Gating, unused: torch.Tensor) -> list[torch.Tensor]:
    """As kernels of linear attention and delta rules take them. unused: in place of what there is not."""
    each = (gating.a_log, gating.dt_bias, gating.log_decay, gating.skip)
    return [unused if tensor is None else tensor for tensor in each]


def _constants_of(heads: Heads, gating: Gating) -> dict[str, int]:
    """What both kinds of kernels are compiled for."""
    return {
        "HEADS": heads.num_values,
        "GROUP": heads.num_values // heads.num_keys,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "STEPS": gating.steps,
        "HAS_BIAS": gating.dt_bias is not None,
        "HAS_SKIP": gating.skip is not None,
    }


def scan(
    x: torch.Tensor,
    gates: torch.Tensor,
    *,
    a_log: torch.Tensor,
    skip: torch.Tensor | None,
    states: torch.Tensor,
    rows: Rows,
    scale: float,
    out: torch.Tensor,
) -> None:
    """x: [T, C]; gates: [T, C + 2 N], steps, B and C; a_log: [C, N]; skip: [C]; states: [pages, C, N] float32; out: [T, C]."""
    channels, state_dim = a_log.shape
    block = min(next_power_of_2(channels), _SCANNED)
    recurrence.scan[(-(-channels // block), len(rows.reads))](
        x,
        gates,
        states,
        rows.reads,
        rows.writes,
        rows.first_rows,
        rows.stop_rows,
        a_log,
        a_log if skip is None else skip,
        out,
        x.stride(0),
        gates.stride(0),
        channels,
        scale,
        HAS_SKIP=skip is not None,
        STATE_DIM=state_dim,
        ONE_EACH=rows.tiles is None,
        BLOCK_C=block,
        BLOCK_N=next_power_of_2(state_dim),
        CHAINED=rows.chained,
        launch_pdl=rows.chained,
        num_warps=1,
    )
