"""Decoding of few requests on Hopper: which layers `kernels.decode_few` serves, and how it is launched."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Final

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_attn_triton.tiling import FEW_ROWS, LayerCut, Tile

if TYPE_CHECKING:
    from enginery_attn_triton.launch import Scores

KEYS, MOST_WARPS = 16, 4  # the matrix units' rows, of which each warp has one block or more
REGISTERS: Final = {64: None, 128: 168, 256: None}
"""Of a thread at the most, so that as many programs run on a multiprocessor as `tiling.FEW_RESIDENT` says."""


@functools.cache
def few_kernels(version: str = triton.__version__) -> Any | None:
    """`kernels.decode_few`, for Triton 3.6: its Gluon is experimental, and those of other versions differ."""
    return importlib.import_module("enginery_attn_triton.kernels.decode_few") if version.startswith("3.6.") else None


def num_warps(tile: Tile) -> int:
    """Of a program, which all have as many of a tile's keys."""
    return min(MOST_WARPS, tile.keys // KEYS)


def kernel_of(cut: LayerCut, num_requests: int) -> Any | None:
    """The kernel, on devices of Hopper's that start it early, where it serves such a step."""
    kernels = few_kernels() if 0 < num_requests <= cut.decode.few else None
    return None if kernels is None else kernels.decode_few


def constants(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cut: LayerCut, *, scores: Scores
) -> dict[str, Any]:
    """What the kernel is compiled for. q, out: [S, H, .]; k, v: [pages, page size, K, .]."""
    dims = cut.dims
    return dict(
        Q_STRIDE=q.stride(0),
        Q_HEAD=q.stride(1),
        OUT_STRIDE=out.stride(0),
        OUT_HEAD=out.stride(1),
        K_STRIDE=k.stride(1),
        K_HEAD=k.stride(2),
        V_STRIDE=v.stride(1),
        V_HEAD=v.stride(2),
        PAGE_SIZE=k.shape[1],
        NUM_HEADS=dims.num_heads,
        GROUP=dims.group,
        D=dims.main,
        V=dims.value,
        ROWS=FEW_ROWS,
        KEYS=cut.decode_tile.keys // num_warps(cut.decode_tile),
        SOFTCAP=scores.softcap is not None,
        SINKS=scores.sinks is not None,
        CHAINED=cut.chained,
        num_warps=num_warps(cut.decode_tile),
        maxnreg=REGISTERS[dims.main],
        launch_pdl=cut.chained,
    )
