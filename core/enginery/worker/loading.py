"""The weights and the model of a choice: recorded and checked first, then read, then bound. The target's, and a draft model's.

A family builds its model twice: on the `meta` device, where it only says which tensors it takes, and from what was loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from enginery.attention.socket import LayerSocket
from enginery.checkpoint.files import StoredTensor, scan_checkpoint, unstack
from enginery.config.schema import EngineOptions
from enginery.contracts.engine import BuildProgress, ReportProgress
from enginery.contracts.model import DraftTarget, Model, ModelContext
from enginery.contracts.ops import OpTable
from enginery.contracts.parallel import WHOLE, Collectives
from enginery.errors import Unsupported
from enginery.kv.pool import PagedKVPool
from enginery.nn.expert_loads import ExpertLoads
from enginery.nn.parallel import SingleRank
from enginery.nn.reference_ops import reference_ops
from enginery.plugin.boundary import checked, inside
from enginery.worker.choice import Choice
from enginery.worker.memory_plan import no_pages
from enginery.worker.weights.formats import FormatReader, kept_schemes, stated_quantization
from enginery.worker.weights.load import load, random_weights
from enginery.worker.weights.matrices import Matrices, RankSetting
from enginery.worker.weights.needed_weights import is_of_expert
from enginery.worker.weights.rank import RankWeights
from enginery.worker.weights.shares import stage_of
from enginery.worker.weights.store import LoadedWeights, PieceStore, WeightRecord, check


@dataclass(frozen=True, kw_only=True, eq=False)
class NeededWeights:
    """What the model will ask for, and where the checkpoint has it; None for random weights. reader: of its format."""

    record: WeightRecord
    stored: Mapping[str, StoredTensor] | None
    reader: FormatReader | None


def check_weights(choice: Choice, *, drafts: bool = False) -> NeededWeights:
    """Compare what the model will ask for with what the checkpoint has. Reads headers only. drafts: `--ep` is another model's."""
    family, checkpoint = choice.family, choice.checkpoint
    stored = None if checkpoint.random else unstack(scan_checkpoint(checkpoint.folder), family.spec.stacked_weights)
    reader = None
    if choice.weight_format is not None:
        reader = FormatReader.load(choice.weight_format, stated_quantization(checkpoint.config) or {}, stored)
    record = of_all = _record(choice, stored, reader)
    if choice.parallel.num_stages > 1 or choice.parallel.cuts_experts:
        of_all = _whole(choice, stored, reader, drafts=drafts)
    if stored is not None:
        tied = ("lm_head.weight",) if checkpoint.config.get("tie_word_embeddings") else ()
        stated = family.spec.ignored_weights
        ignored = stated(checkpoint.config) if callable(stated) else stated
        check(of_all, stored, (*ignored, *tied, "*rotary_emb.*"), folder=checkpoint.folder)  # the tables are our own
    return NeededWeights(record=record, stored=stored, reader=reader)


def _whole(choice: Choice, stored: Mapping[str, StoredTensor] | None, reader: FormatReader | None, *, drafts: bool) -> WeightRecord:
    """Of all ranks and stages. Raises `Unsupported` for what those of other stages cannot share, and for `--ep` without experts."""
    if choice.parallel.num_stages > 1:
        all_stages = dataclasses.replace(choice.parallel, stage=0, num_stages=1, layers_by_stage=())
        record = _record(dataclasses.replace(choice, parallel=all_stages), stored, reader)
    if choice.parallel.cuts_experts:
        record = _record(dataclasses.replace(choice, parallel=WHOLE), stored, reader)
        if not drafts and not any(is_of_expert(part.name) for piece in record.pieces for part in piece.slices):
            raise Unsupported(f"--ep divides experts among ranks, and {choice.checkpoint.name} has none; leave it out")
    return record


def _record(choice: Choice, stored: Mapping[str, StoredTensor] | None, reader: FormatReader | None) -> WeightRecord:
    record, ops, meta = WeightRecord(choice.dtype, names=frozenset(stored or ())), reference_ops(), torch.device("meta")
    setting = rank_setting(choice, reader, ops=ops, comm=SingleRank(ops))
    build_model(choice, record, setting, pool=PagedKVPool(no_pages(choice), meta), socket=LayerSocket(None), device=meta)
    return record


def load_weights(asked: EngineOptions, choice: Choice, needed: NeededWeights, report: ReportProgress) -> LoadedWeights:
    """Read them, and say how far that is; or draw them."""
    if needed.stored is None:
        return random_weights(needed.record, choice.device, seed=asked.seed)

    def tell(done_bytes: int, total_bytes: int) -> None:
        report(BuildProgress(phase="weights", done_bytes=done_bytes, total_bytes=total_bytes))

    return load(needed.record, needed.stored, choice.device, reader=needed.reader, tell=tell)


def rank_setting(
    choice: Choice, reader: FormatReader | None, *, ops: OpTable, comm: Collectives, loads: ExpertLoads | None = None
) -> RankSetting:
    """Where the weights of a choice's model go. reader: of their format. loads: counts what experts are given."""
    kept = kept_schemes(choice.ops)
    return RankSetting(ops=ops, comm=comm, parallel=choice.parallel, reader=reader, kept=kept, loads=loads)


def build_model(
    choice: Choice,
    store: PieceStore,
    setting: RankSetting,
    *,
    pool: PagedKVPool,
    socket: LayerSocket,
    target: DraftTarget | None = None,
    device: torch.device | None = None,
) -> Model:
    """The model bound to its weights and its backend, or built against a record of weights. target: of a draft model.

    device: None for that of the choice.
    """
    context = ModelContext(
        config=choice.checkpoint.config,
        facts=choice.facts,
        weights=RankWeights(Matrices(store, setting)),
        ops=setting.ops,
        attend=socket.attend,
        advance=socket.advance,
        pool=pool,
        device=device or choice.device,
        dtype=choice.dtype,
        max_positions=choice.settings.max_model_len,
        stage=dataclasses.replace(stage_of(choice.facts, choice.parallel), reads=choice.reads),
        comm=setting.comm,
        taps=choice.taps,
        target=target,
    )
    with torch.inference_mode(), inside(choice.family, "build the model"):
        return checked(choice.family, choice.family.spec.build(context), Model)
