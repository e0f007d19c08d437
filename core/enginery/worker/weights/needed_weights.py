"""What a family's model asks for when it is built, recorded: no memory, no device, no checkpoint is needed.

And what of it a token is multiplied with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import torch

from enginery.attention.socket import LayerSocket
from enginery.checkpoint.files import READABLE
from enginery.checkpoint.folder import text_part
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL
from enginery.contracts.model import ModelContext, ModelFacts, ModelSpec
from enginery.contracts.parallel import WHOLE, ParallelFacts
from enginery.contracts.weights import Scheme
from enginery.kv.pool import PagedKVPool
from enginery.nn.parallel import SingleRank
from enginery.nn.reference_ops import reference_ops
from enginery.worker.weights.formats import FormatReader
from enginery.worker.weights.matrices import Matrices, RankSetting
from enginery.worker.weights.rank import RankWeights
from enginery.worker.weights.shares import stage_of
from enginery.worker.weights.store import Slice, WeightRecord

_EXPERT: Final = re.compile(r"(.*\bexperts)\.(\d+)\.")
_PER_TOKEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


def needed_weights(
    family: ModelSpec,
    config: Mapping[str, object],
    dtype: torch.dtype,
    *,
    reader: FormatReader | None = None,
    kept: Mapping[str, frozenset[Scheme]] = MappingProxyType({}),
    parallel: ParallelFacts = WHOLE,
    names: Collection[str] = (),
) -> WeightRecord:
    """The record of a build in `dtype`. reader, kept: see `RankSetting`; by default every piece is plain numbers.

    parallel: the part that is built; by default all of the model. names: of the checkpoint's tensors, see `WeightSource.has`.
    """
    record, ops, facts = WeightRecord(dtype, names=names), reference_ops(), family.describe(config)
    comm, socket, meta, stage = SingleRank(ops), LayerSocket(None), torch.device("meta"), stage_of(facts, parallel)
    setting = RankSetting(ops=ops, comm=comm, parallel=parallel, reader=reader, kept=kept)
    context = ModelContext(
        config=config,
        facts=facts,
        weights=RankWeights(Matrices(record, setting)),
        ops=ops,
        attend=socket.attend,
        advance=socket.advance,
        pool=PagedKVPool(KVGeometry(pages={FULL: 1}, page_size=16, layers=stage.memory, dtype="float32"), meta),
        device=meta,
        dtype=dtype,
        max_positions=64,
        stage=stage,
        comm=comm,
    )
    family.build(context)
    return record


class ReadTensor(NamedTuple):
    """A tensor that products take. num_bytes: as it is stored."""

    name: str
    num_bytes: int
    parameters: int

    @property
    def expert(self) -> tuple[str, str] | None:
        """What its layer's experts are called, and its own expert's number; None: it is of no expert."""
        found = _EXPERT.match(self.name)
        return None if found is None else (found[1], found[2])


def tensors_read(record: WeightRecord, facts: ModelFacts, *, looks_up: bool = True) -> Iterator[ReadTensor]:
    """Every tensor but vectors, once, and but an embedding that is not the head too. looks_up: the record's part of it has one."""
    tables = (piece for piece in record.pieces if piece.shape == (facts.vocab_size, facts.hidden_size))
    embedding = next(tables, None) if looks_up else None  # it is asked for first, and a tied one again, as the head
    for piece in record.pieces:
        if len(piece.shape) > 1 and (piece is not embedding or record.uses[piece] > 1):
            itemsize = min(piece.dtype.itemsize, record.dtype.itemsize)  # a float32 router is stored in the model's dtype
            yield from (ReadTensor(part.name, _stored_bytes(part, itemsize), math.prod(part.shape)) for part in piece.slices)


def _stored_bytes(part: Slice, itemsize: int) -> int:
    if part.scheme is None:
        return math.prod(part.shape) * itemsize
    return sum(math.prod(source.shape) * READABLE[source.dtype].itemsize for source in part.sources if source.dtype is not None)


def is_of_expert(name: str) -> bool:
    """Whether the checkpoint's tensor of that name is of one expert among several."""
    return _EXPERT.match(name) is not None


def expert_share(config: Mapping[str, object], count: int) -> float | None:
    """How much of `count` experts' weights a token is multiplied with. None: config.json does not say."""
    per_token = _stated(config, _PER_TOKEN)
    without_weights = _stated(config, ("zero_expert_num",))  # a token may choose those too
    return per_token / (count + without_weights) if per_token else None


def _stated(config: Mapping[str, object], keys: Iterable[str]) -> int:
    """The first number that config.json has under one of the keys, 0 for none."""
    whole = {**config, **text_part(config)}
    return next((value for key in keys if isinstance(value := whole.get(key), int) and value), 0)
