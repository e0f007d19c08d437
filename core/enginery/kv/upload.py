"""From the host to the device, without waiting for it."""

from __future__ import annotations

import torch


def pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host values where a CUDA device copies them from: a copy of other memory waits until it has done all it was given."""
    return values.pin_memory() if device.type == "cuda" else values


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return pinned(values, device).to(device, non_blocking=True)


def recorded(*, is_cuda: bool) -> torch.cuda.Event | None:
    """What the device is to have done by then; None where there is nothing to wait for."""
    if not is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
