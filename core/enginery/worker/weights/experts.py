"""Experts as a rank has them, bound to kernels: a part of each, or some of them whole.

E experts, I an expert's inner size, C columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from enginery.contracts.ops import ExpertBiases
from enginery.contracts.weights import Experts, ExpertsShape, Scheme, StoredWeight
from enginery.nn.moe import BoundExperts, JoinedExperts, OwnExperts
from enginery.worker.weights.matrices import Matrices
from enginery.worker.weights.shares import Range, share
from enginery.worker.weights.store import Piece, Slice


@dataclass(frozen=True)
class ExpertStacks:
    """The experts of one layer. own: those that this rank has whole; all of them where it has a part of each."""

    matrices: Matrices
    prefix: str
    shape: ExpertsShape
    own: range

    def bind(self) -> Experts:
        """What they give, with several ranks a partial sum. Raises `Unsupported` for sizes that the ranks cannot share."""
        shape, stays = self.shape, self._kept()
        inner = self._inner(stays)
        count = len(self.own) + shape.joined
        gate_up = _by_expert(self.matrices.stack(self._gate_rows(inner), stays=stays), count)
        down = _by_expert(self.matrices.stack(self._down_columns(inner), stays=stays), count)
        if isinstance(gate_up, torch.Tensor):
            gate_up = _apart(gate_up, shape)
        else:  # where rows take turns each has scales of its own
            gate_up = replace(gate_up, values=_apart(gate_up.values, shape), scales=_apart(gate_up.scales, shape))
        experts = self.matrices.setting.ops.bind_experts(gate_up, down, shape, self._biases(inner))
        if self._has_some:
            loads = self.matrices.setting.loads
            note = None if loads is None else loads.of_layer(self._starts())
            return BoundExperts(OwnExperts(experts, self.own, note), None)
        if not shape.joined or isinstance(gate_up, StoredWeight) or isinstance(down, StoredWeight):
            return BoundExperts(experts, None)
        joined = JoinedExperts(gate_up[shape.count :], down[shape.count :], shape.activation, self.matrices.setting.ops)
        return BoundExperts(experts, joined)

    @property
    def _has_some(self) -> bool:
        """Whether other ranks have the others."""
        return len(self.own) < self.shape.count

    def _starts(self) -> list[int]:
        """The first expert of each rank, and how many there are."""
        parallel, what = self.matrices.setting.parallel, f"{self.prefix}experts"
        ranks = [replace(parallel, tensor_rank=rank) for rank in range(parallel.tensor_size)]
        starts = [share(self.shape.count, unit=1, parallel=each, what=what, uneven=True)[0] for each in ranks]
        return [*starts, self.shape.count]

    def _kept(self) -> Scheme | None:
        """The scheme in which experts stay in memory: kernels take it, and no block has rows of both gate and up."""
        shape = self.shape
        scheme = self.matrices.common_scheme(_modules(shape, self.prefix))
        if scheme is None or scheme not in self.matrices.setting.kept.get("bind_experts", ()):
            return None
        rows = scheme.block[0] or shape.inner
        return None if shape.inner % rows or (shape.order == "interleaved" and rows > 1) else scheme

    def _inner(self, stays: Scheme | None) -> Range:
        """What this rank has of each expert's inner values. stays: the scheme of which no block is cut."""
        shape = self.shape
        if self._has_some:
            assert not shape.joined, "an MLP that every token has is of all ranks, not of the one that has some experts"
            return 0, shape.inner
        unit = 1 if stays is None else math.lcm(*(size or 1 for size in stays.block))
        what = f"the inner size of {self.prefix}experts, which --ep does not divide"
        return share(shape.inner, unit=unit, parallel=self.matrices.setting.parallel, what=what, uneven=unit > 1)

    def _gates(self, inner: Range) -> list[tuple[str, int, Range]]:
        """The modules of an expert with rows of gate, then of up, or of both by turns: name, all rows, this rank's."""
        names, size, (start, length) = self.shape.names, self.shape.inner, inner
        if self.shape.order == "interleaved":
            return [(names.gate, 2 * size, (2 * start, 2 * length))]
        return [(names.gate, size, inner), (names.up, size, inner)]

    def _gate_rows(self, inner: Range) -> list[Slice]:
        shape, (start, length), columns = self.shape, inner, (0, self.shape.hidden)
        slices = [
            self.matrices.matrix(f"{self.prefix}experts.{expert}.{name}", (rows, shape.hidden), own, columns, turned=shape.turned)
            for expert in self.own
            for name, rows, own in self._gates(inner)
        ]
        modules = [f"{self.prefix}{shape.names.shared}.{name}" for name in ("gate_proj", "up_proj")]
        whole, starts = (shape.joined * shape.inner, shape.hidden), [place * shape.inner + start for place in range(shape.joined)]
        return slices + [self.matrices.matrix(module, whole, (at, length), columns) for at in starts for module in modules]

    def _down_columns(self, inner: Range) -> list[Slice]:
        shape, rows = self.shape, (0, self.shape.hidden)
        names = [f"{self.prefix}experts.{expert}.{shape.names.down}" for expert in self.own]
        slices = [self.matrices.matrix(name, (shape.hidden, shape.inner), rows, inner, turned=shape.turned) for name in names]
        module, whole = f"{self.prefix}{shape.names.shared}.down_proj", (shape.hidden, shape.joined * shape.inner)
        starts = [place * shape.inner + inner[0] for place in range(shape.joined)]
        return slices + [self.matrices.matrix(module, whole, rows, (start, inner[1])) for start in starts]

    def _biases(self, inner: Range) -> ExpertBiases | None:
        shape, store = self.shape, self.matrices.store
        if not shape.bias:
            return None
        assert not shape.joined, "an MLP that is cut into experts has no biases"
        stems = [f"{self.prefix}experts.{expert}." for expert in self.own]
        gates = [_vector(f"{stem}{name}.bias", rows, own) for stem in stems for name, rows, own in self._gates(inner)]
        downs = [_vector(f"{stem}{shape.names.down}.bias", shape.hidden, (0, shape.hidden)) for stem in stems]
        count = len(self.own)
        gate_up = _apart(store.tensor(Piece(tuple(gates), store.dtype)).view(count, -1), shape)
        down = store.tensor(Piece(tuple(downs), store.dtype)).view(count, -1)
        if not self._has_some and self.matrices.setting.parallel.tensor_rank > 0:
            down = torch.zeros_like(down)  # the first rank adds it, once
        return ExpertBiases(gate_up, down)


def _modules(shape: ExpertsShape, prefix: str) -> list[str]:
    names = shape.names
    own = (names.gate, names.down) if shape.order == "interleaved" else (names.gate, names.up, names.down)
    modules = [f"{prefix}experts.{expert}.{name}" for expert in range(shape.count) for name in own]
    return modules + ([f"{prefix}{names.shared}.{name}_proj" for name in ("gate", "up", "down")] if shape.joined else [])


def _vector(name: str, whole: int, part: Range) -> Slice:
    return Slice(name=name, whole=(whole,), starts=(part[0],), shape=(part[1],))


def _by_expert(stack: torch.Tensor | StoredWeight, count: int) -> torch.Tensor | StoredWeight:
    """[E * rows, C] -> [E, rows, C]."""
    if isinstance(stack, torch.Tensor):
        return stack.view(count, -1, stack.shape[-1])
    values, scales = (part.view(count, -1, part.shape[-1]) for part in (stack.values, stack.scales))
    return replace(stack, values=values, scales=scales)


def _apart(gate_up: torch.Tensor, shape: ExpertsShape) -> torch.Tensor:
    """[E, 2I, ..] with gates before ups."""
    if shape.order == "halves":
        return gate_up
    count, rows, *rest = gate_up.shape
    return gate_up.view(count, rows // 2, 2, *rest).transpose(1, 2).reshape(count, rows, *rest)
