"""Offsets of more than 32 bits: memory that nobody writes to takes none, so that tensors may be as large as models' are."""

from __future__ import annotations

import mmap

import torch
from triton_devices import NEEDS_INTERPRETER

from enginery_ops_triton.kernels import experts as kernels


@NEEDS_INTERPRETER
def test_the_expert_that_is_expected_may_lie_behind_2_31_values() -> None:
    """As the shared one of Ling-flash-2.0."""
    num_experts, inner, columns = 257, 2, 1 << 21
    values = torch.frombuffer(mmap.mmap(-1, (1 << 31) + num_experts * 2 * inner * columns), dtype=torch.uint8)
    weight = (
        values[1 << 31 :].view(torch.float8_e4m3fn).view(num_experts, 2 * inner, columns)
    )  # below it lies what a sum of 32 bits would read
    weight[-1].view(torch.uint8).fill_(0x38)  # 1.0
    x, out = torch.full((1, columns), 1 / columns), torch.full((1, inner), torch.nan)
    ids = torch.tensor([num_experts - 1], dtype=torch.int32)
    kernels.gate_up_of_pairs[(1, inner, 1)](
        x,
        weight,
        torch.ones(num_experts, 2 * inner, 1),
        weight,
        ids,
        out,
        x.stride(0),
        NUM_EXPERTS=num_experts,
        INNER=inner,
        COLUMNS=columns,
        TOP_K=1,
        JOINED=1,
        BLOCK_N=1,
        BLOCK_K=columns // 4,
        AHEAD=4,
        SCALED=False,
        BIASED=False,
        KIND="silu",
        ALPHA=1.0,
        LIMIT=1.0,
        CHAINED=False,
    )
    torch.testing.assert_close(out, torch.full((1, inner), 0.7310586))  # silu(1)
