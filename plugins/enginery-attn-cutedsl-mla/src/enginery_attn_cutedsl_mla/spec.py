"""What it can do."""

from __future__ import annotations

from typing import Final

from enginery.api import AttnBackendSpec

NAME: Final = "cutedsl-mla"
PAGE_SIZES: Final = frozenset({16, 32, 64, 128})  # what divides a tile of 128 keys, but for the smallest


def make_spec() -> AttnBackendSpec:
    """Behind all others, to be asked for by name, as long as nobody has run its kernel."""
    from enginery_attn_flashinfer_mla.spec import DTYPES, blackwell_spec

    return blackwell_spec(
        name=NAME,
        priority=6,
        summary="FlashInfer's CuTe DSL decoding of MLA for Blackwell cards, FlashInfer for prefills",
        dtypes=DTYPES,
        page_sizes=PAGE_SIZES,
        heads=frozenset({128}),
        modules={"cutlass": "nvidia-cutlass-dsl"},
    )
