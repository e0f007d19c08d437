"""Compiles products of float8 parts in the blocks that are chosen, for Hopper: on its matrix units, and in registers."""

from __future__ import annotations

import compile_only
import torch
from less_shared_memory import COLUMNS, INNER, TOP_K, stored

from enginery.api import Routed
from enginery_ops_triton import experts
from enginery_ops_triton.kernels import experts_float8


def main() -> None:
    compile_only.install(reads_code=True)
    for dtype in (torch.bfloat16, torch.float16):
        bound = experts.Experts(stored(2 * INNER, COLUMNS), stored(COLUMNS, INNER), dependent_launch=True)
        for num_tokens in (20, 60, 100):  # tiles of 16, 32 and 64 pairs
            ids = torch.zeros(num_tokens, TOP_K, dtype=torch.int32)
            bound(torch.zeros(num_tokens, COLUMNS, dtype=dtype), Routed(ids, torch.ones(num_tokens, TOP_K)))
    for kernel in (experts_float8.gate_up_of_parts, experts_float8.down_of_parts):
        made = [compiled for cache, *_ in kernel.device_caches.values() for compiled in cache.values()]
        assert len(made) == 6, len(made)
        for compiled in made:
            assert "wgmma" in compiled.asm["ptx"]
            assert ".e4m3.e4m3" in compiled.asm["ptx"]
            assert compile_only.stack_bytes(compiled.asm["cubin"]) == 0, "all of it is in registers"


if __name__ == "__main__":
    main()
