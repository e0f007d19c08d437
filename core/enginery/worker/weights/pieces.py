"""Pieces of memory that are filled from tensors of the checkpoint, or from parts of them.

checkpoint   q [H D, C]   k [K D, C]   v [K D, C]        slices: some rows, or some columns, of each
               |            |            |
memory       [ q ; k ; v ]                               one piece, stacked along dimension 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from enginery.contracts.weights import Scheme

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of one tensor of the checkpoint. whole: the tensor's shape there; starts, shape: which part, along each axis.

    dtype: what the checkpoint must have, as safetensors spell it; None for any plain floating point. scheme, made_of: of weights
    that become plain numbers when they are read, the slices that they are made from, by the suffix of the format, whole blocks of
    it, in which this part begins at `within`; `name` is then what the plain tensor would be called. Without a scheme, a matrix that
    the file has turned is made of that. fill: what random weights put there; None for random numbers.
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
        """The tensor `name`, whole."""
        return cls(name=name, whole=shape, starts=(0,) * len(shape), shape=shape, dtype=dtype)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the tensor is left out."""
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
        """The slices that are read for it."""
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
        """The shape of the slices stacked along their first dimension."""
        return (sum(part.shape[0] for part in self.slices), *self.slices[0].shape[1:])

    @property
    def num_bytes(self) -> int:
        """Bytes that the stack takes on the device."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> Piece | None:
        """The piece of the whole tensor, where this one is some rows of a single one."""
        part = self.slices[0]
        if len(self.slices) > 1 or part.is_whole or not part.adjoins or part.made_of:
            return None
        return Piece((Slice.all_of(part.name, part.whole, part.dtype),), self.dtype)
