"""Real memory for the pieces of a record: read from the checkpoint, or random.

What lies in the files as it should lie in memory is read in place. What does not (some columns of a matrix, weights that a format
makes into plain numbers) is read beside and copied, in rounds, so that little is in memory twice.
"""

from __future__ import annotations

import math
import mmap
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch

from enginery.checkpoint.files import READABLE, StoredTensor
from enginery.checkpoint.reader import Tell, read_tensors
from enginery.nn.stored import widen
from enginery.plugin.boundary import inside
from enginery.worker.weights.formats import FormatReader
from enginery.worker.weights.pieces import Piece, Slice
from enginery.worker.weights.store import LoadedWeights, WeightRecord

ROUND_BYTES: Final = 1 << 30  # that are read beside their place before they are copied there
HUGE_BYTES: Final = 2 << 20


def load(
    record: WeightRecord,
    stored: Mapping[str, StoredTensor],
    device: torch.device,
    *,
    reader: FormatReader | None = None,
    tell: Tell | None = None,
) -> LoadedWeights:
    """Read every recorded piece into memory on `device`. tell: is told how far that is. reader: of weights that have a scheme."""
    tensors, targets = _allocate(record, device)
    direct = [(part, target) for part, target in targets if part.is_direct]
    rounds = _rounds([(part, target) for part, target in targets if not part.is_direct], stored)
    every = [part for part, _ in direct] + [part for one in rounds for part in one.rows]
    told = _Told(tell, total=sum(_num_bytes(part, stored) for part in every))
    _read(direct, stored, device, told)
    for one in rounds:
        one.fill(stored, device, told, reader)
    return LoadedWeights(record.dtype, tensors, Counter(record.uses), record.names)


class _Round:
    """What is read beside its place at one time. rows: what is read, whole rows of tensors."""

    def __init__(self, targets: list[tuple[Slice, torch.Tensor]]) -> None:
        self._targets = targets
        self.rows = tuple(dict.fromkeys(_whole_rows(source) for part, _ in targets for source in part.sources))

    def fill(self, stored: Mapping[str, StoredTensor], device: torch.device, told: _Told, reader: FormatReader | None) -> None:
        """Read, and copy what belongs there to each place."""
        read = {part: torch.empty(part.shape, dtype=READABLE[stored[part.name].dtype], device=device) for part in self.rows}
        _read(list(read.items()), stored, device, told)
        for part, target in self._targets:
            if part.turned is not None:
                target.copy_(_columns(part.turned, read).T)
            else:
                target.copy_(_columns(part, read) if part.scheme is None else _made(part, read, reader, target.dtype))


def _made(part: Slice, read: Mapping[Slice, torch.Tensor], reader: FormatReader | None, dtype: torch.dtype) -> torch.Tensor:
    """Plain numbers of what is stored in a scheme."""
    assert reader is not None, f"{part.name} is stored in {part.scheme}"
    assert part.scheme is not None
    made_of = {suffix: _columns(source, read) for suffix, source in part.made_of}
    weight = reader.unpack(made_of, part.scheme)
    with inside(reader.offer, f"unpack {part.name} to the rows and columns that the model needs"):
        return part.of_made(widen(weight, dtype))


class _Told:
    """Adds up what several readings tell."""

    def __init__(self, tell: Tell | None, *, total: int) -> None:
        self._tell, self._total, self.before = tell, total, 0

    def __call__(self, done: int, total: int) -> None:
        if self._tell is not None:
            self._tell(self.before + done, self._total)


def _read(
    parts: Sequence[tuple[Slice, torch.Tensor]], stored: Mapping[str, StoredTensor], device: torch.device, told: _Told
) -> None:
    """Whole rows of tensors into their targets."""
    found: dict[str, StoredTensor] = {}
    targets = []
    for part, target in parts:
        tensor, name = stored[part.name], part.name
        if not part.is_whole:
            row_bytes = math.prod(part.whole[1:]) * READABLE[tensor.dtype].itemsize
            name = f"{part.name}, rows {part.starts[0]} to {part.starts[0] + part.shape[0]}"
            tensor = replace(tensor, start=tensor.start + part.starts[0] * row_bytes, shape=part.shape)
        found[name] = tensor
        targets.append((name, target))
    read_tensors(targets, found, device, tell=told)
    told.before += sum(_num_bytes(part, stored) for part, _ in parts)


def _num_bytes(part: Slice, stored: Mapping[str, StoredTensor]) -> int:
    return math.prod(part.shape) * READABLE[stored[part.name].dtype].itemsize


def _whole_rows(part: Slice) -> Slice:
    """The same rows with all of their columns."""
    rest = part.whole[1:]
    return replace(part, starts=(part.starts[0], *(0 for _ in rest)), shape=(part.shape[0], *rest))


def _columns(part: Slice, read: Mapping[Slice, torch.Tensor]) -> torch.Tensor:
    tensor = read[_whole_rows(part)]
    for axis in range(1, tensor.dim()):
        tensor = tensor.narrow(axis, part.starts[axis], part.shape[axis])
    return tensor


def _rounds(beside: list[tuple[Slice, torch.Tensor]], stored: Mapping[str, StoredTensor]) -> list[_Round]:
    rounds: list[list[tuple[Slice, torch.Tensor]]] = []
    room = 0
    for part, target in beside:
        size = sum(_num_bytes(_whole_rows(source), stored) for source in part.sources)
        if size > room:
            rounds.append([])
            room = ROUND_BYTES
        rounds[-1].append((part, target))
        room -= size
    return [_Round(some) for some in rounds]


def random_weights(record: WeightRecord, device: torch.device, *, seed: int) -> LoadedWeights:
    """Matrices from N(0, 1 / columns), norms of one, biases of zero; each tensor's values depend on its name and the seed alone.

    Whole tensors are drawn, then sliced: ranks have parts of one model, however many they are.
    """
    tensors, targets = _allocate(record, device)
    generator = torch.Generator(device)
    for part, target in targets:
        if part.is_whole:
            _draw(part, target, generator, record.dtype, seed=seed)
        else:
            whole = torch.empty(part.whole, dtype=target.dtype, device=device)
            _draw(part, whole, generator, record.dtype, seed=seed)
            target.copy_(part.of(whole))
    return LoadedWeights(record.dtype, tensors, Counter(record.uses), record.names)


def _draw(part: Slice, target: torch.Tensor, generator: torch.Generator, model_dtype: torch.dtype, *, seed: int) -> None:
    generator.manual_seed(zlib.crc32(f"{seed} {part.name}".encode()))  # CPU generators use 32 bits of it
    if part.fill is not None:
        target.fill_(part.fill)
    elif not target.dtype.is_floating_point:
        target.random_(generator=generator)
    elif target.dtype.itemsize == 1:
        target.copy_(torch.empty(target.shape, device=target.device).normal_(generator=generator))
    elif target.dim() > 1:
        target.normal_(0, target.shape[-1] ** -0.5, generator=generator)
        if target.dtype != model_dtype:  # checkpoints hold one dtype, whatever is wanted of them
            target.copy_(target.to(model_dtype))
    else:
        target.fill_(0.0 if part.name.endswith("bias") else 1.0)


def _allocate(record: WeightRecord, device: torch.device) -> tuple[dict[Piece, torch.Tensor], list[tuple[Slice, torch.Tensor]]]:
    """Memory for each piece, and the views of it that the checkpoint's tensors fill."""
    tensors: dict[Piece, torch.Tensor] = {}
    targets: list[tuple[Slice, torch.Tensor]] = []
    for piece in record.pieces:
        if device.type == "cpu":
            whole = empty_on_host(piece.shape, piece.dtype)
        else:
            whole = torch.empty(piece.shape, dtype=piece.dtype, device=device)
        tensors[piece] = whole
        start = 0
        for part in piece.slices:
            targets.append((part, whole[start : start + part.shape[0]]))
            start += part.shape[0]
    return tensors, targets


def empty_on_host(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As `torch.empty`. What is large is mapped by itself, in huge pages where the system has them; it goes with the tensor.

    A step reads all weights once. With pages of 4 KiB the processor's fetching ahead ends at each; with pages of 2 MiB a product of
    one row takes a tenth less time (docs/log.md, 2026-11-24).
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if sys.platform != "linux" or num_bytes < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
