"""Weights of norms, and norms of groups of heads that several ranks may share."""

from __future__ import annotations

import math

import torch

from enginery.contracts.model import ModelContext, WeightSource
from enginery.contracts.ops import NormGate
from enginery.contracts.parallel import Cut
from enginery.nn.reference_ops import opened


def take_norm(weights: WeightSource, name: str, size: int, *, offset: float = 0.0) -> torch.Tensor:
    """`name`.weight, [size]. offset: added to it; 1 for checkpoints that store w of a norm that multiplies by 1 + w."""
    weight = weights.take(f"{name}.weight", (size,))
    return weight + offset if offset and not weight.is_meta else weight  # that sum imports torch._dynamo, for seconds


class GroupedNorm:
    """The gated root-mean-square norm of each of G groups of columns, of whose `size` columns this rank has I.

    A group that lies on one rank is normed there. If ranks have parts of one, its squares are summed over them: a small exchange.
    Heads that several ranks have, as there are more ranks than heads, count once.
    """

    def __init__(
        self, context: ModelContext, weights: WeightSource, name: str, *, size: int, groups: int, unit: int, eps: float
    ) -> None:
        """name: of its module. unit: the dims of a head."""
        own, self.group_size = weights.share(size, unit=unit), size // groups
        self.weight = weights.take(f"{name}.weight", (size,), cut=Cut.ROWS, unit=unit)
        self.piece = math.gcd(len(own), self.group_size)  # columns that lie in one group, wherever this rank's begin
        self.is_cut, self.num_groups, self.eps, self.comm = len(own) % self.group_size > 0, groups, eps, context.comm
        self.gated_group_norm = context.ops.gated_group_norm
        places = [first // self.group_size for first in range(own.start, own.stop, self.piece)]
        self.group_of = torch.tensor(places, device=context.device)  # [I / piece]
        self.pieces = torch.tensor([float(places.count(group)) for group in range(groups)], device=context.device)

    def __call__(self, x: torch.Tensor, gate: torch.Tensor, gating: NormGate, *, gate_first: bool = False) -> torch.Tensor:
        """x, gate: [T, I], each row without gaps. Returns [T, I]: `OpTable.gated_group_norm`."""
        if not self.is_cut:
            groups = (len(x), -1, self.group_size)
            weight = self.weight.view(groups[1:])
            return self.gated_group_norm(x.view(groups), gate.view(groups), weight, self.eps, gating, gate_first).view(x.shape)
        if gate_first:
            return self._normed(x.float() * opened(gate, gating)).to(x.dtype) * self.weight
        return (self._normed(x.float()).to(x.dtype) * self.weight * opened(gate, gating)).to(x.dtype)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] float32 -> the same, normed but for the weight, over the ranks."""
        pieces = x.view(len(x), -1, self.piece)
        means = pieces.square().mean(-1)  # [T, I / piece]
        of_groups = means.new_zeros(len(x), self.num_groups).index_add_(1, self.group_of, means)
        sums, counts = self.comm.sum(torch.cat((of_groups, self.pieces.expand_as(of_groups)), dim=1)).chunk(2, dim=1)
        means = (sums / counts)[:, self.group_of]
        return (pieces * torch.rsqrt(means[..., None] + self.eps)).view_as(x)
