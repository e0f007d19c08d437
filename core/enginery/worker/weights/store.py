"""What a model asked for, compared with the checkpoint before anything is read; and the memory that it is then given.

checkpoint   q [H D, C]   k [K D, C]   v [K D, C]        slices: some rows, or some columns, of each
               |            |            |
memory       [ q ; k ; v ]                               one piece, stacked along dimension 0

A model is built twice. The first build runs against a `WeightRecord`, which hands out tensors without memory and notes what was
asked for; `check` compares that with the checkpoint, and the memory plan counts it. `load` fills real memory, and the second build
takes its tensors from the result.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import torch

from enginery.checkpoint.files import PLAIN, StoredTensor
from enginery.contracts.weights import Scheme
from enginery.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of one tensor of the checkpoint. whole: the tensor's shape there; starts, shape: which part, along each axis.

    dtype: what the checkpoint must have, as safetensors spell it, any plain floating point for one of those; None: any of them.
    scheme, made_of: of weights that become plain numbers when they are read, the slices that they are made from, by the suffix of
    the format, whole blocks of it, in which this part begins at `within`; `name` is then what the plain tensor would be called.
    Without a scheme, a matrix that the file has turned is made of that. fill: what random weights put there; None for random
    numbers.
    """

    name: str
    whole: Shape
    starts: Shape
    shape: Shape
    dtype: str | None = None
    scheme: Scheme | None = None
    made_of: tuple[tuple[str, Slice], ...] = ()
    within: Shape = ()
    fill: float | None = None

    @classmethod
    def all_of(cls, name: str, shape: Shape, dtype: str | None = None) -> Slice:
        return cls(name=name, whole=shape, starts=(0,) * len(shape), shape=shape, dtype=dtype)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole

    @property
    def adjoins(self) -> bool:
        """Whether its bytes follow each other in the file: all of each row."""
        return self.shape[1:] == self.whole[1:]

    @property
    def is_direct(self) -> bool:
        """Whether its bytes in the file are those in memory, but for the dtype."""
        return self.adjoins and not self.made_of

    @property
    def sources(self) -> tuple[Slice, ...]:
        return tuple(part for _, part in self.made_of) or (self,)

    @property
    def turned(self) -> Slice | None:
        """The slice [columns, rows] that this one is in the file, if it is stored so."""
        return self.made_of[0][1] if self.made_of and self.scheme is None else None

    def of_made(self, weight: torch.Tensor) -> torch.Tensor:
        """This part of what its blocks became: a view."""
        return _part(weight, self.within, self.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of the whole tensor: a view."""
        return _part(tensor, self.starts, self.shape)


def _part(tensor: torch.Tensor, starts: Shape, shape: Shape) -> torch.Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]


@dataclass(frozen=True)
class Piece:
    """A tensor of the model: slices of one width, stacked along dimension 0."""

    slices: tuple[Slice, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        return (sum(part.shape[0] for part in self.slices), *self.slices[0].shape[1:])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def held(self, known: Collection[Piece]) -> Piece:
        """Itself, or that of the whole tensor, where this one is some rows of a single one that is known whole."""
        part = self.slices[0]
        if len(self.slices) > 1 or part.is_whole or not part.adjoins or part.made_of:
            return self
        whole = Piece((Slice.all_of(part.name, part.whole, part.dtype),), self.dtype)
        return whole if whole in known else self


MAX_LISTED: Final = 10


class PieceStore(Protocol):
    """Where the tensors of pieces come from: recorded, loaded, or cut from what a test has."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the model, and of pieces that name none."""

    def tensor(self, piece: Piece) -> torch.Tensor:
        """The piece's tensor. One that is asked for twice is the same memory."""

    @property
    def names(self) -> Collection[str]:
        """Of the checkpoint's tensors; of random weights, none."""


@dataclass(frozen=True)
class WeightRecord:
    """A store that hands out `meta` tensors and counts how often each piece was asked for."""

    dtype: torch.dtype
    uses: Counter[Piece] = field(default_factory=Counter)
    names: Collection[str] = ()

    def tensor(self, piece: Piece) -> torch.Tensor:
        """A stand-in of its shape without memory. Some rows of a tensor that is there whole are no piece of their own."""
        self.uses[piece.held(self.uses)] += 1
        return torch.empty(piece.shape, dtype=piece.dtype, device="meta")

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All that was asked for, in the order of the first time."""
        return tuple(self.uses)

    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.uses)


@dataclass(frozen=True)
class LoadedWeights:
    """A store of tensors in memory. Each is given away when it was asked for as often as the record says.

    So a model that repacks one frees the original.
    """

    dtype: torch.dtype
    tensors: dict[Piece, torch.Tensor]
    uses: Counter[Piece]
    names: Collection[str] = ()

    def tensor(self, piece: Piece) -> torch.Tensor:
        """Hand it over. Raises `AssertionError` if the first build did not ask for it as often."""
        held = piece.held(self.uses)
        names = ", ".join(part.name for part in piece.slices[:3])
        assert self.uses[held] > 0, f"{names} is taken more often than it was when the weights were recorded"
        self.uses[held] -= 1
        tensor = self.tensors[held] if self.uses[held] else self.tensors.pop(held)
        return tensor if held is piece else piece.slices[0].of(tensor)


def check(record: WeightRecord, stored: Mapping[str, StoredTensor], ignored: Sequence[str], *, folder: Path) -> None:
    """Raise `CheckpointError` with every tensor that is missing, misshapen, of an unreadable dtype, or that nobody asked for."""
    known = {source.name: source for piece in record.pieces for part in piece.slices for source in part.sources}
    found = [_misfit(part, stored.get(name)) for name, part in known.items()]
    problems = [*filter(None, found), *_unexpected(known, stored, ignored)]
    if problems:
        more = f"\n  ... and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        others = {tensor.dtype for tensor in stored.values()} - {*PLAIN, "I64", "BOOL", *(part.dtype for part in known.values())}
        more += f"\n{', '.join(sorted(others))} are of quantised weights; take the model that they were made from" if others else ""
        listed = "\n  ".join(problems[:MAX_LISTED])
        raise CheckpointError(f"the checkpoint in {folder} does not fit its config.json:\n  {listed}{more}")


def _unexpected(known: Collection[str], stored: Mapping[str, StoredTensor], ignored: Sequence[str]) -> list[str]:
    return [
        f"tensor {name!r} in {tensor.file.name} is unexpected: the model in config.json has none of that name"
        for name, tensor in stored.items()  # one without numbers, as of a shared expert of size 0, hides nothing
        if name not in known and 0 not in tensor.shape and not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)
    ]


def _misfit(part: Slice, tensor: StoredTensor | None) -> str | None:
    """Why a stored tensor is not what the model needs under this name; None if it is."""
    if tensor is None:
        return f"tensor {part.name!r} {list(part.whole)} is missing"
    if tensor.shape != part.whole:
        return f"tensor {part.name!r} in {tensor.file.name} has shape {list(tensor.shape)}, the model needs {list(part.whole)}"
    if part.dtype is not None and tensor.dtype != part.dtype and not {tensor.dtype, part.dtype} <= PLAIN.keys():
        return f"tensor {part.name!r} in {tensor.file.name} has dtype {tensor.dtype}, the model needs {part.dtype}"
    if part.dtype is None and tensor.dtype not in PLAIN:
        return (
            f"tensor {part.name!r} in {tensor.file.name} has dtype {tensor.dtype}; no installed weight format reads it "
            f"(plain ones are {', '.join(PLAIN)})"
        )
    return None
