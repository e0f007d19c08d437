"""Compiles what ranks do together for compute capability 9.0, without a GPU: the interpreter takes what the compiler does not.

Nobody looks at what tensors hold, so they are empty: hundreds of MiB that no page is fetched for.
"""

from __future__ import annotations

import compile_only
import torch

from enginery.api import PeerMemory
from enginery_ops_triton.peer_ops import NUM_BYTES, TritonPeerOps
from enginery_ops_triton.sent_rows import PART_BYTES
from enginery_ops_triton.small_linear import Product

# Where the number of rows is an argument, it is a constant if it is 1. Of bfloat16, more ranks send the rows of the first call as
# few; of float32 those of the second are too long for that.
CALLS = {torch.bfloat16: [(1, 4096), (16384, 4096)], torch.float32: [(8, 4096), (1, 8192)]}
RANKS = (2, 3)  # how many more there are is only a number to the kernels, which is known


class NoProduct(Product):
    """Whose numbers nobody looks at either, and torch would compute them."""

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None: ...


def take_early(bound: TritonPeerOps, dtype: torch.dtype) -> None:
    """A sum that nobody takes, and one that is taken."""
    x, product = torch.empty(8192, 16, dtype=dtype), NoProduct(torch.empty(4096, 16, dtype=dtype), None, {})
    for _ in range(2):
        partial = bound.summed_early(product, 4096)(x)
    bound.add_rms_norm(partial, torch.zeros_like(partial), torch.ones(4096, dtype=dtype), 1e-5)


def main() -> None:
    compile_only.install()
    for num_ranks in RANKS:
        parts = tuple(torch.empty(NUM_BYTES + PART_BYTES, dtype=torch.uint8) for _ in range(num_ranks))
        bound = TritonPeerOps(PeerMemory(rank=1, parts=parts), dependent_launch=True)
        for dtype, calls in CALLS.items():
            for rows, columns in calls:
                x, weight = torch.empty(rows, columns, dtype=dtype), torch.empty(columns, dtype=dtype)
                bound.add_rms_norm(x, torch.empty_like(x), weight, 1e-5)
            if num_ranks == 2:
                take_early(bound, dtype)
            else:
                bound.best(torch.zeros(3, 64_128, dtype=dtype), 64_128)
    bound.best(torch.zeros(3, 0, dtype=dtype), 128_256)


if __name__ == "__main__":
    main()
