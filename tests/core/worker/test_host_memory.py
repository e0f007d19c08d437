"""Weights of the host lie in memory that the system may give huge pages to, which goes when the last tensor over it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from enginery.worker.weights.load import HUGE_BYTES, empty_on_host

MAPS = Path("/proc/self/smaps")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a process's memory, and is asked for huge pages")


@pytest.mark.parametrize("shape", [(), (3,), (0, 5), (1000, 2111), (HUGE_BYTES,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_memory_is_contiguous_and_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty_on_host(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (shape, dtype, "cpu")
    assert tensor.is_contiguous()
    assert torch.equal(tensor.fill_(1).float(), torch.ones(shape))


def flags_at(address: int) -> list[str]:
    """Of the mapping that holds it, the kernel's two-letter flags: proc(5). Empty if nothing is mapped there."""
    inside = False
    for line in MAPS.read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return rest
    return []


@on_linux
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages to give")
def test_only_what_is_large_asks_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is small maps nothing. The flags at its place are of the heap, and NumPy may have asked for huge pages there."""
    large = empty_on_host((HUGE_BYTES,), torch.uint8)
    assert "hg" in flags_at(large.data_ptr())
    monkeypatch.delattr("mmap.mmap")
    empty_on_host((HUGE_BYTES - 1,), torch.uint8)


@on_linux
def test_memory_is_given_back_with_the_last_view() -> None:
    tensor = empty_on_host((64 * HUGE_BYTES,), torch.uint8).fill_(1)
    view, middle = tensor[:5], tensor.data_ptr() + 32 * HUGE_BYTES
    del tensor
    assert flags_at(middle)
    del view
    assert not flags_at(middle)
