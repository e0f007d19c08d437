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
from dataclasses import dataclass, replace
from typing import Final

import torch

from enginery.checkpoint.files import READABLE, StoredTensor
from enginery.checkpoint.reader import Tell, read_tensors
from enginery.nn.stored import widen
from enginery.plugin.boundary import inside
from enginery.worker.weights.formats import FormatReader
from enginery.worker.weights.store import LoadedWeights, Piece, Slice, WeightRecord

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
    reading = _Reading(stored, device, reader, tell)
    direct = [(part, target) for part, target in targets if part.is_direct]
    rounds = reading.rounds([(part, target) for part, target in targets if not part.is_direct])
    every = [part for part, _ in direct] + [part for one in rounds for part in _rows_of(one)]
    reading.total_bytes = sum(map(reading.num_bytes, every))
    reading.read(direct)
    for one in rounds:
        reading.fill(one)
    return LoadedWeights(record.dtype, tensors, Counter(record.uses), record.names)


Targets = Sequence[tuple[Slice, torch.Tensor]]


@dataclass
class _Reading:
    """Of one checkpoint: what is read in place, then, in rounds, what is read beside its place. Adds up what is told of each."""

    stored: Mapping[str, StoredTensor]
    device: torch.device
    reader: FormatReader | None
    tell: Tell | None
    total_bytes: int = 0
    done_bytes: int = 0

    def num_bytes(self, part: Slice) -> int:
        return math.prod(part.shape) * READABLE[self.stored[part.name].dtype].itemsize

    def rounds(self, beside: Targets) -> list[Targets]:
        """Those that are read beside their places, divided by `ROUND_BYTES`."""
        rounds: list[list[tuple[Slice, torch.Tensor]]] = []
        room = 0
        for part, target in beside:
            size = sum(self.num_bytes(_whole_rows(source)) for source in part.sources)
            if size > room:
                rounds.append([])
                room = ROUND_BYTES
            rounds[-1].append((part, target))
            room -= size
        return [*rounds]

    def read(self, parts: Targets) -> None:
        """Whole rows of tensors into their targets."""
        found: dict[str, StoredTensor] = {}
        targets = []
        for part, target in parts:
            tensor, name = self.stored[part.name], part.name
            if not part.is_whole:
                row_bytes = math.prod(part.whole[1:]) * READABLE[tensor.dtype].itemsize
                name = f"{part.name}, rows {part.starts[0]} to {part.starts[0] + part.shape[0]}"
                tensor = replace(tensor, start=tensor.start + part.starts[0] * row_bytes, shape=part.shape)
            found[name] = tensor
            targets.append((name, target))
        read_tensors(targets, found, self.device, tell=self._told)
        self.done_bytes += sum(self.num_bytes(part) for part, _ in parts)

    def _told(self, done_bytes: int, _: int) -> None:
        if self.tell is not None:
            self.tell(self.done_bytes + done_bytes, self.total_bytes)

    def fill(self, targets: Targets) -> None:
        """Read whole rows, and copy what belongs there to each place."""
        dtypes = {part: READABLE[part.dtype or self.stored[part.name].dtype] for part in _rows_of(targets)}
        read = {part: torch.empty(part.shape, dtype=dtype, device=self.device) for part, dtype in dtypes.items()}
        self.read(list(read.items()))
        for part, target in targets:
            if part.turned is not None:
                target.copy_(_columns(part.turned, read).T)
            elif part.scheme is None:
                target.copy_(_columns(part, read))
            else:
                assert self.reader is not None, f"{part.name} is stored in {part.scheme}"
                weight = self.reader.unpack({suffix: _columns(source, read) for suffix, source in part.made_of}, part.scheme)
                with inside(self.reader.offer, f"unpack {part.name} to the rows and columns that the model needs"):
                    target.copy_(part.of_made(widen(weight, target.dtype)))


def _rows_of(targets: Targets) -> Sequence[Slice]:
    """What is read for them: whole rows of tensors."""
    return tuple(dict.fromkeys(_whole_rows(source) for part, _ in targets for source in part.sources))


def _whole_rows(part: Slice) -> Slice:
    rest = part.whole[1:]
    return replace(part, starts=(part.starts[0], *(0 for _ in rest)), shape=(part.shape[0], *rest))


def _columns(part: Slice, read: Mapping[Slice, torch.Tensor]) -> torch.Tensor:
    return replace(part, starts=(0, *part.starts[1:])).of(read[_whole_rows(part)])


def random_weights(record: WeightRecord, device: torch.device, *, seed: int) -> LoadedWeights:
    """Matrices from N(0, 1 / columns), norms of one, biases of zero; each tensor's values depend on its name and the seed alone.

    Whole tensors are drawn, then sliced: ranks have parts of one model, however many they are.
    """
    tensors, targets = _allocate(record, device)
    generator = torch.Generator(device)
    for part, target in targets:
        whole = target if part.is_whole else torch.empty(part.whole, dtype=target.dtype, device=device)
        _draw(part, whole, generator, record.dtype, seed=seed)
        if whole is not target:
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
