"""The collectives of one rank: each is the identity, or plain torch."""

from __future__ import annotations

import torch

from enginery.contracts.ops import OpTable
from enginery.contracts.weights import Linear


class SingleRank:
    """Implements `enginery.contracts.parallel.Collectives` where there is nobody to exchange with."""

    def __init__(self, ops: OpTable) -> None:
        self._ops = ops

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def all_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def own_rows_sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, of_all_lanes: bool = False
    ) -> torch.Tensor:
        return self._ops.add_rms_norm(partial, residual, weight, eps)

    def summed_early(self, linear: Linear) -> Linear:
        return linear

    def gather_columns(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def best(self, partial: torch.Tensor) -> torch.Tensor:
        return self._ops.greedy(partial)
