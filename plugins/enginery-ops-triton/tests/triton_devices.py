"""The devices of tests of kernels: a CPU, whose interpreter runs them, and a CUDA device, for which they are compiled."""

from __future__ import annotations

import pytest
import torch

from enginery_ops_triton.kernels.precision import INTERPRETED

NEEDS_INTERPRETER = pytest.mark.skipif(not INTERPRETED.value, reason="triton was imported for the compiler in this process")
DEVICES = [pytest.param("cpu", marks=NEEDS_INTERPRETER), pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def chained(device: str) -> bool:
    """Whether a kernel there may begin before the one in front of it has ended."""
    return device == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
