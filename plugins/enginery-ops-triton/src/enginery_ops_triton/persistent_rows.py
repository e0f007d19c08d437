"""Linear layers for up to 8 rows by one program a multiprocessor, which stays for all of its outputs."""

from __future__ import annotations

from types import ModuleType
from typing import Final

import torch

from enginery_ops_triton.gluon_kernels import hopper_kernels

PERSISTENT_ROWS: Final = 8
LEAST_OUTPUTS: Final = 1024
LEAST_COLUMNS, MOST_COLUMNS = 1024, 5376
"""Of more columns, x does not fit into registers."""
LEAST_BESIDE_DIRECT, WHOLE = 2560, 512
"""Outputs and columns from which on, and multiples of which, it is faster where direct products are able, too: dense models of 3B
to 14B. gpt-oss-120b, which has 2,880, is 3 % slower by it with 4 and 8 streams."""
BLOCK_N, BLOCK_K, NUM_WARPS, AHEAD = 16, 64, 8, 9
"""A ring of ten blocks of 16 KB: with more, the kernels behind it find no room to start early; with six, two programs share a
multiprocessor, and a layer takes up to a third longer."""


def serves_few(outputs: int, columns: int, *, is_direct: bool) -> bool:
    """Whether this is faster than others for 2 to 8 rows, from docs/benchmarks/kernels-persistent.json.

    is_direct: whether direct products are able. What counts is a layer: beside direct products of so many numbers, one of these is
    slower than either are by themselves.
    """
    if outputs < LEAST_OUTPUTS or not LEAST_COLUMNS <= columns <= MOST_COLUMNS or columns % 8:
        return False
    return not is_direct or (min(outputs, columns) >= LEAST_BESIDE_DIRECT and outputs % WHOLE == columns % WHOLE == 0)


def bind_persistent(
    weight: torch.Tensor, bias: torch.Tensor | None, *, is_direct: bool, multiprocessors: int
) -> PersistentRows | None:
    """None: it is not faster, or cannot be: on other devices than Hopper's, and with other versions of Triton."""
    if weight.stride(0) % 16 or weight.data_ptr() % 16 or not serves_few(*weight.shape, is_direct=is_direct):
        return None
    kernels = hopper_kernels("linear_persistent", weight)
    return PersistentRows(weight, bias, kernels=kernels, programs=multiprocessors) if kernels else None


class PersistentRows:
    """For up to PERSISTENT_ROWS rows, in bfloat16 or float16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, kernels: ModuleType, programs: int) -> None:
        """weight [out, in]: at a multiple of 16 bytes, and its rows of 32. kernels: `kernels.linear_persistent`."""
        self.weight, self.bias, self.kernels = weight, bias, kernels
        self.programs = min(programs, -(-weight.shape[0] // BLOCK_N))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        weight, num_rows = self.weight, x.shape[0]
        outputs, columns = weight.shape
        out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
        self.kernels.persistent_linear[(self.programs,)](
            x,
            weight,
            weight if self.bias is None else self.bias,
            out,
            num_rows,
            x.stride(0),
            weight.stride(0),
            outputs,
            COLUMNS=columns,
            ROWS=PERSISTENT_ROWS,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            AHEAD=AHEAD,
            PROGRAMS=self.programs,
            BIAS=self.bias is not None,
            CHAINED=True,
            num_warps=NUM_WARPS,
            maxnreg=128 if columns <= 4096 else 168,  # of which x has 64, or up to 88
            launch_pdl=True,
        )
        return out
