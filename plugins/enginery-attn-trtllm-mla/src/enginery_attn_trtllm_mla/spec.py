"""What it can do."""

from __future__ import annotations

from typing import Final

from enginery.api import AttnBackendSpec

NAME: Final = "trtllm-mla"
PAGE_SIZES: Final = frozenset({32, 64})


def make_spec() -> AttnBackendSpec:
    """Behind all others, to be asked for by name, as long as nobody has run its kernel."""
    from enginery_attn_flashinfer_mla.spec import HEADS, blackwell_spec

    return blackwell_spec(
        name=NAME,
        priority=7,
        summary="TensorRT-LLM's MLA decoding for Blackwell cards, FlashInfer for prefills",
        dtypes=frozenset({"bfloat16"}),
        page_sizes=PAGE_SIZES,
        heads=HEADS,
        modules={},
    )
