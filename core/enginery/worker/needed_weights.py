"""What a family's model asks for when it is built, recorded: no memory, no device, no checkpoint is needed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from enginery.attention.socket import LayerSocket
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL
from enginery.contracts.model import ModelContext, ModelSpec
from enginery.contracts.parallel import ParallelFacts
from enginery.contracts.weights import Scheme
from enginery.kv.pool import PagedKVPool
from enginery.nn.parallel import SingleRank
from enginery.nn.reference_ops import reference_ops
from enginery.worker.weights.formats import FormatReader
from enginery.worker.weights.matrices import Matrices, RankSetting
from enginery.worker.weights.rank import RankWeights
from enginery.worker.weights.shares import stage_of
from enginery.worker.weights.store import WeightRecord


def needed_weights(
    family: ModelSpec,
    config: Mapping[str, object],
    dtype: torch.dtype,
    *,
    reader: FormatReader | None = None,
    kept: Mapping[str, frozenset[Scheme]] = MappingProxyType({}),
) -> WeightRecord:
    """The record of a single rank's build in `dtype`. reader, kept: see `RankSetting`; by default every piece is plain numbers."""
    record, ops, facts = WeightRecord(dtype), reference_ops(), family.describe(config)
    comm, socket, meta, stage = SingleRank(ops), LayerSocket(None), torch.device("meta"), stage_of(facts, ParallelFacts())
    setting = RankSetting(ops=ops, comm=comm, reader=reader, kept=kept)
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
