"""Compiles the sums within norms for compute capability 9.0, without a GPU: the interpreter takes what the compiler does not."""

from __future__ import annotations

import compile_only
import torch

from enginery.api import PeerMemory
from enginery_ops_triton.sum_norm import NUM_BYTES, SumNorm

CALLS = [(1, 4096), (8, 8192), (64, 4096), (256, 8192)]


def main() -> None:
    compile_only.install()
    for num_ranks in (2, 3):
        parts = tuple(torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(num_ranks))
        bound = SumNorm(PeerMemory(rank=1, parts=parts), dependent_launch=True)
        for dtype in (torch.bfloat16, torch.float32):
            for rows, columns in CALLS:
                x, weight = torch.zeros(rows, columns, dtype=dtype), torch.ones(columns, dtype=dtype)
                bound(x, x.clone(), weight, 1e-5)
    print("compiled")


if __name__ == "__main__":
    main()
