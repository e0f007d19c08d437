"""Sums over ranks within the norm behind them, as the core calls them: what is taken, in one shot or two, and where it lies.

    a part    [ end | turns | flags of both meetings | rows, twice | sums ]

N rows, C columns, R ranks.
"""

from __future__ import annotations

from typing import Final

import torch

from enginery.api import PeerMemory
from enginery_ops_triton.kernels import sums
from enginery_ops_triton.kernels.launch import next_power_of_2

MOST_PROGRAMS: Final = 64  # fewer than multiprocessors: all run at once
MOST_RANKS: Final = 16
REGION_BYTES: Final = 64 << 10  # of a program's rows
ONE_SHOT_BYTES: Final = 64 << 10  # above, each rank reads a share of the others' numbers, not all; docs/benchmarks/gpu_ranks.py
MOST_COLUMNS: Final = 16384
_TURNS: Final = 64  # words; the first is not 0 at the end
_FLAGS: Final = _TURNS + MOST_PROGRAMS
_ROWS: Final = 4 * (_FLAGS + 2 * MOST_PROGRAMS * MOST_RANKS)
_SUMS: Final = _ROWS + 2 * MOST_PROGRAMS * REGION_BYTES
NUM_BYTES: Final = _SUMS + MOST_PROGRAMS * REGION_BYTES
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def bind_sum_norm(memory: PeerMemory, *, dependent_launch_from: tuple[int, int]) -> SumNorm:
    """dependent_launch_from: the compute capability that has it."""
    device = memory.parts[memory.rank].device
    chained = device.type == "cuda" and torch.cuda.get_device_capability(device) >= dependent_launch_from
    return SumNorm(memory, dependent_launch=chained)


class SumNorm:
    """Implements `SumNormFn`."""

    def __init__(self, memory: PeerMemory, *, dependent_launch: bool) -> None:
        """memory: of `NUM_BYTES`."""
        self._memory, self._dependent_launch = memory, dependent_launch
        own = memory.parts[memory.rank]
        self._addresses = torch.tensor([part.data_ptr() for part in memory.parts], dtype=torch.int64, device=own.device)
        self._over = own[:4].view(torch.int32)
        self._is_over, self._beside = torch.ones(1, dtype=torch.int32), None
        if own.device.type == "cuda":
            self._is_over, self._beside = self._is_over.pin_memory(), torch.cuda.Stream(own.device)  # type: ignore[no-untyped-call]

    def takes(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        """Rows of up to 4 MiB in all, 64 KiB for each program, of a type that is the residual's too."""
        if partial.dim() != 2 or residual.dim() != 2 or weight.dim() != 1 or len(self._memory.parts) > MOST_RANKS:
            return False
        num_rows, columns = partial.shape
        alike = partial.dtype == residual.dtype and partial.dtype in _DTYPES and partial.stride(1) == residual.stride(1) == 1
        each = -(-num_rows // MOST_PROGRAMS) * columns * partial.element_size()
        return alike and 0 < each <= REGION_BYTES and columns <= MOST_COLUMNS and columns * partial.element_size() % 16 == 0

    def __call__(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[N, C] -> [N, C]."""
        num_rows, columns = partial.shape
        num_ranks, size = len(self._memory.parts), partial.element_size()
        out = torch.empty((num_rows, columns), dtype=torch.promote_types(residual.dtype, weight.dtype), device=partial.device)
        block = next_power_of_2(columns)
        share = 0 if num_rows * columns * size <= ONE_SHOT_BYTES else _rounded(-(-columns // num_ranks), 16 // size)
        sums.sum_norm[(min(num_rows, MOST_PROGRAMS),)](
            partial,
            residual,
            weight.contiguous(),
            out,
            self._addresses,
            num_rows,
            partial.stride(0),
            residual.stride(0),
            eps,
            RANK=self._memory.rank,
            RANKS=num_ranks,
            COLUMNS=columns,
            BLOCK=block,
            EACH=next_power_of_2(-(-num_rows // MOST_PROGRAMS)),
            SHARE=share,
            BLOCK_SHARE=next_power_of_2(max(share, 1)),
            MOST_PROGRAMS=MOST_PROGRAMS,
            REGION=REGION_BYTES // size,
            TURNS=_TURNS,
            FLAGS=_FLAGS,
            ROWS=_ROWS,
            SUMS=_SUMS,
            CHAINED=self._dependent_launch,
            num_warps=min(max(block // 512, 1), 16),
            launch_pdl=self._dependent_launch,
        )
        return out

    def end(self) -> None:
        """Past everything that the device still has to do: it may be what waits."""
        if self._beside is None:
            self._over.copy_(self._is_over)
            return
        with torch.cuda.stream(self._beside):
            self._over.copy_(self._is_over, non_blocking=True)


def _rounded(count: int, unit: int) -> int:
    """Up to a multiple of the unit."""
    return -(-count // unit) * unit
