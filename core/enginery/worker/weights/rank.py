"""What a rank's model is given for what it asks: its part of each product, bound to kernels.

    model          linear(LinearShape)     experts(ExpertsShape)     take(name, shape)
    here           which rows, which columns, from which tensors of the checkpoint, plain or stored
    store          tensors for pieces: recorded first, then loaded

R ranks, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from enginery.contracts.ops import GatableLinear, LinearFn, NormingLinear
from enginery.contracts.parallel import Cut
from enginery.contracts.weights import Experts, ExpertsShape, Linear, LinearPart, LinearShape, StoredWeight
from enginery.worker.weights.experts import ExpertStacks
from enginery.worker.weights.matrices import Matrices, merged
from enginery.worker.weights.shares import Range, share
from enginery.worker.weights.store import Piece, Slice


class BoundLinear:
    """Implements `enginery.contracts.weights.Linear`. complete: sums over ranks."""

    def __init__(
        self, product: LinearFn, rows: tuple[int, ...], complete: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.product, self.rows, self.complete = product, rows, complete
        self._norming = product if isinstance(product, NormingLinear) else None  # 7 us, so not in a step

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, columns of this rank] -> [N, sum of rows]."""
        out = self.product(x)
        return out if self.complete is None else self.complete(out)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        """The product's, if it takes norms: see `NormingLinear`."""
        return None if self._norming is None else self._norming.add_rms_norm(x, residual, weight, eps)

    def with_gate(self, gated_silu: Callable[[torch.Tensor], torch.Tensor]) -> LinearFn:
        """The product's, if it takes gates; else the one and then the other."""
        if isinstance(self.product, GatableLinear) and self.complete is None:
            return BoundLinear(self.product.with_gate(gated_silu), self.rows[:1])
        return lambda x: gated_silu(self(x))


@dataclass(frozen=True)
class RankWeights:
    """Implements `enginery.contracts.model.WeightSource` over a store of pieces."""

    matrices: Matrices
    prefix: str = ""

    def scope(self, prefix: str) -> RankWeights:
        """A view with longer names onto the same store."""
        return replace(self, prefix=f"{self.prefix}{prefix}.")

    def over_lanes(self) -> RankWeights:
        return replace(self, matrices=self.matrices.over_lanes())

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
        whole = tuple(shape)
        sizes, dtype = parts or whole[:1], dtype or self.matrices.store.dtype
        units = unit if isinstance(unit, tuple) else (unit,) * len(sizes)
        slices = self.matrices.slices(self.prefix + name, whole, dtype, cut=cut, parts=tuple(zip(sizes, units, strict=True)))
        return self.matrices.store.tensor(Piece(slices, dtype))

    def share(self, size: int, *, unit: int = 1) -> range:
        """A range, which may be another rank's too."""
        start, length = self.matrices.share(size, unit=unit, what=f"what {self.prefix.removesuffix('.')} computes", repeats=True)
        return range(start, start + length)

    def own_experts(self, count: int) -> range:
        """Those that follow each other, on some ranks one more."""
        parallel = self.matrices.setting.parallel.over_lanes()
        if not parallel.cuts_experts:
            return range(count)
        start, length = share(count, unit=1, parallel=parallel, what=f"{self.prefix}experts", uneven=True)
        return range(start, start + length)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has it, by its name below the prefix."""
        return self.prefix + name in self.matrices.store.names

    def linear(self, shape: LinearShape) -> Linear:
        setting, parts = self.matrices.setting, shape.parts
        ranges = [self._rows(part, padded=shape.padded) for part in parts]
        lengths = self._lengths(shape, ranges)
        weight, bias = self._product_weight(shape, ranges), self._bias(shape, ranges)
        if isinstance(weight, torch.Tensor):
            weight = _placed(weight, parts, lengths, input_factor=shape.input_factor)
        is_partial = parts[0].cut is Cut.COLUMNS and setting.parallel.tensor_size > 1
        if bias is not None:
            bias = None if is_partial and setting.parallel.tensor_rank else _placed(bias, parts, lengths)  # one rank adds it
        product = setting.ops.bind_linear(weight, bias)
        return BoundLinear(product, lengths, setting.comm.sum if is_partial and shape.complete else None)

    def experts(self, shape: ExpertsShape) -> Experts:
        """Bind this rank's experts, or its columns of every expert: partial sums where there are several ranks."""
        return ExpertStacks(self.matrices.over_lanes(), self.prefix, shape, self.own_experts(shape.count)).bind()

    def _lengths(self, shape: LinearShape, ranges: Sequence[Range]) -> tuple[int, ...]:
        """Rows of each part on this rank, those that pad with them."""
        if not shape.padded:
            return tuple(length for _, length in ranges)
        return tuple(-(-part.rows // self.matrices.setting.parallel.over_lanes().tensor_size) for part in shape.parts)

    def _columns(self, shape: LinearShape) -> Range:
        if shape.parts[0].cut is not Cut.COLUMNS:
            return 0, shape.columns
        what = f"the input of {self.prefix}{shape.names[0]}"
        return self.matrices.share(shape.columns, unit=shape.parts[0].unit, what=what, repeats=False)

    def _rows(self, part: LinearPart, *, padded: bool) -> Range:
        """Of the part, not of the matrix that it may be packed in."""
        if part.cut is not Cut.ROWS:
            return 0, part.rows
        if padded:  # a head, which is cut over all lanes
            parallel = self.matrices.setting.parallel.over_lanes()
            most = -(-part.rows // parallel.tensor_size)
            start = min(parallel.tensor_rank * most, part.rows)
            return start, min(most, part.rows - start)
        return self.matrices.share(part.rows, unit=part.unit, what=f"the output of {self.prefix}{part.name}", repeats=True)

    def _product_weight(self, shape: LinearShape, ranges: Sequence[Range]) -> torch.Tensor | StoredWeight:
        """[sum of rows, columns]; plain, if rows are not to be bound as they are."""
        modules, columns = [self.prefix + part.name for part in shape.parts], self._columns(shape)
        places = [(part.first_row + start, length) for part, (start, length) in zip(shape.parts, ranges, strict=True)]
        whole = {module: (part.packed_rows, shape.columns) for module, part in zip(modules, shape.parts, strict=True)}
        joined = merged(list(zip(modules, places, strict=True)))
        slices = [self.matrices.matrix(module, whole[module], rows, columns) for module, rows in joined]
        scheme = self.matrices.common_scheme(modules)
        stays = not shape.changes and scheme in self.matrices.setting.kept.get("bind_linear", ())
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


def _placed(rows: torch.Tensor, parts: Sequence[LinearPart], lengths: Sequence[int], *, input_factor: float = 1.0) -> torch.Tensor:
    """[rows, ..] with zeros at the end up to all lengths, and each part's rows in its `RowOrder` and times factors: a copy, if that
    changes it."""
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
    rows = rows.index_select(0, torch.cat(index).to(rows.device)) if moved else rows
    factors = [part.factor * input_factor for part in parts]
    if rows.is_meta or set(factors) == {1.0}:  # the product of what is meta imports torch._dynamo, for seconds
        return rows
    by_row = torch.tensor(factors).repeat_interleave(torch.tensor(lengths)).to(rows.device)
    return torch.mul(rows, by_row.view(-1, *(1,) * (rows.dim() - 1)), out=torch.empty_like(rows))  # rounded once
