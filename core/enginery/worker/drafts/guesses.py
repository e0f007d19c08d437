"""What a draft model has guessed, on its way to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Guesses(NamedTuple):
    """What a draft model guesses to follow each item that samples.

    tokens: [S, d] on the host, valid after `ready`; None: they are.
    """

    tokens: torch.Tensor
    ready: torch.cuda.Event | None

    def of(self, place: int) -> tuple[int, ...]:
        """Those of one item, when they have come."""
        if self.ready is not None:
            self.ready.synchronize()
        return tuple(self.tokens[place].tolist())
