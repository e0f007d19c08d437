"""Matrices of modules, by their full names: in which tensors of the checkpoint they are, and which part of them a rank has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from enginery.checkpoint.files import PLAIN, READABLE
from enginery.contracts.ops import OpTable
from enginery.contracts.parallel import Collectives, Cut, ParallelFacts
from enginery.contracts.weights import Scheme, StoredPart, StoredWeight
from enginery.nn.expert_loads import ExpertLoads
from enginery.worker.weights.formats import FormatReader
from enginery.worker.weights.shares import Range, share
from enginery.worker.weights.store import Piece, PieceStore, Slice

NAMES = {dtype: name for name, dtype in READABLE.items()}


@dataclass(frozen=True, kw_only=True)
class RankSetting:
    """Where the weights go. kept: by operation, the schemes that its kernels take; what is stored otherwise becomes plain.

    loads: counts what experts are given, on the rank that tells it.
    """

    ops: OpTable
    comm: Collectives
    parallel: ParallelFacts = field(default_factory=ParallelFacts)
    reader: FormatReader | None = None
    kept: Mapping[str, frozenset[Scheme]] = field(default_factory=dict)
    loads: ExpertLoads | None = None


@dataclass(frozen=True)
class Matrices:
    """What `RankWeights` asks for, whatever a module is stored in."""

    store: PieceStore
    setting: RankSetting

    def over_lanes(self) -> Matrices:
        return replace(self, setting=replace(self.setting, parallel=self.setting.parallel.over_lanes()))

    def share(self, size: int, *, unit: int, what: str, repeats: bool) -> Range:
        return share(size, unit=unit, parallel=self.setting.parallel, what=what, repeats=repeats)

    def slices(
        self, name: str, whole: tuple[int, ...], dtype: torch.dtype, *, cut: Cut, parts: Sequence[tuple[int, int]]
    ) -> tuple[Slice, ...]:
        """What this rank has of the tensor `name`, one range of rows after the other. parts: (rows, unit) of each part."""
        what, rows, rest = f"tensor {name!r}", [(0, whole[0])], [(0, size) for size in whole[1:]]
        if cut is Cut.ROWS:
            sizes = [size for size, _ in parts]
            assert sum(sizes) == whole[0], f"{name!r} has {whole[0]} rows, and its parts {sizes}"
            places = [self.share(size, unit=unit, what=what, repeats=True) for size, unit in parts]
            rows = [(sum(sizes[:index]) + start, length) for index, (start, length) in enumerate(places)]
        elif cut is Cut.COLUMNS:
            rest[-1] = self.share(whole[-1], unit=parts[0][1], what=what, repeats=False)
        return tuple(self._slice(name, whole, (each, *rest), dtype) for _, each in merged([(name, each) for each in rows]))

    def _slice(self, name: str, whole: tuple[int, ...], ranges: Sequence[Range], dtype: torch.dtype) -> Slice:
        module, is_plain = name.removesuffix(".weight"), dtype in PLAIN.values()
        if module != name and len(whole) == 2 and is_plain:
            return self.matrix(module, whole, *ranges)
        starts, lengths = zip(*ranges, strict=True)
        return Slice(name=name, whole=whole, starts=starts, shape=lengths, dtype=None if is_plain else NAMES.get(dtype))

    def scheme(self, module: str) -> Scheme | None:
        reader = self.setting.reader
        return None if reader is None else reader.scheme(module)

    def common_scheme(self, modules: Iterable[str]) -> Scheme | None:
        schemes = {self.scheme(module) for module in modules}
        return schemes.pop() if len(schemes) == 1 else None

    def matrix(
        self, module: str, whole: tuple[int, int] | Sequence[int], rows: Range, columns: Range, *, turned: bool = False
    ) -> Slice:
        """A part of a module's weight as plain numbers, whatever it is stored in. turned: if plain, as [columns, rows]."""
        scheme = self.scheme(module)
        plain = Slice(
            name=f"{module}.weight", whole=tuple(whole), starts=(rows[0], columns[0]), shape=(rows[1], columns[1]), scheme=scheme
        )
        if scheme is None:
            if not turned:
                return plain
            in_file = replace(plain, whole=plain.whole[::-1], starts=plain.starts[::-1], shape=plain.shape[::-1])  # [columns, rows]
            return replace(plain, made_of=(("", in_file),), within=(0, 0))
        parts = self._reader.parts(scheme)
        blocks = [math.lcm(*(part.per_element[axis] or 1 for part in parts)) for axis in (0, 1)]
        starts = tuple(start // block * block for start, block in zip(plain.starts, blocks, strict=True))
        ends = tuple(
            min(-(-(start + length) // block) * block, size)
            for start, length, block, size in zip(plain.starts, plain.shape, blocks, plain.whole, strict=True)
        )
        within = tuple(start - covered for start, covered in zip(plain.starts, starts, strict=True))
        made_of = tuple((part.suffix, _stored(part, module, plain.whole, starts=starts, ends=ends)) for part in parts)
        return replace(plain, made_of=made_of, within=within)

    def stack(self, slices: Sequence[Slice], *, stays: Scheme | None) -> torch.Tensor | StoredWeight:
        """Parts of matrices, one above the other. stays: they are not made into plain numbers."""
        if stays is None:
            return self.store.tensor(Piece(tuple(slices), self.store.dtype))
        assert not any(any(one.within) for one in slices), "what stays stored is cut between blocks"
        parts = {
            part.suffix: self.store.tensor(Piece(tuple(dict(one.made_of)[part.suffix] for one in slices), READABLE[part.dtype]))
            for part in self._reader.parts(stays)
        }
        return self._reader.unpack(parts, stays)

    @property
    def _reader(self) -> FormatReader:
        assert self.setting.reader is not None, "something is stored in a scheme that no format told"
        return self.setting.reader


def merged(places: Sequence[tuple[str, Range]]) -> list[tuple[str, Range]]:
    """Rows of modules, with those of one that follow each other as one range: packed, and not cut between the parts."""
    joined: list[tuple[str, Range]] = []
    for name, (start, length) in places:
        if joined and (last := joined[-1])[0] == name and sum(last[1]) == start:
            joined[-1] = name, (last[1][0], last[1][1] + length)
        else:
            joined.append((name, (start, length)))
    return joined


def _stored(part: StoredPart, module: str, whole: Sequence[int], *, starts: Sequence[int], ends: Sequence[int]) -> Slice:
    """Rows and columns of a matrix in one of the tensors that it is stored in."""
    firsts = tuple(start // each if each else 0 for start, each in zip(starts, part.per_element, strict=True))
    lasts = tuple(-(-end // each) if each else 1 for end, each in zip(ends, part.per_element, strict=True))
    return Slice(
        name=f"{module}{part.suffix}",
        whole=tuple(-(-size // each) if each else 1 for size, each in zip(whole, part.per_element, strict=True)),
        starts=firsts,
        shape=tuple(last - first for first, last in zip(firsts, lasts, strict=True)),
        dtype=part.dtype,
        fill=_fill(part.dtype, whole[1]) if part.role == "scales" else None,
    )


def _fill(dtype: str, columns: int) -> float:
    """About 1 / sqrt(columns); as a byte, the exponent of E8M0 (126: half, for values that are about 2)."""
    return 126 - round(math.log2(columns) / 2) if dtype == "U8" else columns**-0.5
