"""The compiled kernels, if they were built when this package was installed.

How they are built and called, so that a plugin of another kind can do the same:

- `setup.py` has an optional extension with Python's limited API: no compiler, no extension, and the package installs all the same.
  It takes addresses and sizes, no tensors, so a build works with every torch. A call costs 0.1 us, by ctypes it would be 1 to 3.
- `native/isa_*.cpp` compile one text, `body.inc`, for an instruction set each; the module takes the best that the CPU has when it
  is imported. `ENGINERY_CPU_ISA` (avx512_bf16, avx512, avx2, generic) narrows that, for tests.
- Threads are those of torch's OpenMP runtime, whose functions `native/threads.h` finds by name. That is why torch comes first here.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch  # noqa: F401  (loads the OpenMP runtime)


def _import() -> tuple[ModuleType | None, str]:
    try:
        from enginery_ops_cpu import _kernels  # type: ignore[attr-defined]
    except ImportError as error:
        if os.environ.get("ENGINERY_CPU_ISA"):  # whoever names a set wants these kernels
            raise
        return None, str(error)
    return _kernels, ""


KERNELS, WHY_NOT = _import()
