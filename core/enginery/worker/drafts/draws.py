"""How a draft model's guesses are chosen: from its logits as the target's token will be, with the same random number.

A guess counts if it is the token that the target draws at its position (`enginery.speculate.acceptance`). Where two models say
much the same, draws with one uniform number mostly agree, also where the likeliest token is seldom drawn (arXiv:2408.07978). What a
guess is chosen by changes no token. Penalties, biases and grammars are the target's alone.

S items, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from enginery.contracts.ops import LEAST_TEMPERATURE, OpTable, SamplingTensors
from enginery.contracts.step import SamplingInput
from enginery.kv.upload import to_device
from enginery.worker.sampling import most_kept, uniform_on_device

Together = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]


class GuessDraws:
    """Of the items of one step. rows: [S], the first sampled row of each. sampling: of the rows; None: all take the best token.

    is_random: whether one is drawn. together: where ranks have some columns each; given these, and how this rank would choose from
    all of them, [S, V] -> [S], it gives what all ranks take.
    """

    def __init__(
        self,
        sampling: SamplingInput | None,
        rows: np.ndarray,
        *,
        ops: OpTable,
        device: torch.device,
        together: Together | None = None,
    ) -> None:
        params = np.zeros((4, len(rows))) if sampling is None else sampling.params[:, rows]
        self._params, self._ops, self._together = params, ops, together
        self.is_random = sampling is not None and bool((params[0] >= LEAST_TEMPERATURE).any())
        if sampling is not None and self.is_random:
            self._table = to_device(torch.from_numpy(params.astype(np.float32)), device)
            self._seeds = to_device(torch.from_numpy(sampling.seeds[rows].view(np.int64)), device)

    def choose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A token of each row of [S, V], for the position that it would have, [S] int64. Nothing waits for the device."""
        if self._together is not None:
            return self._together(logits, lambda whole: self._choose(whole, positions))
        return self._choose(logits, positions)

    def _choose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if not self.is_random:
            return self._ops.greedy(logits)
        kept, cut = most_kept(self._params, logits.shape[-1])
        numbers = uniform_on_device(self._seeds, positions).float()
        draws = SamplingTensors(table=torch.cat((self._table, numbers[None])), most_kept=kept, cut=cut)
        return self._ops.sample_rows(logits, draws).clamp(0, logits.shape[-1] - 1)
