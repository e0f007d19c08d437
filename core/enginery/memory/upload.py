"""From the host to the device, without waiting for it."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host values on the device. From pinned memory: a copy of other memory waits until the device has done all it was given."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
