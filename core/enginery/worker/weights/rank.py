"""What a rank's model is given for what it asks: its part of each product, bound to kernels.

    model          linear(LinearShape)     experts(ExpertsShape)     take(name, shape)
    here           which rows, which columns, from which tensors of the checkpoint, plain or stored
    store          tensors for pieces: recorded first, then loaded

R ranks, E experts, I an expert's inner size, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from enginery.contracts.ops import ExpertBiases, LinearFn
from enginery.contracts.parallel import Cut
from enginery.contracts.weights import Experts, ExpertsShape, Linear, LinearPart, LinearShape, Scheme, StoredWeight
from enginery.nn.moe import BoundExperts, JoinedExperts
from enginery.worker.weights.matrices import Matrices, Range, merged
from enginery.worker.weights.pieces import Piece, Slice


class BoundLinear:
    """Implements `enginery.contracts.weights.Linear`. complete: sums over ranks."""

    def __init__(self, product: LinearFn, rows: tuple[int, ...], complete: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        self.rows = rows
        self._product = product
        self._complete = complete

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, columns of this rank] -> [N, sum of rows]."""
        out = self._product(x)
        return out if self._complete is None else self._complete(out)


@dataclass(frozen=True)
class RankWeights:
    """Implements `enginery.contracts.model.WeightSource` over a store of pieces."""

    matrices: Matrices
    prefix: str = ""

    def scope(self, prefix: str) -> RankWeights:
        """A view with longer names onto the same store."""
        return replace(self, prefix=f"{self.prefix}{prefix}.")

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        cut: Cut = Cut.NONE,
        unit: int | tuple[int, ...] = 1,
        parts: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """This rank's part of one tensor."""
        whole = tuple(shape)
        sizes, dtype = parts or whole[:1], dtype or self.matrices.store.dtype
        units = unit if isinstance(unit, tuple) else (unit,) * len(sizes)
        slices = self.matrices.slices(self.prefix + name, whole, dtype, cut=cut, parts=tuple(zip(sizes, units, strict=True)))
        return self.matrices.store.tensor(Piece(slices, dtype))

    def share(self, size: int, *, unit: int = 1) -> range:
        """A range, which may be another rank's too."""
        start, length = self.matrices.share(size, unit=unit, what=f"what {self.prefix.removesuffix('.')} computes", repeats=True)
        return range(start, start + length)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has it, by its name below the prefix."""
        return self.matrices.store.has(self.prefix + name)

    def linear(self, shape: LinearShape) -> Linear:
        """Bind this rank's part of a product."""
        setting, parts = self.matrices.setting, shape.parts
        ranges = [self._rows(part, padded=shape.padded) for part in parts]
        lengths = self._lengths(shape, ranges)
        weight, bias = self._product_weight(shape, ranges), self._bias(shape, ranges)
        if isinstance(weight, torch.Tensor):
            weight = _placed(weight, parts, lengths)
        is_partial = parts[0].cut is Cut.COLUMNS and setting.parallel.tensor_size > 1
        if bias is not None:
            bias = None if is_partial and setting.parallel.tensor_rank else _placed(bias, parts, lengths)  # one rank adds it
        product = setting.ops.bind_linear(weight, bias)
        return BoundLinear(product, lengths, setting.comm.sum if is_partial and shape.complete else None)

    def experts(self, shape: ExpertsShape) -> Experts:
        """Bind this rank's columns of every expert: partial sums where there are several ranks."""
        stays = self._kept_experts(shape)
        unit = 1 if stays is None else math.lcm(*(size or 1 for size in stays.block))
        what = f"the inner size of {self.prefix}experts"
        inner = self.matrices.share_blocks(shape.inner, block=unit, what=what)
        count = shape.count + shape.joined
        gate_up = _by_expert(self.matrices.stack(self._gate_rows(shape, inner), stays=stays), count)
        down = _by_expert(self.matrices.stack(self._down_columns(shape, inner), stays=stays), count)
        if isinstance(gate_up, torch.Tensor):
            gate_up = _apart(gate_up, shape)
        else:  # where rows take turns each has scales of its own
            gate_up = replace(gate_up, values=_apart(gate_up.values, shape), scales=_apart(gate_up.scales, shape))
        experts = self.matrices.setting.ops.bind_experts(gate_up, down, shape, self._expert_biases(shape, inner))
        if not shape.joined or isinstance(gate_up, StoredWeight) or isinstance(down, StoredWeight):
            return BoundExperts(experts, None)
        joined = JoinedExperts(gate_up[shape.count :], down[shape.count :], shape.activation, self.matrices.setting.ops)
        return BoundExperts(experts, joined)

    def _lengths(self, shape: LinearShape, ranges: Sequence[Range]) -> tuple[int, ...]:
        """Rows of each part on this rank, those that pad with them."""
        if not shape.padded:
            return tuple(length for _, length in ranges)
        return tuple(-(-part.rows // self.matrices.setting.parallel.tensor_size) for part in shape.parts)

    def _columns(self, shape: LinearShape) -> Range:
        if shape.parts[0].cut is not Cut.COLUMNS:
            return 0, shape.columns
        what = f"the input of {self.prefix}{shape.names[0]}"
        return self.matrices.share(shape.columns, unit=shape.parts[0].unit, what=what, repeats=False)

    def _rows(self, part: LinearPart, *, padded: bool) -> Range:
        """Of the part, not of the matrix that it may be packed in."""
        if part.cut is not Cut.ROWS:
            return 0, part.rows
        parallel = self.matrices.setting.parallel
        if padded:
            most = -(-part.rows // parallel.tensor_size)
            start = min(parallel.tensor_rank * most, part.rows)
            return start, min(most, part.rows - start)
        return self.matrices.share(part.rows, unit=part.unit, what=f"the output of {self.prefix}{part.name}", repeats=True)

    def _kept_experts(self, shape: ExpertsShape) -> Scheme | None:
        """The scheme in which experts stay in memory: kernels take it, and no block has rows of both gate and up."""
        scheme = self.matrices.common_scheme(_expert_modules(shape, self.prefix))
        if scheme is None or scheme not in self.matrices.setting.kept.get("bind_experts", ()):
            return None
        rows = scheme.block[0] or shape.inner
        return None if shape.inner % rows or (shape.order == "interleaved" and rows > 1) else scheme

    def _product_weight(self, shape: LinearShape, ranges: Sequence[Range]) -> torch.Tensor | StoredWeight:
        """[sum of rows, columns]; only plain numbers are padded or put in another order."""
        modules, columns = [self.prefix + part.name for part in shape.parts], self._columns(shape)
        places = [(part.first_row + start, length) for part, (start, length) in zip(shape.parts, ranges, strict=True)]
        whole = {module: (part.packed_rows, shape.columns) for module, part in zip(modules, shape.parts, strict=True)}
        joined = merged(list(zip(modules, places, strict=True)))
        slices = [self.matrices.matrix(module, whole[module], rows, columns) for module, rows in joined]
        scheme = self.matrices.common_scheme(modules)
        moved = shape.padded or any(part.order is not None for part in shape.parts)
        stays = not moved and scheme in self.matrices.setting.kept.get("bind_linear", ())
        return self.matrices.stack(slices, stays=scheme if stays else None)

    def _bias(self, shape: LinearShape, ranges: Sequence[Range]) -> torch.Tensor | None:
        """[sum of rows], zeros for parts that have none."""
        with_bias = [part.bias for part in shape.parts]
        if not any(with_bias):
            return None
        slices = []
        for part, (start, length) in zip(shape.parts, ranges, strict=True):
            if part.bias:
                name = f"{self.prefix}{part.name}.bias"
                slices.append(Slice(name=name, whole=(part.packed_rows,), starts=(part.first_row + start,), shape=(length,)))
        taken = self.matrices.store.tensor(Piece(tuple(slices), self.matrices.store.dtype))
        if all(with_bias):
            return taken
        given = iter(torch.split(taken, [part.shape[0] for part in slices]))
        pairs = zip(shape.parts, ranges, strict=True)
        return torch.cat([next(given) if part.bias else taken.new_zeros(length) for part, (_, length) in pairs])

    def _gate_rows(self, shape: ExpertsShape, inner: Range) -> list[Slice]:
        """Each expert's rows of gate, then of up; or of both by turns, as they are stored."""
        (start, length), columns = inner, (0, shape.hidden)
        slices = []
        for expert in range(shape.count):
            module = f"{self.prefix}experts.{expert}."
            if shape.order == "interleaved":
                whole = (2 * shape.inner, shape.hidden)
                rows = 2 * start, 2 * length
                slices.append(self.matrices.matrix(module + shape.names.gate, whole, rows, columns, turned=shape.turned))
            else:
                for name in (shape.names.gate, shape.names.up):
                    whole = (shape.inner, shape.hidden)
                    slices.append(self.matrices.matrix(module + name, whole, inner, columns, turned=shape.turned))
        for place in range(shape.joined):
            for name in ("gate_proj", "up_proj"):
                module, whole = f"{self.prefix}{shape.names.shared}.{name}", (shape.joined * shape.inner, shape.hidden)
                slices.append(self.matrices.matrix(module, whole, (place * shape.inner + start, length), columns))
        return slices

    def _down_columns(self, shape: ExpertsShape, inner: Range) -> list[Slice]:
        rows, names = (0, shape.hidden), [f"{self.prefix}experts.{expert}.{shape.names.down}" for expert in range(shape.count)]
        whole = (shape.hidden, shape.inner)
        slices = [self.matrices.matrix(name, whole, rows, inner, turned=shape.turned) for name in names]
        module, whole = f"{self.prefix}{shape.names.shared}.down_proj", (shape.hidden, shape.joined * shape.inner)
        for place in range(shape.joined):
            slices.append(self.matrices.matrix(module, whole, rows, (place * shape.inner + inner[0], inner[1])))
        return slices

    def _expert_biases(self, shape: ExpertsShape, inner: Range) -> ExpertBiases | None:
        if not shape.bias:
            return None
        assert not shape.joined, "an MLP that is cut into experts has no biases"
        (start, length), gates, downs = inner, [], []
        for expert in range(shape.count):
            stem = f"{self.prefix}experts.{expert}."
            if shape.order == "interleaved":
                gates.append(_vector(f"{stem}{shape.names.gate}.bias", 2 * shape.inner, (2 * start, 2 * length)))
            else:
                gates += [_vector(f"{stem}{name}.bias", shape.inner, inner) for name in (shape.names.gate, shape.names.up)]
            downs.append(_vector(f"{stem}{shape.names.down}.bias", shape.hidden, (0, shape.hidden)))
        gate_up = self.matrices.store.tensor(Piece(tuple(gates), self.matrices.store.dtype)).view(shape.count, -1)
        gate_up = _apart(gate_up, shape)
        down = self.matrices.store.tensor(Piece(tuple(downs), self.matrices.store.dtype)).view(shape.count, -1)
        if self.matrices.setting.parallel.tensor_rank > 0:
            down = torch.zeros_like(down)  # the first rank adds it, once
        return ExpertBiases(gate_up, down)


def _expert_modules(shape: ExpertsShape, prefix: str) -> list[str]:
    """By their full names."""
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


def _placed(rows: torch.Tensor, parts: Iterable[LinearPart], lengths: Sequence[int]) -> torch.Tensor:
    """[rows, ..] with zeros at the end up to all lengths, and each part's rows in its `RowOrder`: a copy, if that changes it."""
    missing = sum(lengths) - rows.shape[0]
    if missing:
        rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
    index, start, moved = [], 0, False
    for part, length in zip(parts, lengths, strict=True):
        places = torch.arange(length)
        if part.order is not None:
            size, moved = len(part.order.places), True
            assert length % size == 0, f"{part.name} has {length} rows on this rank, in groups of {size}"
            places = (places.view(-1, size)[:, :1] + torch.tensor(part.order.places)).view(-1)
        index.append(start + places)
        start += length
    return rows.index_select(0, torch.cat(index).to(rows.device)) if moved else rows
