"""The addresses that the other kernels compute, written out, because no test has 2^31 values of host memory to read."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_attn_triton.kernels.tiles import slots_of


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def addresses(pages: tl.tensor, out: tl.tensor, PAGE_SIZE: tl.constexpr, STRIDE: tl.constexpr) -> None:
    """out: [16] int64, of the first 16 keys of a request with these pages."""
    keys = tl.arange(0, 16)
    tl.store(out + keys, slots_of(keys, pages, keys >= 0, PAGE_SIZE) * STRIDE)
