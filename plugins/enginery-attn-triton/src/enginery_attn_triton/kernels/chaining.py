"""Programmatic dependent launch: a kernel starts while the one before it still runs.

Each kernel that is launched so lets its successor start at once, and waits for its predecessor before it reads what that wrote or
writes what that may read. At least one program of each waits, so a kernel may rely on all that was launched before it.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from enginery_attn_triton.kernels.tiles import inlined


@inlined  # type: ignore[untyped-decorator,unused-ignore]
def release_successor(CHAINED: tl.constexpr) -> None:
    """Let the next kernel start."""
    if CHAINED:
        gdc_launch_dependents()


@inlined  # type: ignore[untyped-decorator,unused-ignore]
def wait_for_predecessor(CHAINED: tl.constexpr) -> None:
    """Go on when all earlier kernels are done."""
    if CHAINED:
        gdc_wait()
