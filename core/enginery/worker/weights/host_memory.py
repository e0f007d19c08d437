"""Memory of the host for weights, in huge pages where the system has them.

A step reads all weights once. A page of 4 KiB takes a look into the page tables, and there the processor's own fetching ahead ends:
with pages of 2 MiB a product of one row takes a tenth less time (docs/log.md, 2026-11-24).
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import torch

HUGE_BYTES: Final = 2 << 20


def empty_on_host(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As `torch.empty`. What is large is mapped by itself and given back when the tensor goes; neighbours share huge pages."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if sys.platform != "linux" or num_bytes < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
