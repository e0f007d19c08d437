"""Acceptance by chance, for benchmarks of draft models without trained weights: whether a guess is right is drawn, not found.

Everything else runs at its full cost. Answers mean nothing. B requests, N rows each: a root and N - 1 drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from enginery.worker.sampling import uniform_on_device

_NO_TOKEN: Final = -2  # nothing is sampled as this
_ROWS, _POSITIONS = 512, 8192  # after which the drawn numbers repeat


class ForcedAcceptance:
    """rates: how often the draft at each place is right, if those before it are; later drafts are always wrong."""

    def __init__(self, rates: Sequence[float], device: torch.device) -> None:
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        rows, positions = (torch.arange(count, device=device) for count in (_ROWS, _POSITIONS))
        self._drawn = uniform_on_device(rows[:, None], positions).float()

    def tokens(self, tokens: torch.Tensor, sampled: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The rows' inputs, each draft replaced by what its row before drew, or by no token. [B, N] int64 each, as the result.

        It follows from the request's row in the batch and the draft's position alone. Runs on the device; nothing is copied.
        """
        count = min(tokens.shape[1] - 1, len(self._rates))
        rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None] % _ROWS
        is_right = self._drawn[rows, positions[:, 1 : 1 + count] % _POSITIONS] < self._rates[:count]
        forced = torch.cat((tokens[:, :1], torch.where(is_right, sampled[:, :count], _NO_TOKEN)), 1)
        return torch.nn.functional.pad(forced, (0, tokens.shape[1] - forced.shape[1]), value=_NO_TOKEN)
