"""A model that drafts: chosen beside the target, what it will take counted, then built with keys and values of its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.nn.functional as F

from enginery.attention.socket import LayerSocket
from enginery.checkpoint.files import with_own_head
from enginery.checkpoint.folder import find_folder, read_config
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, Axis, Fill, NamedTensor
from enginery.contracts.drafting import FEATURES, DrafterSpec
from enginery.contracts.engine import report_to_nobody
from enginery.contracts.model import DraftTarget, Feature, Model, ModelFacts, ModelSpec, Tapped
from enginery.contracts.ops import OpTable
from enginery.contracts.parallel import WHOLE, ParallelFacts
from enginery.errors import CheckpointError, ConfigError, Unsupported
from enginery.kv.pool import PagedKVPool, page_bytes
from enginery.nn.parallel import SingleRank
from enginery.plugin.boundary import described, inside
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.worker.attention_choice import AttentionChoice, choose_attention
from enginery.worker.backends import AttentionParts, build_backend
from enginery.worker.choice import Choice, shipped_drafters
from enginery.worker.drafts.choice import why_not_stored
from enginery.worker.drafts.draft_model import DraftModel, pages_behind
from enginery.worker.loading import NeededWeights, build_model, check_weights, load_weights, rank_setting
from enginery.worker.memory_plan import rotary_bytes
from enginery.worker.needs import LayerNeeds, verifying
from enginery.worker.weights.formats import stated_quantization
from enginery.worker.weights.matrices import RankSetting
from enginery.worker.weights.shares import stage_of

_MOST_PADDING: Final = 128  # rows: vocabularies of one tokenizer are padded to several sizes, as in Qwen2.5 of 3B and of 7B
_log: Final = logging.getLogger(__name__)


def choose_draft_model(
    asked: EngineOptions, registry: Registry, target: Choice, parallel: ParallelFacts | None = None
) -> Choice | None:
    """What the model is run with that drafts for `target`; None where no model drafts. Settings are the target's.

    parallel: the part that is run here; None: as of the target. Raises `ConfigError` for a model that cannot draft for this target.
    """
    parallel = parallel or target.parallel
    offer = target.drafter
    if offer is None or (folder := find_draft_folder(asked, registry, target)) is None:
        return None
    config, stands_alone = read_config(folder), offer.spec.stands_alone
    if stands_alone and not target.checkpoint.random:
        config = with_own_head(config, folder, warns=target.parallel.rank == 0)
    family = registry.find_model(config)[0] if stands_alone else _own_family(offer, config, folder)
    facts = described(family, config, f"the draft model in {folder}")
    _refuse_misfits(facts, offer, config, target=target, folder=folder)
    reads = () if offer.spec.reads is None else _layers_read(facts, offer, config, target=target)
    checkpoint = dataclasses.replace(target.checkpoint, folder=folder, names=(str(folder),), config=config, note="")
    return dataclasses.replace(
        target,
        checkpoint=checkpoint,
        family=family,
        facts=facts,
        parallel=parallel,
        attention=target.attention if reads else _choose_attention(asked, registry, facts, target, parallel),
        first_attention=None,
        to_compile=(),
        coordinator=None,
        drafter=None,
        draft_length=0,
        reads=reads,
        weight_format=None if offer.spec.suits is None else target.weight_format,
        considered=(),
        decisions=(),
    )


def find_draft_folder(asked: EngineOptions, registry: Registry, target: Choice) -> Path | None:
    """The target's own, the one that is asked for, or that ships with the target; None where no model drafts."""
    offer = target.drafter
    if offer is None or not offer.spec.is_model:
        return None
    if offer.spec.suits is not None:
        return target.checkpoint.folder
    shipped = shipped_drafters(target.checkpoint, registry)
    if asked.draft_model is not None:
        return find_folder(asked.draft_model, registry)
    if offer.name not in shipped:
        raise ConfigError(f"--drafter is {offer.name}, a model; give its checkpoint with --draft-model")
    return shipped[offer.name]


def _own_family(offer: Offer[DrafterSpec], config: Mapping[str, object], folder: Path) -> Offer[ModelSpec]:
    """Of a head, which is known by its tensors too: many a config.json names the architecture of the target."""
    spec, architectures = offer.spec.model, config["architectures"]
    assert spec is not None, "a drafter that is a model states which"
    assert isinstance(architectures, list)
    if not set(architectures) & set(spec.architectures) and (why := why_not_stored(spec, config, folder)):
        raise ConfigError(
            f"--drafter is {offer.name}, which runs {', '.join(spec.architectures)}, but {folder} is of the architecture "
            f"{', '.join(architectures)}, and is no such head: {why}; give another, or take --drafter standalone for a whole model"
        )
    return dataclasses.replace(cast("Offer[Any]", offer), spec=spec)


def _choose_attention(
    asked: EngineOptions, registry: Registry, facts: ModelFacts, target: Choice, parallel: ParallelFacts
) -> AttentionChoice:
    """Those that are asked for are the target's: where one cannot run a draft model, another is found."""
    softmax, recurrent = LayerNeeds.of(stage_of(facts, parallel).memory, target.settings, target.device_facts)
    needs = LayerNeeds(verifying(softmax, device_lengths=target.device_facts.kind != "cpu"), verifying(recurrent))
    try:
        return choose_attention(asked, registry, needs)[0]
    except Unsupported as error:
        free = dataclasses.replace(asked, attention_backend="auto", prefill_attention_backend=None, decode_attention_backend=None)
        chosen = choose_attention(free, registry, needs)[0]
        _log.info("the draft model's attention is %s: %s", chosen.name, error)
        return chosen


def _layers_read(facts: ModelFacts, offer: Offer[DrafterSpec], config: Mapping[str, object], *, target: Choice) -> tuple[int, ...]:
    """The target's layer that each of its layers reads. Raises `ConfigError` for those that it cannot."""
    assert offer.spec.reads is not None, "it reads the target's"
    with inside(offer, "say which keys and values it reads"):
        reads = tuple(offer.spec.reads(config, target.facts))
    theirs = target.facts.layers
    if any(layer.kind != FULL or layer.latent is not None for layer in theirs):
        raise ConfigError(
            f"--drafter is {offer.name}, which reads the keys and values of {target.checkpoint.name}, and some of its layers have "
            "windows, latents or states, which nobody can read yet; take another drafter"
        )
    there = [theirs[place] for place in reads if 0 <= place < len(theirs)]
    own, read = ([(layer.num_kv_heads, layer.head_dim, layer.value_dim) for layer in layers] for layers in (facts.layers, there))
    if own != read:
        raise ConfigError(
            f"--drafter is {offer.name}, whose {len(facts.layers)} layers read those of {target.checkpoint.name} at {list(reads)}: "
            "each must be there, with as many KV heads, as wide; give the draft model that was trained for it"
        )
    return reads


def _refuse_misfits(
    facts: ModelFacts, offer: Offer[DrafterSpec], config: Mapping[str, object], *, target: Choice, folder: Path
) -> None:
    wanted = target.facts
    padding = _MOST_PADDING if offer.spec.stands_alone else 0
    if not wanted.vocab_size - padding <= facts.vocab_size <= wanted.vocab_size:
        raise ConfigError(
            f"the draft model in {folder} has a vocabulary of {facts.vocab_size:,} tokens and {target.checkpoint.name} one of "
            f"{wanted.vocab_size:,}; both need the same tokenizer"
        )
    if offer.spec.takes_features and offer.spec.features is None and facts.hidden_size != wanted.hidden_size:
        raise ConfigError(
            f"the draft model in {folder} takes hidden states of {facts.hidden_size:,} values, and those of "
            f"{target.checkpoint.name} have {wanted.hidden_size:,}; give the one that was trained for it"
        )
    if facts.has_states:
        raise ConfigError(
            f"the draft model in {folder} has recurrent layers, whose states cannot go back behind a wrong guess yet; give another"
        )
    if offer.spec.suits is None and stated_quantization(config) is not None:
        raise CheckpointError(f"the draft model in {folder} has quantised weights, which it cannot have yet; give another")


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftNeeds:
    """The draft model's choice, and what it takes from its checkpoint. most: guesses of a request in one step.

    taps: hidden states that the target writes for it; none if it takes the one that the target returns, or tokens.
    """

    choice: Choice
    needed: NeededWeights
    most: int
    taps: tuple[Feature, ...]
    target_width: int

    def geometry(self, num_pages: int) -> KVGeometry:
        """Of its keys and values. num_pages: that the target has of the kind `full`, which are of the same size here."""
        settings = self.choice.settings
        return KVGeometry(
            pages={FULL: num_pages + 1 + self._pages_behind},
            page_size=settings.page_size,
            layers=() if self.choice.reads else stage_of(self.choice.facts, self.choice.parallel).memory,
            dtype=settings.kv_dtype,
            num_seats=settings.max_batch_requests,
        )

    @property
    def page_bytes(self) -> int:
        return page_bytes(self.geometry(0))

    @property
    def workspace_bytes(self) -> int:
        """Its activations and angles, the target's hidden states of a whole step, and the pages that belong to seats."""
        facts, width = self.choice.facts, self.choice.dtype.itemsize
        features = max(1, len(self.taps)) * self.target_width
        activations = self.choice.settings.max_batch_tokens * (facts.activation_width + features) * width
        beside = self._captured_bytes + rotary_bytes(self.choice.settings, facts, width)
        return activations + beside + (1 + self._pages_behind) * self.page_bytes

    @property
    def _captured_bytes(self) -> int:
        """Of its graphs: activations and logits of the largest, the target's hidden states, and what its backends allocate."""
        facts, most = self.choice.facts, self.choice.settings.max_graph_requests
        values = facts.activation_width + facts.vocab_size + facts.hidden_size + self.target_width
        offers = () if self.choice.reads else self.choice.attention.by_role.values()
        return most * values * self.choice.dtype.itemsize + sum(offer.spec.capabilities.workspace_bytes for offer in offers)

    @property
    def _pages_behind(self) -> int:
        settings = self.choice.settings
        return settings.max_batch_requests * pages_behind(self.most, settings.page_size)


def find_draft_needs(asked: EngineOptions, registry: Registry, target: Choice) -> DraftNeeds | None:
    """None where no model drafts. Raises `EnginError` for one that cannot draft for this target, or on so many ranks."""
    try:
        found = _divided_or_whole(asked, registry, target)
    except Unsupported as error:
        raise Unsupported(f"--drafter {asked.drafter} cannot run beside {target.checkpoint.name}: {error}") from error
    except CheckpointError as error:  # of two config.json it would not say which
        raise CheckpointError(f"the draft model of --drafter {asked.drafter} cannot be served: {error}") from error
    if found is None:
        return None
    choice, needed = found
    return DraftNeeds(
        choice=choice, needed=needed, most=target.draft_length, taps=_taps(target, choice), target_width=target.facts.hidden_size
    )


def _divided_or_whole(asked: EngineOptions, registry: Registry, target: Choice) -> tuple[Choice, NeededWeights] | None:
    """A model that stands alone, and that the ranks cannot share, is run whole by each of them."""
    try:
        return _checked(asked, registry, target, target.parallel)
    except Unsupported as error:
        stands_alone = target.drafter is not None and target.drafter.spec.stands_alone
        if not stands_alone or not 1 < target.parallel.tensor_size == target.parallel.num_ranks:
            raise
        found = _checked(asked, registry, target, WHOLE)
        if target.parallel.rank == 0:
            _log.info("each rank runs the whole draft model: %s", error)
        return found


def _checked(
    asked: EngineOptions, registry: Registry, target: Choice, parallel: ParallelFacts
) -> tuple[Choice, NeededWeights] | None:
    choice = choose_draft_model(asked, registry, target, parallel)
    return None if choice is None else (choice, check_weights(choice, drafts=True))


def _taps(target: Choice, choice: Choice) -> tuple[Feature, ...]:
    """What the target has to write. Raises `ConfigError` for layers that it has not got."""
    assert target.drafter is not None, "something drafts"
    spec, count = target.drafter.spec, target.facts.num_decoder_layers
    if spec.features is None:
        return ()
    with inside(target.drafter, "say which hidden states it takes"):
        wanted = tuple(spec.features(choice.checkpoint.config, target.facts))
    if strange := [each.layer for each in wanted if not 0 <= each.layer <= count or (each.point == "final" and each.layer < count)]:
        raise ConfigError(
            f"the draft model in {choice.checkpoint.folder} takes hidden states of layer {', '.join(map(str, strange))}, and "
            f"{target.checkpoint.name} has the layers 0 to {count - 1}; give the draft model that was trained for it"
        )
    return () if wanted == (Feature(count, "final"),) else wanted


def tapped_outputs(choice: Choice) -> tuple[NamedTensor, ...]:
    """Room for the hidden states that a draft model takes from the model of this choice."""
    dims = (len(choice.taps) * choice.facts.hidden_size,)
    output = NamedTensor(name=FEATURES, dims=dims, dtype=choice.settings.dtype, axis=Axis.TOKEN, fill=Fill.ZERO)
    return (output,) if choice.taps else ()


def build_draft_model(
    asked: EngineOptions,
    registry: Registry,
    needs: DraftNeeds | None,
    *,
    target: Choice,
    model: Model,
    setting: RankSetting,
    pool: PagedKVPool,
    socket: LayerSocket,
) -> DraftModel | None:
    """Loaded, and bound to a pool and attention backends of its own, or to the target's; None where no model drafts.

    model: the target's, of this rank, whose logits have its columns. setting, pool, socket: the target's too.
    """
    if needs is None or (offer := target.drafter) is None:
        return None
    choice, spec = dataclasses.replace(needs.choice, settings=target.settings), offer.spec
    if not choice.reads:
        pool = PagedKVPool(needs.geometry(pool.geometry.pages[FULL]), choice.device)
        attention = AttentionParts(asked, choice, registry, pool=pool, role="draft")
        socket = LayerSocket(build_backend(attention, choice.attention, micro_batches=False))
    weights, reader = load_weights(asked, choice, needs.needed, report_to_nobody), needs.needed.reader
    known = _as_target(model, target) if spec.takes_features else None
    is_shorter = choice.facts.vocab_size < target.facts.vocab_size
    is_whole = choice.parallel != target.parallel
    ops, comm = _within_table(setting.ops) if is_shorter else setting.ops, SingleRank(setting.ops) if is_whole else setting.comm
    own = rank_setting(choice, reader, ops=ops, comm=comm)
    built = build_model(choice, weights, own, pool=pool, socket=socket, target=known)
    if is_whole:
        built = _OwnColumns(built, choice.facts.vocab_size, target.parallel)
    return DraftModel(
        _Shorter(built, choice) if is_shorter else built,
        socket,
        most=target.draft_length,
        takes_features=spec.takes_features,
        takes_late=any(each.layer == target.facts.num_decoder_layers for each in target.taps),
        reads=bool(choice.reads),
        max_positions=choice.settings.max_model_len,
        knows_lengths=choice.device.type == "cpu",
    )


class _Shorter:
    """A model whose vocabulary the target's begins with. Implements `Model` and `MappedVocabulary`."""

    def __init__(self, model: Model, choice: Choice) -> None:
        self.forward, self.logits = model.forward, model.logits
        self.target_ids = torch.arange(choice.facts.vocab_size, device=choice.device)


class _OwnColumns:
    """A whole model that gives this rank's columns of its logits, as one does that is divided. Implements `Model`."""

    def __init__(self, model: Model, vocab_size: int, parallel: ParallelFacts) -> None:
        self.forward, self._model = model.forward, model
        self._width = -(-vocab_size // parallel.tensor_size)
        self._first = parallel.tensor_rank * self._width

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V / R], zeros behind the last."""
        own = self._model.logits(hidden)[:, self._first : self._first + self._width]
        return F.pad(own, (0, self._width - own.shape[1])).contiguous()


def _within_table(ops: OpTable) -> OpTable:
    """What is behind a table's end, of which only the target's has rows, is its last one."""
    return dataclasses.replace(ops, embed=lambda table, ids: ops.embed(table, ids.clamp(max=len(table) - 1)))


def _as_target(model: Model, choice: Choice) -> DraftTarget:
    if choice.taps and not (isinstance(model, Tapped) and model.taps == choice.taps):
        layers = ", ".join(str(each.layer) for each in choice.taps)
        raise ConfigError(
            f"--drafter takes hidden states of the target's layers {layers}, which the model of {choice.family.source} does not "
            "give: it has no `taps`; take another drafter"
        )
    if not isinstance(model, DraftTarget):
        raise ConfigError(
            f"--drafter uses the target's embedding, and the model of {choice.family.source} has no method `embedded`; "
            "take another drafter"
        )
    return model
