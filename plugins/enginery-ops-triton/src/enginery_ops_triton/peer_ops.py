"""What kernels of several ranks do together, as the core calls it: what is taken, by which kernel, and where it lies.

    a part    [ end | sent | turns | flags | words of few rows, twice | best: turns | words, twice | blocks | rows sent, twice ]

N rows, C columns, R ranks, V vocabulary.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from enginery.api import LinearFn, PeerMemory
from enginery_ops_triton import sent_rows
from enginery_ops_triton.kernels import best_of_ranks, sums
from enginery_ops_triton.kernels.launch import next_power_of_2, rounded_up
from enginery_ops_triton.sampling import best_of_each_block
from enginery_ops_triton.sent_rows import MOST_ROW_BYTES, EarlyProduct, SentRows
from enginery_ops_triton.small_linear import Product

MOST_RANKS: Final = 16
FEW_BYTES: Final = 512 << 10  # of rows that each of more ranks sends to all, each word with its turn; docs/benchmarks/gpu_ranks.py
FEW_ROW_BYTES: Final = 16 << 10
FEW_SLOTS: Final = 64  # programs times ranks
MOST_BEST_ROWS: Final = 1024
_TURNS: Final = 64  # words; the first is not 0 at the end
_PROGRAMS: Final = 512  # that have turns and flags
_FLAGS: Final = _TURNS + _PROGRAMS
_WORDS: Final = 4 * (_FLAGS + _PROGRAMS * MOST_RANKS)
_SLOT_WORDS: Final = FEW_ROW_BYTES // 4  # of 8 bytes, 4 of them a row's
_BEST_TURNS: Final = _WORDS + 2 * FEW_SLOTS * 8 * _SLOT_WORDS
_BEST_WORDS: Final = _BEST_TURNS + 4 * MOST_BEST_ROWS
_BLOCKS: Final = _BEST_WORDS + 2 * MOST_BEST_ROWS * MOST_RANKS * 16
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class Blocks(NamedTuple):
    """Of rows that go to other ranks at once.

    size: bytes of one, if its rows are not longer. most_programs: two on a multiprocessor, as each waits most of the time. ahead:
    how many a program has on their way before it waits for the first. most_warps: of a program.
    """

    size: int = 16 << 10
    most_programs: int = 256
    ahead: int = 1
    most_warps: int = 16

    @property
    def places(self) -> int:
        """Of each program: what `kernels.sums` tells, and a power of 2, as turns overflow."""
        return next_power_of_2(2 * self.ahead + 2)

    @property
    def part_bytes(self) -> int:
        """What a part has in all. More than two ranks have half of a place for shares, half for sums."""
        return _BLOCKS + self.most_programs * self.places * MOST_ROW_BYTES


BLOCKS_OF_MORE: Final = Blocks(most_warps=8)  # of more than two ranks: they have more registers each
NUM_BYTES: Final = max(Blocks().part_bytes, BLOCKS_OF_MORE.part_bytes)  # and `sent_rows.PART_BYTES` of two ranks


def bind_peer_ops(memory: PeerMemory, *, dependent_launch_from: tuple[int, int]) -> TritonPeerOps:
    """dependent_launch_from: the compute capability that has it."""
    device = memory.parts[memory.rank].device
    chained = device.type == "cuda" and torch.cuda.get_device_capability(device) >= dependent_launch_from
    return TritonPeerOps(memory, dependent_launch=chained)


class TritonPeerOps:
    """Implements `PeerOps` and `EarlySums`."""

    def __init__(
        self, memory: PeerMemory, *, dependent_launch: bool, few_bytes: int = FEW_BYTES, blocks: Blocks | None = None
    ) -> None:
        """memory: of `blocks.part_bytes`. few_bytes: up to which more than two ranks send their rows to all."""
        blocks = blocks or (Blocks() if len(memory.parts) == 2 else BLOCKS_OF_MORE)
        assert 1 < blocks.most_programs <= _PROGRAMS
        assert blocks.size <= MOST_ROW_BYTES
        assert memory.parts[0].nbytes >= blocks.part_bytes
        self._memory, self._dependent_launch, self._few_bytes, self._blocks = memory, dependent_launch, few_bytes, blocks
        own, begin = memory.parts[memory.rank], blocks.part_bytes
        self._sent: SentRows | None = None
        if len(memory.parts) == 2 and own.nbytes >= begin + sent_rows.PART_BYTES:
            self._sent = SentRows(memory, begin=begin, dependent_launch=dependent_launch)
        self._addresses = torch.tensor([part.data_ptr() for part in memory.parts], dtype=torch.int64, device=own.device)
        self._over = own[:4].view(torch.int32)
        self._is_over, self._beside = torch.ones(1, dtype=torch.int32), None
        if own.device.type == "cuda":
            self._is_over, self._beside = self._is_over.pin_memory(), torch.cuda.Stream(own.device)  # type: ignore[no-untyped-call]

    def summed_early(self, product: LinearFn, columns: int) -> LinearFn:
        """Of two ranks, and of many rows."""
        return EarlyProduct(product, columns, self._sent) if self._sent and isinstance(product, Product) else product

    def takes_sum(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        """Any number of rows, of up to 32 KiB, of a type that is the residual's too."""
        if partial.dim() != 2 or residual.dim() != 2 or weight.dim() != 1 or len(self._memory.parts) > MOST_RANKS:
            return False
        row_bytes = partial.shape[1] * partial.element_size()
        alike = partial.dtype == residual.dtype and partial.dtype in _DTYPES and partial.stride(1) == residual.stride(1) == 1
        return alike and len(partial) > 0 and 0 < row_bytes <= MOST_ROW_BYTES and row_bytes % 16 == 0

    def add_rms_norm(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[N, C] -> [N, C]."""
        if self._sent is not None and (normed := self._sent.add_rms_norm(partial, residual, weight, eps)) is not None:
            return normed
        num_rows, columns = partial.shape
        out = torch.empty((num_rows, columns), dtype=torch.promote_types(residual.dtype, weight.dtype), device=partial.device)
        given = (partial, residual, weight.contiguous(), out, self._addresses)
        columns_block, num_ranks, size = next_power_of_2(columns), len(self._memory.parts), partial.element_size()
        strides = (partial.stride(0), residual.stride(0))
        alike: dict[str, object] = {
            "RANK": self._memory.rank,
            "COLUMNS": columns,
            "TURNS": _TURNS,
            "CHAINED": self._dependent_launch,
            "launch_pdl": self._dependent_launch,
        }
        if num_ranks > 2 and self._are_few(num_rows, columns * size):
            sums.sum_norm_few[(num_rows,)](
                *given,
                *strides,
                eps,
                RANKS=num_ranks,
                BLOCK_RANKS=next_power_of_2(num_ranks),
                BLOCK=columns_block * size // 4,
                PACKED=4 // size,
                SLOTS=FEW_SLOTS,
                REGION=_SLOT_WORDS,
                WORDS=_WORDS,
                num_warps=_warps(columns_block, 16),
                **alike,
            )
            return out
        blocks = self._blocks
        share = rounded_up(-(-columns // num_ranks), 16 // size)  # of a row; the last rank's may be smaller
        widest = max(columns, (num_ranks - 1) * share) * size
        each = min(next_power_of_2(-(-num_rows // blocks.most_programs)), _power_of_2_within(blocks.size // widest))
        num_blocks, room = -(-num_rows // each), blocks.part_bytes - _BLOCKS
        alike |= {
            "BLOCK": columns_block,
            "EACH": each,
            "AHEAD": blocks.ahead,
            "PLACES": blocks.places,
            "FLAGS": _FLAGS,
            "num_warps": _warps(each * columns_block, blocks.most_warps),
        }
        if num_ranks == 2:
            programs = min(num_blocks, blocks.most_programs)
            sums.sum_norm_of_two[(programs,)](
                *given, num_rows, *strides, eps, PLACE=MOST_ROW_BYTES // size, BLOCKS=_BLOCKS, **alike
            )
            return out
        fit = room // 2 // (blocks.places * each * widest)
        sums.sum_norm[(min(num_blocks, blocks.most_programs, fit),)](
            *given,
            num_rows,
            *strides,
            eps,
            RANKS=num_ranks,
            BLOCK_RANKS=next_power_of_2(num_ranks),
            SHARE=share,
            BLOCK_SHARE=next_power_of_2(share),
            SHARES=_BLOCKS,
            SUMS=_BLOCKS + room // 2,
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


def _warps(count: int, most: int) -> int:
    """Of a program that has so many numbers at once: up to 16 for each thread, or more for each of those of the most warps."""
    return min(max(count // 512, 1), most)


def _power_of_2_within(count: int) -> int:
    """The largest that is not larger; of 0 it is 1."""
    return 1 << max(count, 1).bit_length() - 1
