"""What kernels of several ranks do together, as the core calls it: what is taken, by which kernel, and where it lies.

    a part    [ end | turns | flags of both meetings | rows | sums | blocks, four times | words of few rows, twice |
                best: turns | words, twice ]

N rows, C columns, R ranks, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch

from enginery.api import PeerMemory
from enginery_ops_triton.kernels import best_of_ranks, sums
from enginery_ops_triton.kernels.launch import next_power_of_2
from enginery_ops_triton.sampling import best_of_each_block

MOST_PROGRAMS: Final = 128  # fewer than multiprocessors: all run at once
MOST_RANKS: Final = 16
REGION_BYTES: Final = 32 << 10  # of a program's rows
BLOCK_BYTES: Final = 16 << 10  # of rows that go to the other of two ranks at once, if they are not longer
MOST_OF_TWO: Final = 256  # programs: two on a multiprocessor, as each waits most of the time
FEW_BYTES: Final = 512 << 10  # of rows that each of more ranks sends to all, each word with its turn; docs/benchmarks/gpu_ranks.py
FEW_ROW_BYTES: Final = 16 << 10
FEW_SLOTS: Final = 64  # programs times ranks
MOST_COLUMNS: Final = 16384
MOST_BEST_ROWS: Final = 1024
_TURNS: Final = 64  # words; the first is not 0 at the end
_FLAGS: Final = _TURNS + MOST_OF_TWO
_ROWS: Final = 4 * (_FLAGS + 2 * MOST_PROGRAMS * MOST_RANKS)
_SUMS: Final = _ROWS + MOST_PROGRAMS * REGION_BYTES
_BLOCKS: Final = _SUMS + MOST_PROGRAMS * REGION_BYTES
_WORDS: Final = _BLOCKS + MOST_OF_TWO * 4 * BLOCK_BYTES
_SLOT_WORDS: Final = FEW_ROW_BYTES // 4  # of 8 bytes, 4 of them a row's
_BEST_TURNS: Final = _WORDS + 2 * FEW_SLOTS * 8 * _SLOT_WORDS
_BEST_WORDS: Final = _BEST_TURNS + 4 * MOST_BEST_ROWS
NUM_BYTES: Final = _BEST_WORDS + 2 * MOST_BEST_ROWS * MOST_RANKS * 16
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def bind_peer_ops(memory: PeerMemory, *, dependent_launch_from: tuple[int, int]) -> TritonPeerOps:
    """dependent_launch_from: the compute capability that has it."""
    device = memory.parts[memory.rank].device
    chained = device.type == "cuda" and torch.cuda.get_device_capability(device) >= dependent_launch_from
    return TritonPeerOps(memory, dependent_launch=chained)


class TritonPeerOps:
    """Implements `PeerOps`."""

    def __init__(self, memory: PeerMemory, *, dependent_launch: bool, few_bytes: int = FEW_BYTES) -> None:
        """memory: of `NUM_BYTES`. few_bytes: up to which more than two ranks send their rows to all."""
        self._memory, self._dependent_launch, self._few_bytes = memory, dependent_launch, few_bytes
        own = memory.parts[memory.rank]
        self._addresses = torch.tensor([part.data_ptr() for part in memory.parts], dtype=torch.int64, device=own.device)
        self._over = own[:4].view(torch.int32)
        self._is_over, self._beside = torch.ones(1, dtype=torch.int32), None
        if own.device.type == "cuda":
            self._is_over, self._beside = self._is_over.pin_memory(), torch.cuda.Stream(own.device)  # type: ignore[no-untyped-call]

    def takes_sum(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        """Rows of a type that is the residual's too: of two ranks any number, else up to 4 MiB in all, 32 KiB for each program."""
        num_ranks = len(self._memory.parts)
        if partial.dim() != 2 or residual.dim() != 2 or weight.dim() != 1 or num_ranks > MOST_RANKS:
            return False
        num_rows, columns = partial.shape
        size = partial.element_size()
        alike = partial.dtype == residual.dtype and partial.dtype in _DTYPES and partial.stride(1) == residual.stride(1) == 1
        each = -(-num_rows // MOST_PROGRAMS) * num_ranks * self._share(columns, size) * size
        fits = num_rows > 0 if num_ranks == 2 else 0 < each <= REGION_BYTES
        return alike and fits and 0 < columns <= MOST_COLUMNS and columns * size % 16 == 0

    def add_rms_norm(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[N, C] -> [N, C]."""
        num_rows, columns = partial.shape
        out = torch.empty((num_rows, columns), dtype=torch.promote_types(residual.dtype, weight.dtype), device=partial.device)
        given = (partial, residual, weight.contiguous(), out, self._addresses)
        block, num_ranks, size = next_power_of_2(columns), len(self._memory.parts), partial.element_size()
        strides = (partial.stride(0), residual.stride(0))
        alike: dict[str, object] = {
            "RANK": self._memory.rank,
            "COLUMNS": columns,
            "TURNS": _TURNS,
            "CHAINED": self._dependent_launch,
            "launch_pdl": self._dependent_launch,
        }
        if num_ranks == 2:
            each = min(next_power_of_2(-(-num_rows // MOST_OF_TWO)), _power_of_2_within(BLOCK_BYTES // (columns * size)))
            fit = (_WORDS - _BLOCKS) // (4 * each * columns * size)
            sums.sum_norm_of_two[(min(-(-num_rows // each), fit, MOST_OF_TWO),)](
                *given,
                num_rows,
                *strides,
                eps,
                BLOCK=block,
                EACH=each,
                FLAGS=_FLAGS,
                BLOCKS=_BLOCKS,
                num_warps=_warps(each * block),
                **alike,
            )
        elif self._are_few(num_rows, columns * size):
            sums.sum_norm_few[(num_rows,)](
                *given,
                *strides,
                eps,
                RANKS=num_ranks,
                BLOCK_RANKS=next_power_of_2(num_ranks),
                BLOCK=block * size // 4,
                PACKED=4 // size,
                SLOTS=FEW_SLOTS,
                REGION=_SLOT_WORDS,
                WORDS=_WORDS,
                num_warps=_warps(block),
                **alike,
            )
        else:
            share, each = self._share(columns, size), next_power_of_2(-(-num_rows // MOST_PROGRAMS))
            sums.sum_norm[(min(num_rows, MOST_PROGRAMS),)](
                *given,
                num_rows,
                *strides,
                eps,
                RANKS=num_ranks,
                BLOCK=block,
                EACH=each,
                SHARE=share,
                BLOCK_SHARE=next_power_of_2(share),
                MOST_PROGRAMS=MOST_PROGRAMS,
                REGION=REGION_BYTES // size,
                FLAGS=_FLAGS,
                ROWS=_ROWS,
                SUMS=_SUMS,
                num_warps=_warps(each * block),
                **alike,
            )
        return out

    def takes_best(self, columns: torch.Tensor) -> bool:
        """As many rows as have places for their words."""
        return 0 < len(columns) <= MOST_BEST_ROWS and len(self._memory.parts) <= MOST_RANKS

    def best(self, columns: torch.Tensor, first: int) -> torch.Tensor:
        """[N, V / R] -> [N] int64."""
        num_rows, num_ranks = len(columns), len(self._memory.parts)
        values, indices = best_of_each_block(columns, dependent_launch=self._dependent_launch)
        tokens = torch.empty(num_rows, dtype=torch.int64, device=columns.device)
        best_of_ranks.best_of_ranks[(num_rows,)](
            columns,
            values,
            indices,
            tokens,
            self._addresses,
            columns.stride(0),
            values.shape[1],
            first,
            COLUMNS=columns.shape[1],
            BLOCK=next_power_of_2(values.shape[1]),
            RANK=self._memory.rank,
            RANKS=num_ranks,
            BLOCK_RANKS=next_power_of_2(num_ranks),
            MOST_ROWS=MOST_BEST_ROWS,
            TURNS=_BEST_TURNS // 4,
            WORDS=_BEST_WORDS,
            CHAINED=self._dependent_launch,
            num_warps=1,
            launch_pdl=self._dependent_launch,
        )
        return tokens

    def _share(self, columns: int, size: int) -> int:
        """Of a row, which one rank adds up: in multiples of 16 bytes, so the last rank's may be smaller."""
        return _rounded(-(-columns // len(self._memory.parts)), 16 // size)

    def _are_few(self, num_rows: int, row_bytes: int) -> bool:
        """Whether they are sent to all ranks."""
        fits = row_bytes <= FEW_ROW_BYTES and num_rows * len(self._memory.parts) <= FEW_SLOTS
        return fits and num_rows * row_bytes <= self._few_bytes

    def end(self) -> None:
        """Past everything that the device still has to do: it may be what waits."""
        if self._beside is None:
            self._over.copy_(self._is_over)
            return
        with torch.cuda.stream(self._beside):
            self._over.copy_(self._is_over, non_blocking=True)


def _warps(count: int) -> int:
    """Of a program that has so many numbers at once: up to 16 for each thread, or more for each of 512."""
    return min(max(count // 512, 1), 16)


def _power_of_2_within(count: int) -> int:
    """The largest that is not larger; of 0 it is 1."""
    return 1 << max(count, 1).bit_length() - 1


def _rounded(count: int, unit: int) -> int:
    """Up to a multiple of the unit."""
    return -(-count // unit) * unit
