"""The safetensors files of a checkpoint, checked by their headers before any tensor is read.

The format: eight bytes with the length of a JSON header (little endian), the header, then the tensors' bytes; the header gives each
tensor's dtype, shape and byte range. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from enginery.checkpoint.folder import read_json, text_part
from enginery.checkpoint.formats import other_weights
from enginery.errors import CheckpointError

PLAIN: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READABLE: Final = PLAIN | {  # what is not plain is read where a format, or a model by its dtype, asks for it
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SINGLE: Final = "model.safetensors"
_HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")  # Gemma 3 has the other, beside a model for images
_TIES: Final = ("tie_word_embeddings", "tie_embedding")  # LFM2 has the other
_NO_EMBEDDING: Final = re.compile(r"head|\.\d+\.")
_COMPARED_BYTES: Final = 8 << 20
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor is and what it looks like. start: its first byte in the file."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]


def _no_file(file: Path, folder: Path, *, index: Path | None) -> CheckpointError:
    """For a checkpoint without one of its files. index: the file that lists it, where there is one."""
    if file.is_symlink():
        return CheckpointError(f"{file} is a link to {file.readlink()}, where nothing is; download the checkpoint again")
    if index is None and (other := other_weights(folder)):
        return CheckpointError(f"{file} does not exist; {other}")
    others = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    why = "there is no model.safetensors.index.json either" if index is None else f"{index.name} lists it"
    return CheckpointError(
        f"{file} does not exist ({why}; the folder has: {', '.join(others) or 'nothing'}). Fetch the missing file, "
        "convert other formats to safetensors, or use --load-format dummy for random weights"
    )


def scan_checkpoint(folder: Path) -> Mapping[str, StoredTensor]:
    """All tensors of `folder` by name. Raises `CheckpointError` with the file and the tensor that is missing or cut off.

    Of the last folder that was looked at, they are known until one of its files is written.
    """
    stats = {file.name: file.stat() for file in sorted(folder.glob("*.safetensors*")) if file.exists()}
    return _scanned(folder, tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats.items()))


@functools.lru_cache(maxsize=1)
def _scanned(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> Mapping[str, StoredTensor]:
    """stamps: of all that is read, a key and no more."""
    stored: dict[str, StoredTensor] = {}
    index = folder / "model.safetensors.index.json"
    weight_map = _weight_map(index) if index.exists() else {}
    files = sorted({folder / name for name in weight_map.values()}) or [folder / _SINGLE]
    for file in files:
        if not file.exists():
            raise _no_file(file, folder, index=index if weight_map else None)
        stored.update(_scan_file(file))
    for name, file_name in weight_map.items():
        if name not in stored or stored[name].file.name != file_name:
            raise CheckpointError(f"{index} says that tensor {name!r} is in {file_name}, but it is not; fetch that file again")
    return MappingProxyType(stored)


def _weight_map(index: Path) -> dict[str, str]:
    stated = read_json(index).get("weight_map")
    if not isinstance(stated, dict) or not stated or not all(isinstance(name, str) for name in stated.values()):
        raise CheckpointError(f'{index} has no "weight_map" from tensors to files, which is all it is for; fetch it again')
    return {} if (index.parent / _SINGLE).exists() and _SINGLE not in stated.values() else stated  # as in transformers


def dtype_of_most(folder: Path) -> str | None:
    """That of most plain numbers in the files of `folder`, by torch's name; None where it has none."""
    counts: Counter[str] = Counter()
    for tensor in scan_checkpoint(folder).values() if any(folder.glob("*.safetensors")) else ():
        counts[tensor.dtype] += math.prod(tensor.shape)
    return next((str(PLAIN[name]).removeprefix("torch.") for name, _ in counts.most_common() if name in PLAIN), None)


def with_own_head(config: Mapping[str, object], folder: Path, *, warns: bool) -> dict[str, object]:
    """config.json; not tied where the files hold a head of other values than the embedding, as in transformers. warns: says so."""
    within = text_part(config)
    said = _said_of_ties(config, within)
    if (said and not any(said)) or (head := _own_head(folder)) is None:
        return dict(config)
    if said and warns:
        _log.warning("lm_head.weight in %s is not the embedding, though config.json ties them; it is the head", head.file)
    untied = dict.fromkeys(_TIES, False)
    return {**config, **untied} | ({"text_config": {**within, **untied}} if within else {})


def _said_of_ties(config: Mapping[str, object], within: Mapping[str, object]) -> list[object]:
    """Where config.json says it twice, the outer value."""
    found = [config[key] if config.get(key) is not None else within.get(key) for key in _TIES]
    return [value for value in found if value is not None]


def _own_head(folder: Path) -> StoredTensor | None:
    """The head that the files hold; None where it is the embedding, which is what else has its shape, outside of layers."""
    stored = scan_checkpoint(folder) if any(folder.glob("*.safetensors")) else {}
    head = next((stored[name] for name in _HEADS if name in stored), None)
    if head is None:
        return None
    equal = [_equal(head, each) for name, each in stored.items() if each.shape == head.shape and not _NO_EMBEDDING.search(name)]
    return head if equal and not any(equal) else None


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two of one shape are the same bytes."""
    if one.dtype != other.dtype or one.dtype not in READABLE:
        return False
    size = math.prod(one.shape) * READABLE[one.dtype].itemsize
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        counts = (min(_COMPARED_BYTES, size - begin) for begin in range(0, size, _COMPARED_BYTES))
        return all(first.read(count) == second.read(count) for count in counts)


def unstack(stored: Mapping[str, StoredTensor], stacked: Mapping[str, tuple[str, ...]]) -> Mapping[str, StoredTensor]:
    """`stored` with tensors that are several in one under the names of these. The bytes are the same.

    stacked: {".experts.gate_up_proj": (".experts.{}.gate_proj.weight", ".experts.{}.up_proj.weight")} makes of a tensor [E, 2I, C]
    2E of [I, C]; {".mlp.gate.weight": (".block_sparse_moe.gate.weight",)}, without an index, renames, and so what else its module
    has, as the scales of a format. A stack of biases is [E, N]; of more than three dimensions the last ones become one.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        end = next((end for end in stacked if name.endswith(end)), None)
        if end is None:
            found[_renamed(name, stacked)] = tensor
            continue
        stem, parts = name.removesuffix(end), stacked[end]
        if "{}" not in parts[0]:
            found[stem + parts[0]] = tensor
        elif len(tensor.shape) > 1 and tensor.shape[1] % len(parts) == 0 and tensor.dtype in READABLE:
            found |= _each_of(tensor, stem, parts)
        else:
            raise CheckpointError(
                f"tensor {name!r} in {tensor.file.name} is {tensor.dtype} {list(tensor.shape)}, which cannot be {len(parts)} "
                "matrices for each index of its first dimension; fetch it again, or store the parts by themselves"
            )
    return found


def _renamed(name: str, stacked: Mapping[str, tuple[str, ...]]) -> str:
    """Of a tensor that is in a module whose weight is renamed."""
    module, _, part = name.rpartition(".")
    weight = f"{module}.weight"
    end = next((end for end, (to, *_) in stacked.items() if weight.endswith(end) and "{}" not in to), None)
    return name if end is None else (weight.removesuffix(end) + stacked[end][0]).removesuffix("weight") + part


def _each_of(tensor: StoredTensor, stem: str, parts: tuple[str, ...]) -> dict[str, StoredTensor]:
    """Of a stack [E, parts * N, ..] each [N] or [N, C], by its name behind the stem."""
    rest = (math.prod(tensor.shape[2:]),) if len(tensor.shape) > 2 else ()
    shape = (tensor.shape[1] // len(parts), *rest)
    size = math.prod(shape) * READABLE[tensor.dtype].itemsize
    names = itertools.product(range(tensor.shape[0]), parts)
    return {
        stem + part.format(index): replace(tensor, start=tensor.start + place * size, shape=shape)
        for place, (index, part) in enumerate(names)
    }


def _scan_file(file: Path) -> dict[str, StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(8)
            length = int.from_bytes(first, "little")
            if first == b"version ":
                raise CheckpointError(f"{file} is what git keeps in the file's place; fetch the file itself with `git lfs pull`")
            if size < 8 or length > size - 8:
                header_end = f"its header ends at byte {8 + length:,}, " if len(first) == 8 else ""
                raise CheckpointError(
                    f"{file} is cut off or no safetensors file: {header_end}the file has {size:,} bytes; fetch it again"
                )
            header: dict[str, object] = dict(json.loads(stream.read(length)))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} has a damaged header ({error}); fetch it again") from error
    return {
        name: _stored(name, entry, file=file, base=8 + length, size=size)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _stored(name: str, entry: Any, *, file: Path, base: int, size: int) -> StoredTensor:
    """base: where the tensors' bytes begin in the file, which has `size` bytes."""
    try:
        dtype, shape, (start, end) = str(entry["dtype"]), tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} has a damaged header ({error!r} at tensor {name!r}); fetch it again") from error
    if start < 0 or end < start:
        raise CheckpointError(f"{file} has a damaged header: tensor {name!r} is in bytes {start:,} to {end:,}; fetch it again")
    if base + end > size:
        raise CheckpointError(
            f"{file} is cut off: tensor {name!r} ends at byte {base + end:,}, the file has {size:,}; fetch it again"
        )
    if dtype in READABLE and end - start != math.prod(shape) * READABLE[dtype].itemsize:
        raise CheckpointError(
            f"{file} has a damaged header: tensor {name!r} is {dtype} {list(shape)} in {end - start:,} bytes; fetch it again"
        )
    return StoredTensor(file=file, start=base + start, dtype=dtype, shape=shape)
