"""Compiles products whose weights all programs share evenly for compute capability 9.0, without a GPU: Gluon's own compiler."""

from __future__ import annotations

import compile_only
import torch

from enginery_ops_triton.kernels import linear_stream_k
from enginery_ops_triton.stream_k import REGISTERS, SHARED_BYTES, StreamK

ALIGNMENT_BYTES = 4096  # barriers, and where a ring begins


def main() -> None:
    compile_only.install(reads_code=True)
    # A bias and more rows are in more registers, and both types in as many.
    for dtype, biased, sizes in ((torch.bfloat16, True, (1, 32, 64)), (torch.bfloat16, False, (64,)), (torch.float16, True, (64,))):
        weight = torch.zeros(2880, 2880, dtype=dtype)
        product = StreamK(weight, weight[0] if biased else None, kernels=linear_stream_k, programs=128)
        for rows in sizes:
            product(torch.zeros(rows, 2880, dtype=dtype))
    ((made, *_),) = linear_stream_k.linear_stream_k.device_caches.values()
    assert len(made) == 5
    for each in made.values():
        assert each.metadata.shared <= SHARED_BYTES + ALIGNMENT_BYTES
        assert f".maxnreg {REGISTERS}" in each.asm["ptx"]
        assert compile_only.stack_bytes(each.asm["cubin"]) == 0, "sums are in registers"
        first, *others = each.asm["ptx"].split("griddepcontrol.wait")  # of those who multiply, and then of the warp that copies
        assert "st.global" not in first, "nothing is written before earlier kernels have ended"
        copies = [part.count("cp.async.bulk.tensor") for part in others]
        assert copies == [2, 2 + 4, 0], "a unit of W, in two copies, is on its way before x is waited for, and none of x"


if __name__ == "__main__":
    main()
