"""FlashInfer's `cute_dsl_mla_decode`, version 0.6.11."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from enginery.api import BackendContext
from enginery_attn_flashinfer_mla.blackwell import MAX_MULTIPROCESSORS, CuteDecode, latent_of

NUM_HEADS: Final = 128
MAX_SPLITS: Final = MAX_MULTIPROCESSORS // 2  # of all requests together


def load_kernel(context: BackendContext) -> CuteDecode:
    """It is compiled when it is first launched, which takes seconds."""
    from flashinfer.cute_dsl.attention import cute_dsl_mla_decode

    return make_kernel(context, cute_dsl_mla_decode)


def make_kernel(context: BackendContext, decode: Callable[..., object]) -> CuteDecode:
    """decode: FlashInfer's function."""
    return CuteDecode(decode, latent_of(context), max_rows=MAX_SPLITS * NUM_HEADS)
