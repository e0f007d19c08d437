"""What a model asked for, compared with the checkpoint before anything is read; and the memory that it is then given.

A model is built twice. The first build runs against a `WeightRecord`, which hands out tensors without memory and notes what was
asked for; `check` compares that with the checkpoint, and the memory plan counts it. `load` fills real memory, and the second build
takes its tensors from the result.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import torch

from enginery.checkpoint.files import PLAIN, StoredTensor
from enginery.errors import CheckpointError
from enginery.worker.weights.pieces import Piece, Slice

MAX_LISTED: Final = 10


class PieceStore(Protocol):
    """Where the tensors of pieces come from: recorded, loaded, or cut from what a test has."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the model, and of pieces that name none."""
        ...

    def tensor(self, piece: Piece) -> torch.Tensor:
        """The piece's tensor. One that is asked for twice is the same memory."""
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of that name."""
        ...


@dataclass(frozen=True)
class WeightRecord:
    """A store that hands out `meta` tensors and counts how often each piece was asked for. names: of the checkpoint's tensors."""

    dtype: torch.dtype
    uses: Counter[Piece] = field(default_factory=Counter)
    names: Collection[str] = ()

    def tensor(self, piece: Piece) -> torch.Tensor:
        """A stand-in of its shape without memory. Some rows of a tensor that is there whole are no piece of their own."""
        whole = piece.whole
        self.uses[whole if whole is not None and whole in self.uses else piece] += 1
        return torch.empty(piece.shape, dtype=piece.dtype, device="meta")

    def has(self, name: str) -> bool:
        """Of random weights, nothing."""
        return name in self.names

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All that was asked for, in the order of the first time."""
        return tuple(self.uses)

    def num_bytes(self) -> int:
        """What all pieces take in memory."""
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

    def has(self, name: str) -> bool:
        """What the record said."""
        return name in self.names

    def tensor(self, piece: Piece) -> torch.Tensor:
        """Hand it over. Raises `AssertionError` if the first build did not ask for it as often."""
        whole = piece.whole
        held = whole if whole is not None and whole in self.uses else piece
        names = ", ".join(part.name for part in piece.slices[:3])
        assert self.uses[held] > 0, f"{names} is taken more often than it was when the weights were recorded"
        self.uses[held] -= 1
        tensor = self.tensors[held] if self.uses[held] else self.tensors.pop(held)
        return tensor if held is piece else piece.slices[0].of(tensor) if held == whole else tensor


def check(record: WeightRecord, stored: Mapping[str, StoredTensor], ignored: Sequence[str], *, folder: Path) -> None:
    """Raise `CheckpointError` with every tensor that is missing, misshapen, of an unreadable dtype, or that nobody asked for."""
    known = {source.name: source for piece in record.pieces for part in piece.slices for source in part.sources}
    problems = [problem for name, part in known.items() if (problem := _misfit(part, stored.get(name))) is not None]
    problems += [
        f"tensor {name!r} in {tensor.file.name} is unexpected: the model in config.json has none of that name"
        for name, tensor in stored.items()
        if name not in known and not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)
    ]
    if problems:
        more = f"\n  ... and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        listed = "\n  ".join(problems[:MAX_LISTED])
        raise CheckpointError(f"the checkpoint in {folder} does not fit its config.json:\n  {listed}{more}")


def _misfit(part: Slice, tensor: StoredTensor | None) -> str | None:
    """Why a stored tensor is not what the model needs under this name; None if it is."""
    if tensor is None:
        return f"tensor {part.name!r} {list(part.whole)} is missing"
    if tensor.shape != part.whole:
        return f"tensor {part.name!r} in {tensor.file.name} has shape {list(tensor.shape)}, the model needs {list(part.whole)}"
    if part.dtype is not None and tensor.dtype != part.dtype:
        return f"tensor {part.name!r} in {tensor.file.name} has dtype {tensor.dtype}, the model needs {part.dtype}"
    if part.dtype is None and tensor.dtype not in PLAIN:
        return (
            f"tensor {part.name!r} in {tensor.file.name} has dtype {tensor.dtype}; no installed weight format reads it "
            f"(plain ones are {', '.join(PLAIN)})"
        )
    return None
