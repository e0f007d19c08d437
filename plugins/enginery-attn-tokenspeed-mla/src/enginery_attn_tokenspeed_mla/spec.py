"""What it can do."""

from __future__ import annotations

from typing import Final

from enginery.api import AttnBackendSpec

NAME: Final = "tokenspeed-mla"
PAGE_SIZES: Final = frozenset({32, 64})


def make_spec() -> AttnBackendSpec:
    """Behind all others, to be asked for by name, as long as nobody has run its kernel."""
    from enginery_attn_flashinfer_mla.spec import DTYPES, HEADS, blackwell_spec

    return blackwell_spec(
        name=NAME,
        priority=5,
        summary="TokenSpeed's decoding of MLA for Blackwell cards, FlashInfer for prefills",
        dtypes=DTYPES,
        page_sizes=PAGE_SIZES,
        heads=HEADS,
        modules={"tokenspeed_mla": "tokenspeed-mla"},
    )
