"""Ranks that take sums within norms, each a process in Triton's interpreter, over memory that they share: `python .. RANKS`.

What each gave is compared with float64, and with the other ranks bit by bit.
"""

from __future__ import annotations

import random
import sys
import time

import torch
import torch.multiprocessing as mp

from enginery.api import PeerMemory
from enginery_ops_triton.kernels import sums
from enginery_ops_triton.sum_norm import NUM_BYTES, SumNorm

CALLS = [  # rows, columns, dtype: in turns of all kinds, so that places are written again soon after they were read
    (3, 64, torch.float32),
    (1, 64, torch.float32),
    (1, 64, torch.float32),
    (1, 64, torch.float32),
    (1, 24, torch.bfloat16),
    (70, 64, torch.float32),
    (3, 64, torch.float32),
    (2, 16384, torch.bfloat16),
    (2, 16384, torch.float32),
    (70, 520, torch.float32),
    (1, 64, torch.float16),
    (9, 64, torch.bfloat16),
    (1, 8192, torch.bfloat16),
    (8, 8192, torch.bfloat16),
    (1, 24, torch.bfloat16),
]
EPS = 1e-5
LATE_S, LATE_PART = 0.02, 0.2
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def given(call: int, num_ranks: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The partial sums of all ranks, the residual and the weight."""
    rows, columns, dtype = CALLS[call]
    torch.manual_seed(call)
    partials = [torch.randn(rows, columns).to(dtype) for _ in range(num_ranks)]
    return partials, torch.randn(rows, columns).to(dtype), torch.randn(columns).to(dtype)


def run(rank: int, parts: tuple[torch.Tensor, ...], results: list[list[torch.Tensor]]) -> None:
    torch.set_num_threads(1)
    if rank:  # the first is far ahead then, and would write where the others still read, if it took the same place in each turn
        rows, often = sums._rows, random.Random(rank)
        sums._rows = lambda *values: time.sleep(LATE_S * (often.random() < LATE_PART)) or rows(*values)
    bound = SumNorm(PeerMemory(rank=rank, parts=parts), dependent_launch=False)
    for call in range(len(CALLS)):
        partials, residual, weight = given(call, len(parts))
        wider = torch.full((len(residual), residual.shape[1] + 16), 7.0, dtype=residual.dtype)
        wider[:, : residual.shape[1]] = residual
        kept = wider[:, : residual.shape[1]]
        assert bound.takes(partials[rank], kept, weight)
        normed = bound(partials[rank], kept, weight, EPS)
        results[call][rank].copy_(torch.stack((kept, normed)))


def main(num_ranks: int) -> None:
    parts = tuple(torch.zeros(NUM_BYTES, dtype=torch.uint8).share_memory_() for _ in range(num_ranks))
    results = [[torch.zeros(2, rows, columns, dtype=dtype).share_memory_() for _ in parts] for rows, columns, dtype in CALLS]
    mp.start_processes(run, (parts, results), nprocs=num_ranks, start_method="fork")  # type: ignore[no-untyped-call]
    for call, found in enumerate(results):
        partials, residual, weight = given(call, num_ranks)
        assert all(torch.equal(each, found[0]) for each in found), f"ranks differ in call {call}"
        summed = residual.double() + sum(partial.double() for partial in partials)
        normed = summed * (summed.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight.double()
        tolerance = TOLERANCES[residual.dtype]
        torch.testing.assert_close(found[0].double(), torch.stack((summed, normed)), atol=tolerance, rtol=tolerance)
    print(f"{num_ranks} ranks agree")


if __name__ == "__main__":
    main(int(sys.argv[1]))
