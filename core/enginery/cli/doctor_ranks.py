"""What `engine doctor` says of ranks: what several processes or GPUs need, what is missing of it, and what that costs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from enginery.cli.doctor_checks import Check

SHARED_MEMORY: Final = Path("/dev/shm")
_SHARED_BYTES: Final = 1 << 30  # containers have 64 MiB unless told otherwise


def ranks(num_gpus: int, *, gloo: bool, nccl: str, apart: list[list[int]]) -> Iterator[Check]:
    """What only several GPUs need is looked at where there are several. Parameters: see the checks."""
    several = num_gpus > 1
    yield exchange(gloo=gloo, nccl=nccl, several=several)
    yield shared_memory(several=several)
    if several:
        yield peers(apart, num_gpus)


def exchange(*, gloo: bool, nccl: str, several: bool) -> Check:
    """Check the libraries through which ranks exchange tensors, gloo for what is in host memory. nccl: its version, or nothing."""
    if not gloo:
        detail = "torch is built without gloo: --tp and --pp cannot run, one rank is not affected"
        return Check(name="ranks", status="warn", detail=detail, advice="Install a torch that has torch.distributed, as PyPI's.")
    if several and not nccl:
        detail = "gloo, but no NCCL: GPUs cannot exchange tensors, only ranks on CPUs can"
        return Check(name="ranks", status="warn", detail=detail, advice="Install a torch for CUDA, as PyPI's for Linux.")
    return Check(
        name="ranks", status="ok", detail="gloo, for ranks on CPUs" + (f"; NCCL {nccl}, for ranks on GPUs" if nccl else "")
    )


def shared_memory(*, several: bool) -> Check:
    """Check the folder through which NCCL of several processes exchanges what goes over the host."""
    if not SHARED_MEMORY.is_dir():
        detail, free_bytes = f"there is no {SHARED_MEMORY}", 0
    else:
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
        detail = f"{SHARED_MEMORY}, {free_bytes / 2**20:,.0f} MiB free"
    if not several or free_bytes >= _SHARED_BYTES:
        return Check(name="shared memory", status="ok", detail=detail)
    cost = "; NCCL needs some for each pair of GPUs, and without it the start of ranks on GPUs fails"
    advice = "Give the container more: docker run --shm-size=8g, or an emptyDir with medium Memory at /dev/shm."
    return Check(name="shared memory", status="warn", detail=detail + cost, advice=advice)


def peers(apart: list[list[int]], count: int) -> Check:
    """Check that GPUs reach each other's memory. apart: pairs that do not."""
    if not apart:
        return Check(name="peers", status="ok", detail=f"each of {count} GPUs reads the memory of the others")
    pairs = ", ".join(f"{first} and {second}" for first, second in apart)
    detail = (
        f"GPUs {pairs} cannot read each other's memory: sums of their ranks go over the host, which takes several times as long"
    )
    advice = "See nvidia-smi topo -p2p r. Virtual machines need it passed through; on bare metal, IOMMU or ACS often prevents it."
    return Check(name="peers", status="warn", detail=detail, advice=advice)
