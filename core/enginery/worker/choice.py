"""What is decided before anything heavy happens: the checkpoint, its family, the settings, the backends and the operations."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from enginery.checkpoint.files import with_own_head
from enginery.checkpoint.folder import end_of_sequence, find_folder, find_tokenizer_folder, read_config, stated_eos_ids, with_dtype
from enginery.config.resolve import DeviceFacts, Settings, resolve
from enginery.config.schema import Decision, EngineOptions
from enginery.config.sources import served_names
from enginery.contracts.attention import SparseCoordinatorSpec
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.model import CheckpointSpec, Feature, ModelFacts, ModelSpec
from enginery.contracts.ops import OpNeeds, OpSpec
from enginery.contracts.parallel import WHOLE, ParallelFacts
from enginery.contracts.weights import FormatNeeds, WeightFormatSpec
from enginery.errors import Unsupported
from enginery.kv.pool import TORCH_DTYPES
from enginery.plugin.boundary import described
from enginery.plugin.records import Offer, absent_plugins
from enginery.plugin.registry import Registry
from enginery.plugin.selection import op_winners, select_ops, weigh_ops
from enginery.speculate.combs import num_verified
from enginery.worker.attention_choice import (
    AttentionChoice,
    KernelWish,
    choose_attention,
    choose_first,
    missing_kernels,
    unless_attention_changes,
    verifying_drafts,
)
from enginery.worker.device import device_facts, of_one_rank, torch_device
from enginery.worker.drafts.choice import ChosenDrafter, choose_drafter, drafter_decisions, refuse_trees
from enginery.worker.needs import LayerNeeds
from enginery.worker.paths.results import ModelResults
from enginery.worker.weights.formats import choose_format, kept_schemes, stated_quantization
from enginery.worker.weights.shares import stage_of
from enginery.worker.weights.stage_costs import divide_stages

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where the model comes from. names: what it is served as. dtype_from: what says its dtype. random: it has no own weights."""

    folder: Path
    tokenizer_folder: Path
    names: tuple[str, ...]
    config: Mapping[str, Any]
    dtype_from: str
    eos_token_ids: frozenset[int]
    note: str
    random: bool

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """All that was decided.

    first_attention: the backends to begin with while kernels of `attention` are compiled; None: begin with `attention`.
    to_compile: what `attention` lacks. considered: every attention backend and set of operations, with why it was refused.
    draft_siblings: tokens that are verified beside each that a draft model guesses. taps: hidden states that a draft model takes
    from this one. reads: of a draft model, see `DrafterSpec`. parallel: the part that is run here.
    """

    checkpoint: Checkpoint
    family: Offer[ModelSpec]
    facts: ModelFacts
    device_facts: DeviceFacts
    device: torch.device
    settings: Settings
    attention: AttentionChoice
    first_attention: AttentionChoice | None
    to_compile: tuple[KernelWish, ...]
    coordinator: Offer[SparseCoordinatorSpec] | None
    drafter: Offer[DrafterSpec] | None
    draft_length: int
    draft_siblings: int
    op_needs: OpNeeds
    ops: tuple[Offer[OpSpec], ...]
    weight_format: Offer[WeightFormatSpec] | None
    considered: tuple[str, ...]
    decisions: tuple[Decision, ...]
    taps: tuple[Feature, ...] = ()
    reads: tuple[int, ...] = ()
    parallel: ParallelFacts = WHOLE

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.settings.dtype]

    @property
    def attentions(self) -> list[AttentionChoice]:
        """All that will run."""
        return [self.attention] if self.first_attention is None else [self.attention, self.first_attention]

    @property
    def num_seats(self) -> int:
        """For running requests; they are numbered through all lanes."""
        return self.parallel.num_lanes * self.settings.max_batch_requests

    @property
    def most_drafts(self) -> int:
        """Tokens of a request that a step verifies, at the most."""
        return num_verified(self.draft_length, self.draft_siblings)

    @property
    def results(self) -> ModelResults:
        width, vocab_size = (self.facts.hidden_size, self.facts.vocab_size) if self.parallel.is_last_stage else (0, 0)
        return ModelResults(width, vocab_size, self.family.source, self.dtype)


def choose(
    asked: EngineOptions,
    registry: Registry,
    device: DeviceFacts | None = None,
    *,
    parallel: ParallelFacts = WHOLE,
    found: Checkpoint | None = None,
) -> Choice:
    """All that can be decided, and refused, from facts alone, for a rank's own layers. device, found: those asked for if None."""
    checkpoint = found or find_checkpoint(asked, registry, warns=parallel.rank == 0)
    family, family_reason = registry.find_model(checkpoint.config)
    facts = described(family, checkpoint.config, f"the model in {checkpoint.folder}")
    device = of_one_rank(device or device_facts(asked.device, asked.num_threads), parallel, is_shared=asked.listen is None)
    settings = resolve(asked, device, facts, config=checkpoint.config, dtype_from=checkpoint.dtype_from)
    op_needs = OpNeeds(device=device.kind, dtype=settings.dtype, compute_capability=device.compute_capability)
    ops = select_ops(op_needs, registry.offers(OpSpec))
    weight_format, format_decisions = _weight_format(checkpoint.config, registry, op_needs, ops)
    dtype, kept = TORCH_DTYPES[settings.dtype], kept_schemes(ops)
    parallel, staged = divide_stages(parallel, family, facts, checkpoint.config, dtype, weight_format=weight_format, kept=kept)
    needs = LayerNeeds.of(stage_of(facts, parallel, family=f"family {family.name!r}").memory, settings, device)
    drafter = _drafter_beside(checkpoint, asked, registry, needs)
    refuse_trees(drafter, facts, parallel, max_model_len=settings.max_model_len)
    needs = verifying_drafts(needs, drafter)
    attention, attention_decisions = choose_attention(asked, registry, needs)
    to_compile = missing_kernels(attention, registry, needs)
    first_attention, first_decisions = choose_first(asked, registry, to_compile, needs=needs)
    return Choice(
        checkpoint=replace(checkpoint, eos_token_ids=frozenset(e for e in checkpoint.eos_token_ids if 0 <= e < facts.vocab_size)),
        family=family,
        facts=facts,
        device_facts=device,
        device=torch_device(asked.device),
        settings=settings,
        attention=attention,
        first_attention=first_attention,
        to_compile=to_compile,
        coordinator=_coordinator(asked, registry, attention),
        drafter=drafter.offer,
        draft_length=drafter.length,
        draft_siblings=drafter.siblings,
        op_needs=op_needs,
        ops=ops,
        weight_format=weight_format,
        considered=(*attention.considered, *_considered_ops(op_needs, registry)),
        parallel=parallel,
        decisions=(
            Decision(setting="model", value=checkpoint.name, reason=checkpoint.note or str(checkpoint.folder)),
            Decision(setting="family", value=family.name, reason=f"{family_reason}, from {family.source}", source=family.source),
            *settings.decisions,
            *staged,
            *_rank_decisions(parallel, family, facts),
            *attention_decisions,
            *first_decisions,
            *format_decisions,
            *op_decisions(ops),
            policy_decision(asked, registry),
            *drafter_decisions(drafter),
        ),
    )


def _drafter_beside(checkpoint: Checkpoint, asked: EngineOptions, registry: Registry, needs: LayerNeeds) -> ChosenDrafter:
    """needs: of attention without a drafter."""
    shipped = shipped_drafters(checkpoint, registry)
    drafter = choose_drafter(asked, registry, shipped=shipped, config=checkpoint.config, folder=checkpoint.folder)
    if asked.drafter != "auto" or drafter.offer is None:
        return drafter
    return unless_attention_changes(drafter, asked, registry, needs)


def _rank_decisions(parallel: ParallelFacts, family: Offer[ModelSpec], facts: ModelFacts) -> tuple[Decision, ...]:
    if parallel.num_lanes == 1:
        ranks = parallel.tensor_size
        reason = f"each head reads all of them; --dp-attention {ranks} in place of --tp holds {ranks} times as many tokens"
        whole = Decision(setting="latents", value="whole on each rank", reason=reason)
        return (whole,) if ranks > 1 and facts.has_latents and family.spec.lanes else ()
    experts = "some of the experts each" if parallel.cuts_experts else "a part of every expert each"
    reason = f"each with requests and KV memory of its own; feed-forwards are of all {parallel.num_ranks} ranks, with {experts}"
    return (Decision(setting="lanes", value=str(parallel.num_lanes), reason=reason),)


def _coordinator(asked: EngineOptions, registry: Registry, attention: AttentionChoice) -> Offer[SparseCoordinatorSpec] | None:
    """Raises `Unsupported` where no chosen backend would ask it anything."""
    if asked.sparse_coordinator == "off":
        return None
    coordinator = registry.named(SparseCoordinatorSpec, asked.sparse_coordinator, "sparse coordinator")
    if not any(offer.spec.capabilities.sparse for offer in attention.by_role.values()):
        raise Unsupported(
            f"--sparse-coordinator {coordinator.name}, from {coordinator.source}, would be built and never asked: "
            f"the attention backend {attention.name} is not sparse; name one that is, or leave --sparse-coordinator out"
        )
    return coordinator


def _considered_ops(needs: OpNeeds, registry: Registry) -> list[str]:
    considered = [f"ops: {line}" for line in weigh_ops(needs, registry.offers(OpSpec))]
    for line in considered:
        log.debug("%s", line)
    return considered


def _weight_format(
    config: Mapping[str, Any], registry: Registry, needs: OpNeeds, ops: Sequence[Offer[OpSpec]]
) -> tuple[Offer[WeightFormatSpec] | None, tuple[Decision, ...]]:
    """None: the weights are plain."""
    stated = stated_quantization(config)
    if stated is None:
        return None, ()
    format_needs = FormatNeeds(config=stated, device=needs.device, dtype=needs.dtype, compute_capability=needs.compute_capability)
    offer, why = choose_format(stated, registry.offers(WeightFormatSpec), format_needs, absent=absent_plugins(registry.records))
    stays = [f"{scheme} for {name}" for name, schemes in kept_schemes(ops).items() for scheme in schemes]
    reason = f"{why}, from {offer.source}; in memory stays {', '.join(stays) or 'nothing'} of it, the rest becomes {needs.dtype}"
    return offer, (Decision(setting="weight format", value=offer.name, reason=reason, source=offer.source),)


def op_decisions(offers: Sequence[Offer[OpSpec]]) -> list[Decision]:
    """One for each set that an operation is taken from. offers: those that refuse nothing, the highest priority first."""
    taken: dict[str, list[str]] = {}
    for operation, winner in op_winners(offers).items():
        taken.setdefault(winner.name, []).append(operation)
    why = "the highest priority that has them and refuses nothing"
    return [
        Decision(
            setting="ops", value=f"{name}: {', '.join(taken[name])}", reason=f"{why}, from {offer.source}", source=offer.source
        )
        for offer in offers
        if (name := offer.name) in taken
    ]


def policy_decision(asked: EngineOptions, registry: Registry) -> Decision:
    offer = registry.schedule_policy(asked.schedule_policy)
    why = "auto: first come, first served" if asked.schedule_policy == "auto" else "asked for"
    return Decision(setting="schedule policy", value=offer.name, reason=f"{why}, from {offer.source}")


def find_checkpoint(asked: EngineOptions, registry: Registry, *, warns: bool = True) -> Checkpoint:
    """The checkpoint asked for, or the best that is installed. warns: of a head that is not tied, which one rank says for all."""
    model = registry.default_checkpoint().name if asked.model is None else asked.model
    folder = find_folder(model, registry, revision=asked.revision)
    offer, config, random = registry.checkpoint(model), read_config(folder), asked.load_format == "dummy"
    tokenizer_folder = find_tokenizer_folder(asked, registry, folder)
    return Checkpoint(
        folder=folder,
        tokenizer_folder=tokenizer_folder,
        names=served_names(asked, model),
        config=with_dtype(config, None) if random else with_own_head(with_dtype(config, folder), folder, warns=warns),
        dtype_from="config.json" if random or with_dtype(config, None).get("dtype") else "most weights",
        eos_token_ids=stated_eos_ids(folder, config) | end_of_sequence(tokenizer_folder),
        note=offer.spec.note if offer and offer.spec.folder == folder else "",
        random=random,
    )


def shipped_drafters(checkpoint: Checkpoint, registry: Registry) -> Mapping[str, Path]:
    """Folders of the draft models that come with a checkpoint, by drafter."""
    return next((offer.spec.drafters for offer in registry.offers(CheckpointSpec) if offer.spec.folder == checkpoint.folder), {})
