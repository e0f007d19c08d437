"""How much of their weights' blocks kernels have on the way together on devices with less shared memory than Hopper's.

Block sizes are from sweeps on an H200, where a program can have 227 KB. An A100 gives 163, a GeForce or an L4 99. There a block
fewer is on its way, and no result differs.
"""

from __future__ import annotations

from typing import Final

import torch

HOPPER_BYTES: Final = 227 << 10
_SPARE_BYTES: Final = 4 << 10  # for scales, and what threads exchange


def shared_bytes(device: torch.device) -> int:
    """That a program can have. Hopper's where there is no device, as in the interpreter."""
    if device.type != "cuda":
        return HOPPER_BYTES
    most: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined,unused-ignore]
    return most


def fitting_stages(stages: int, block_bytes: int, available: int, *, in_registers: int = 1) -> int:
    """At most so many stages of a pipeline, but two at least. in_registers: how many of its blocks take no shared memory."""
    return max(2, min(stages, (available - _SPARE_BYTES) // block_bytes + in_registers))
