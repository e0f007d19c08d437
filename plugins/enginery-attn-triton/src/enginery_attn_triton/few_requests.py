"""Decoding of few requests on Hopper: which steps `kernels.decode_few` serves, and with how many threads."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Final

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_attn_triton.tiling import SMALL_TILE, LayerCut, keys_of_few

MOST_WARPS: Final = 4
GLUON_VERSIONS: Final = ("3.6.", "3.7.")
"""Of Triton, with which the kernel ran on a GPU: Gluon is experimental, and others' may differ."""
REGISTERS: Final = {64: None, 128: 168, 256: None}
"""Of a thread at the most, so that as many programs run on a multiprocessor as `tiling.FEW_RESIDENT` says."""


@functools.cache
def few_kernels(version: str = triton.__version__) -> Any | None:
    """`kernels.decode_few`, for the `GLUON_VERSIONS` of Triton."""
    return importlib.import_module("enginery_attn_triton.kernels.decode_few") if version.startswith(GLUON_VERSIONS) else None


def num_warps(cut: LayerCut) -> int:
    """Of a program, which all have as many of its keys: `SMALL_TILE` or more."""
    return min(MOST_WARPS, keys_of_few(cut.dims, cut.decode_tile) // SMALL_TILE)


def kernel_of(cut: LayerCut, num_requests: int) -> Any | None:
    """The kernel, on devices of Hopper's that start it early, where it serves such a step."""
    kernels = few_kernels() if 0 < num_requests <= cut.decode.few else None
    return None if kernels is None else kernels.decode_few
