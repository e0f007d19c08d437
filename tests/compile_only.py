"""Triton compiles for a compute capability, 9.0 unless told, and launches nothing, so that a machine without a GPU finds what does
not compile, and what needs more shared memory than a program can have.

The interpreter takes what the compiler refuses: a name that holds another type after a branch, a shape known only when it runs.
Tests `run` scripts that import this too: they call what launches kernels with tensors on the CPU, and results mean nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import compiler as nvidia
from triton.runtime import cache

SHARED_BYTES = 227 << 10  # that a block may have
LESS_SHARED = {80: 163 << 10, 89: 99 << 10}  # the same by capability: of an A100; of GeForces, an L4 and an L40S


def run(script: Path) -> None:
    """In a process of its own without TRITON_INTERPRET, where triton is imported for the compiler."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    made = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert made.returncode == 0, made.stderr


class _Device:
    """In place of the CUDA driver's calls."""

    def __init__(self, shared_bytes: int) -> None:
        self.shared_bytes = shared_bytes

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared_bytes, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 0, 0, 0, 0, 1024


class _NoLaunch:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        pass


class OneCompiler(DriverBase):
    """A driver for `triton.runtime.driver.set_active`."""

    launcher_cls = _NoLaunch

    def __init__(self, capability: int) -> None:
        self.capability, self.utils = capability, _Device(LESS_SHARED.get(capability, SHARED_BYTES))

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0 if self.capability == 90 else self.capability  # Triton keeps what it compiled by it

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is launched")


def install(*, reads_code: bool = False, capability: int = 90) -> None:
    """For the process, or until the next.

    reads_code: the script looks at PTX or registers, so that LLVM has to make them as they will be; without it LLVM optimises
    nothing, which is a third of the time.
    """
    triton.runtime.driver.set_active(OneCompiler(capability))
    if not reads_code:
        nvidia.llvm.OPTIMIZE_O3 = nvidia.llvm.OPTIMIZE_O0
    # Of kernels in Triton's cache: its own is a hash of 0.5 GB, 2 s in each process, and what runs must not find these.
    key = f"{triton.__version__} {'as they run' if reads_code else 'not optimised'}"
    cache.triton_key = lambda: key


def stack_bytes(cubin: bytes) -> int:
    """Of a kernel that is alone there: what is not in registers. To disassemble it takes three hundred times as long."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True)
    (stack,), (local,) = (re.findall(rf"{name}:(\d+)", told.stdout) for name in ("STACK", "LOCAL"))
    return int(stack) + int(local)
