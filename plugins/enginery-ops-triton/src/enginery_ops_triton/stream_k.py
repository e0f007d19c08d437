"""Linear layers for up to 64 rows on Hopper, whose weights all programs share evenly."""

from __future__ import annotations

from types import ModuleType
from typing import Final

import torch
import torch.nn.functional as F

from enginery_ops_triton.gluon_kernels import hopper_kernels
from enginery_ops_triton.kernels.launch import next_power_of_2
from enginery_ops_triton.persistent_rows import LEAST_BESIDE_DIRECT, MOST_COLUMNS, PERSISTENT_ROWS

BLOCK_N, BLOCK_K = 64, 128
FEWEST_ROWS, MOST_ROWS = 16, 64
LEAST_NUMBERS: Final = 1 << 24
"""Weights of fewer are read by so many programs only if their tiles come out even."""
SHARED_BYTES, REGISTERS = 160 << 10, 128
"""Of a program's ring of units, and of a thread: with more, the kernels behind it find no room to start early."""


def num_stages(rows: int) -> int:
    """Units of a ring, with so many rows of x."""
    return SHARED_BYTES // ((BLOCK_N + rows) * BLOCK_K * 2)


def num_programs(multiprocessors: int) -> int:
    """One on each, but for a few: of 132 multiprocessors, 128 read faster, and most weights come out even."""
    even = multiprocessors // 16 * 16
    return even if multiprocessors - even <= multiprocessors // 16 else multiprocessors


def serves(outputs: int, columns: int, rows: int, *, programs: int) -> bool:
    """Whether this is faster than others for up to so many rows, from docs/benchmarks/kernels-stream-k.json.

    For up to 8 rows it is where x has too many columns for `PersistentRows`, beside which it is as fast as these are.
    Of 28,672 outputs and 8,192 columns an H200 reads 1 to 2 % slower by it, an H100 5 to 7 % faster.
    """
    tiles = -(-outputs // BLOCK_N)
    is_even = tiles % programs == 0 or programs % (tiles % programs) == 0  # programs share no tile, or each a part of one alone
    if columns % 8 or columns < 2048 or rows > MOST_ROWS:
        return False
    if rows <= PERSISTENT_ROWS:
        return columns > MOST_COLUMNS and outputs >= LEAST_BESIDE_DIRECT and outputs * columns >= LEAST_NUMBERS
    if rows > 32:
        return is_even and outputs * columns >= 2 * LEAST_NUMBERS
    return outputs * columns >= LEAST_NUMBERS or (is_even and tiles * 4 >= programs)


def bind_stream_k(weight: torch.Tensor, bias: torch.Tensor | None, *, multiprocessors: int) -> StreamK | None:
    """None: it is not faster, or cannot be: on other devices than Hopper's, and with other versions of Triton."""
    outputs, columns = weight.shape
    programs = num_programs(multiprocessors)
    if weight.stride(0) % 8 or weight.data_ptr() % 16 or not serves(outputs, columns, FEWEST_ROWS, programs=programs):
        return None
    kernels = hopper_kernels("linear_stream_k", weight)
    return StreamK(weight, bias, kernels=kernels, programs=programs) if kernels else None


class StreamK:
    """For up to 64 rows, in bfloat16 or float16. Owns the counters of its tiles, so one stream may run it at a time."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, kernels: ModuleType, programs: int) -> None:
        """weight [out, in]: at a multiple of 16 bytes, as its rows are. kernels: `kernels.linear_stream_k`."""
        self.weight, self.bias, self.kernels, self.programs = weight, bias, kernels, programs
        self.blocks = kernels.blocks_of(weight, BLOCK_N, BLOCK_K)
        self.arrived = torch.zeros(-(-weight.shape[0] // BLOCK_N), dtype=torch.int32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]. By torch where x does not begin, or its rows are not apart by, multiples of 16 bytes."""
        if x.stride(0) % 8 or x.data_ptr() % 16:
            return F.linear(x, self.weight, self.bias)
        outputs, columns = self.weight.shape
        rows = max(FEWEST_ROWS, next_power_of_2(x.shape[0]))
        out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
        partial = torch.empty((self.programs, 2, rows, BLOCK_N), dtype=torch.float32, device=x.device)
        self.kernels.linear_stream_k[(self.programs,)](
            self.kernels.blocks_of(x, rows, BLOCK_K),
            self.blocks,
            self.weight if self.bias is None else self.bias,
            out,
            partial,
            self.arrived,
            x.shape[0],
            outputs,
            columns,
            STAGES=num_stages(rows),
            BIAS=self.bias is not None,
            CHAINED=True,
            num_warps=4,
            maxnreg=REGISTERS,
            launch_pdl=True,
        )
        return out
