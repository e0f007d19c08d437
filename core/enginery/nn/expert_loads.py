"""How many rows the experts of each rank are given, where a rank has some of them whole: counted on the device, in some steps.

Every rank knows what is routed where, so the one that tells it counts for all. R ranks, K experts of a token, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import torch

from enginery.contracts.engine import ExpertCounts

_EVERY: Final = 16  # calls of a layer are counted: half a dozen small operations, each of tens of microseconds behind weights


class ExpertLoads:
    """The counts of all layers since the start. Rows that pad a step count too: they are computed as the others are."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self._num_ranks = num_ranks
        self._counts = torch.zeros(num_ranks + 1, dtype=torch.int64, device=device)  # the last: of the busiest in each call
        is_here = device.type == "cpu"
        self._told = self._counts if is_here else torch.zeros(num_ranks + 1, dtype=torch.int64, pin_memory=True)

    def of_layer(self, starts: Sequence[int]) -> Callable[[torch.Tensor], None]:
        """What a layer calls with the ids of its routed experts, [T, K]. starts: the first expert of each rank, and their number.

        What a captured graph does again is not counted.
        """
        ends = torch.tensor(starts[1:], device=self._counts.device)
        calls = itertools.count()

        def note(ids: torch.Tensor) -> None:
            if next(calls) % _EVERY or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
                return
            ranks = torch.bucketize(ids.flatten(), ends, right=True)  # R: none of them, as of an expert that only pads
            own = self._counts.new_zeros(self._num_ranks + 1).scatter_add_(0, ranks, torch.ones_like(ranks))[:-1]
            self._counts.add_(torch.cat((own, own.amax(0, keepdim=True))))
            if self._told is not self._counts:
                self._told.copy_(self._counts, non_blocking=True)

        return note

    def read(self) -> ExpertCounts:
        """As far as they have come to the host: waits for no device."""
        *by_rank, busiest = self._told.tolist()
        return ExpertCounts(by_rank=tuple(by_rank), busiest=busiest)
