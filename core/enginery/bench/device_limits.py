"""Times on a device: by events on CUDA, by the clock on a CPU; and what the device does at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F

from enginery.bench.floor import DeviceLimits
from enginery.kv.pool import TORCH_DTYPES

# By device: bytes of what is copied, more than any cache holds; rows of a square matrix; seconds for each of the three.
_SIZES: Final = {"cuda": (2 << 30, 8192, 0.3), "cpu": (128 << 20, 768, 0.1)}


def run_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, on the device's own clock."""
    if device.type == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000


def several_s(run: Callable[[], object], device: torch.device, *, budget_s: float) -> list[float]:
    """Seconds of each run. Runs until they took `budget_s` together, three times at least, after one run that does not count."""
    run()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < budget_s:
        taken.append(run_s(run, device))
    return taken


def measure_limits(device: torch.device, dtype: str) -> DeviceLimits:
    """Measure copies and sums that no cache holds, and a matrix product. Takes a second, and 4 GiB of a CUDA device.

    Some CPUs have no instructions for `dtype`; what widens it computes as fast as float32 there, so that is the limit.
    """
    num_bytes, side, budget_s = _SIZES[device.type]
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_s = min(several_s(lambda: target.copy_(source), device, budget_s=budget_s))
    read_s = min(several_s(lambda: torch.sum(source), device, budget_s=budget_s))
    pairs = [[torch.randn(side, side, device=device, dtype=TORCH_DTYPES[dtype]) for _ in range(2)]]
    if device.type == "cpu":
        pairs.append([each.float() for each in pairs[0]])
    product_s = min(min(several_s(partial(F.linear, *pair), device, budget_s=budget_s)) for pair in pairs)
    return DeviceLimits(
        copy_bytes_per_s=2 * num_bytes / copy_s,
        read_bytes_per_s=num_bytes / read_s,
        product_flop_per_s=2 * side**3 / product_s,
        dtype=dtype,
    )


def device_name(device: torch.device) -> str:
    """The device's name for people. It also tells one machine's reports from another's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model}, {torch.get_num_threads()} threads"
