"""Partial sums of two ranks whose rows leave for the other one while more of them are computed.

    this stream    product of piece 0 | 1      | 2      | 3      | as each piece arrives: added up, added to the residual, normed
    beside it                          sends 0 | sends 1 | sends 2 | sends 3

Copy engines send them, so products have all multiprocessors. The flag that follows a piece has the number of its turn. Sums have
one of two places by turns: what leaves for a place a second time does so behind a product here, which is behind all pieces of the
sum between, and the other rank sent those when it had read that place. A sum that nobody takes is waited for before the next one.

N rows, C columns.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from enginery.api import PeerMemory
from enginery_ops_triton.kernels import sums
from enginery_ops_triton.kernels.launch import next_power_of_2, rounded_up
from enginery_ops_triton.small_linear import Product

FLAG: Final = 1  # a word of a part
PIECES: Final = 4
LEAST_BYTES: Final = 64 << 20  # of a sum; smaller ones were not measured
MOST_BYTES: Final = 256 << 20
MOST_ROW_BYTES: Final = 32 << 10  # of all sums, these and others
PART_BYTES: Final = 2 * MOST_BYTES
_PIECE_ROWS: Final = 128  # multiples of it, as products have tiles
_BLOCK: Final = 8192  # numbers of a program


class Sent(NamedTuple):
    """A sum whose pieces leave: of which product's result, the place where the other rank's arrive, and the turn of the first."""

    product: EarlyProduct
    partial: weakref.ref[torch.Tensor]
    place: int
    piece_rows: int
    first_turn: int


class SentRows:
    """Begins sums and takes them, in the same order on both ranks."""

    def __init__(
        self,
        memory: PeerMemory,
        *,
        begin: int,
        dependent_launch: bool,
        least_bytes: int = LEAST_BYTES,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """begin: where the two places are in a part, in bytes, each of `most_bytes`."""
        own, other = memory.parts[memory.rank], memory.parts[1 - memory.rank]
        self._own, self._flag = own[: 4 * (FLAG + 1)].view(torch.int32), other[: 4 * (FLAG + 1)].view(torch.uint32)
        places = (begin, begin + most_bytes)
        self._arriving = [own[place:][:most_bytes] for place in places]
        self._leaving = [other[place:][:most_bytes] for place in places]
        self._least_bytes, self._most_bytes, self._dependent_launch = least_bytes, most_bytes, dependent_launch
        self._turn, self._num_sums = 0, 0
        self._sent: Sent | None = None
        self._beside: torch.cuda.Stream | None = None
        self._computed: tuple[torch.cuda.Event, ...] = ()  # each piece; the last is sent
        if own.device.type == "cuda":
            self._beside = torch.cuda.Stream(own.device)  # type: ignore[no-untyped-call]
            self._computed = tuple(torch.cuda.Event() for _ in range(PIECES + 1))  # type: ignore[no-untyped-call]

    def begin(self, product: EarlyProduct, x: torch.Tensor) -> torch.Tensor | None:
        """The product of x [N, in], [N, C], whose rows are on their way. None: it is not for so many rows, or in a graph."""
        num_rows, columns = len(x), product.columns
        row_bytes = columns * x.element_size()
        fits = row_bytes % 16 == 0 and row_bytes <= MOST_ROW_BYTES and self._least_bytes <= num_rows * row_bytes <= self._most_bytes
        if not fits or x.dim() != 2:
            return None
        if self._beside is not None and torch.cuda.is_current_stream_capturing():
            return None
        if self._sent is not None:
            self._sent.product.is_taken = False
            self._await()
        out = torch.empty((num_rows, columns), dtype=x.dtype, device=x.device)
        place, first_turn, piece_rows = self._num_sums % 2, self._turn + 1, rounded_up(-(-num_rows // PIECES), _PIECE_ROWS)
        there = self._leaving[place][: out.nbytes].view(out.dtype).view(out.shape)
        for piece, first in enumerate(range(0, num_rows, piece_rows)):
            rows = slice(first, first + piece_rows)
            product.product.into(x[rows], out[rows])
            self._turn += 1
            self._send(out[rows], there[rows], piece)
        self._num_sums += 1
        self._sent = Sent(product, weakref.ref(out), place, piece_rows, first_turn)
        return out

    def add_rms_norm(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        """[N, C] -> [N, C]. None: this is not the sum that was begun last, or its residual is of another type."""
        sent = self._sent
        if sent is None or sent.partial() is not partial or residual.dtype != partial.dtype or residual.stride(1) != 1:
            return None
        self._sent = None
        num_rows, columns = partial.shape
        out = torch.empty((num_rows, columns), dtype=torch.promote_types(residual.dtype, weight.dtype), device=partial.device)
        block = next_power_of_2(columns)
        each = max(_BLOCK // block, 1)
        sums.sum_norm_of_sent[(-(-num_rows // each),)](
            partial,
            residual,
            weight.contiguous(),
            out,
            self._arriving[sent.place][: partial.nbytes].view(partial.dtype),
            self._own,
            num_rows,
            sent.piece_rows,
            partial.stride(0),
            residual.stride(0),
            eps,
            _signed(sent.first_turn),
            COLUMNS=columns,
            BLOCK=block,
            EACH=each,
            FLAG=FLAG,
            CHAINED=self._dependent_launch,
            num_warps=8,
            launch_pdl=self._dependent_launch,
        )
        if self._beside is not None:  # `partial` may be gone then
            torch.cuda.current_stream(partial.device).wait_event(self._computed[PIECES])
        return out

    def _send(self, rows: torch.Tensor, there: torch.Tensor, piece: int) -> None:
        """To the other rank, as the turn that was counted last."""
        if self._beside is None:
            there.copy_(rows)
            self._flag[FLAG] = self._turn % 2**32
            return
        computed = self._computed[piece]
        computed.record()
        self._beside.wait_event(computed)
        with torch.cuda.stream(self._beside):
            there.copy_(rows, non_blocking=True)
            torch.ops.symm_mem.stream_write_value32_(self._flag, FLAG, self._turn % 2**32)  # behind a fence
            self._computed[PIECES].record()

    def _await(self) -> None:
        """All that the other rank sends up to the turn that was counted last."""
        sums.await_sent[(1,)](
            self._own,
            _signed(self._turn),
            FLAG=FLAG,
            CHAINED=self._dependent_launch,
            num_warps=1,
            launch_pdl=self._dependent_launch,
        )


@dataclass(eq=False)
class EarlyProduct:
    """Implements `LinearFn`: begins sums of many rows, until one of them was begun in vain.

    That of the last layer's attention is, where few of its rows are wanted; and that of a stage's last MLP, added up in the next.
    """

    product: Product
    columns: int
    sent: SentRows
    is_taken: bool = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        begun = self.sent.begin(self, x) if self.is_taken else None
        return self.product(x) if begun is None else begun


def _signed(turn: int) -> int:
    """As an int32, which overflows as the flag does."""
    return (turn + 2**31) % 2**32 - 2**31
