"""Pieces of whole tensors, for tests of how weights are recorded and read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from enginery.worker.weights.store import Piece, Slice


def piece(names: str | Sequence[str], shapes: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> Piece:
    """One tensor, or several stacked along dimension 0."""
    if isinstance(names, str):
        names, shapes = [names], [shapes]  # type: ignore[list-item]
    parts = zip(names, shapes, strict=True)
    return Piece(tuple(Slice.all_of(name, tuple(shape)) for name, shape in parts), dtype)  # type: ignore[arg-type]
