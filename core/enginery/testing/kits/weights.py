"""Weights for the tests of a model: whole tensors in memory, of which a rank takes its part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from enginery.contracts.model import WeightSource
from enginery.contracts.ops import OpTable
from enginery.contracts.parallel import Collectives, ParallelFacts
from enginery.nn.parallel import SingleRank
from enginery.nn.reference_ops import REFERENCE_SCHEMES
from enginery.nn.stored import widen
from enginery.worker.weights.formats import FormatReader
from enginery.worker.weights.matrices import Matrices, RankSetting
from enginery.worker.weights.rank import RankWeights
from enginery.worker.weights.store import Piece, Slice


@dataclass(frozen=True, eq=False)
class WholeTensors:
    """A store of pieces, for `RankWeights`, that are cut out of whole tensors. asked: the names of those that were used."""

    tensors: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    reader: FormatReader | None = None
    asked: set[str] = field(default_factory=set)

    def tensor(self, piece: Piece) -> torch.Tensor:
        """Always a copy. Raises `KeyError` and `AssertionError` for tensors that are missing or of another shape."""
        return torch.cat([self._plain(part, piece.dtype) for part in piece.slices]).to(piece.dtype)

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def _plain(self, part: Slice, dtype: torch.dtype) -> torch.Tensor:
        if part.scheme is None:
            return self._cut(part) if part.turned is None else self._cut(part.turned).T
        assert self.reader is not None, f"{part.name} is stored in {part.scheme}"
        stored = self.reader.unpack({suffix: self._cut(each) for suffix, each in part.made_of}, part.scheme)
        return part.of_made(widen(stored, dtype))

    def _cut(self, part: Slice) -> torch.Tensor:
        whole = self.tensors[part.name]
        assert tuple(whole.shape) == part.whole, f"{part.name} is {tuple(whole.shape)}, the model asks for {part.whole}"
        self.asked.add(part.name)
        return part.of(whole)


def weights_of(
    store: WholeTensors, *, ops: OpTable, comm: Collectives | None = None, parallel: ParallelFacts | None = None
) -> WeightSource:
    """What a rank's model is given as `ModelContext.weights`. comm, parallel: None for a single rank."""
    setting = RankSetting(
        ops=ops,
        comm=comm or SingleRank(ops),
        parallel=parallel or ParallelFacts(),
        reader=store.reader,
        kept=REFERENCE_SCHEMES,
    )
    return RankWeights(Matrices(store, setting))
