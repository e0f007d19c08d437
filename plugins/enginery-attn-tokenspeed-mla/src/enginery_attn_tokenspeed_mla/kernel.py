"""`tokenspeed_mla_decode` of the package tokenspeed-mla, version 2.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from enginery.api import BackendContext
from enginery_attn_flashinfer_mla.blackwell import MAX_MULTIPROCESSORS, CuteDecode, latent_of

TILE: Final = 128  # rows of a tile, of which fewer heads fill a part


def load_kernel(context: BackendContext) -> CuteDecode:
    """It is compiled when it is first launched."""
    from tokenspeed_mla import tokenspeed_mla_decode  # type: ignore[import-not-found]

    return make_kernel(context, tokenspeed_mla_decode)


def make_kernel(context: BackendContext, decode: Callable[..., object]) -> CuteDecode:
    """decode: TokenSpeed's function."""
    return CuteDecode(decode, latent_of(context), max_rows=MAX_MULTIPROCESSORS * TILE, enable_pdl=True)
