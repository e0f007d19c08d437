"""What is decided before anything heavy happens: the checkpoint, its family, the settings, the backends and the operations."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from enginery.checkpoint.folder import find_folder, find_tokenizer_folder, read_config, read_json
from enginery.config.resolve import DeviceFacts, Settings, resolve
from enginery.config.schema import Decision, EngineOptions
from enginery.config.sources import served_names
from enginery.contracts.attention import AttnBackendSpec, AttnNeeds, SparseCoordinatorSpec
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.latent import PrefillStrategy
from enginery.contracts.model import Feature, ModelFacts, ModelSpec
from enginery.contracts.ops import OpNeeds, OpSpec
from enginery.contracts.parallel import WHOLE, ParallelFacts
from enginery.contracts.weights import FormatNeeds, WeightFormatSpec
from enginery.errors import CheckpointError, Unsupported
from enginery.kv.pool import TORCH_DTYPES
from enginery.plugin.boundary import inside
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.plugin.selection import op_winners, weigh_ops
from enginery.worker.device import device_facts, of_one_rank, torch_device
from enginery.worker.drafts.choice import choose_drafter, drafter_decisions, refuse_trees
from enginery.worker.needs import attn_needs, by_phase
from enginery.worker.paths.results import ModelResults
from enginery.worker.weights.formats import choose_format, kept_schemes, stated_quantization
from enginery.worker.weights.shares import stage_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where the model comes from. names: what it is served as. random: it has no weights of its own."""

    folder: Path
    tokenizer_folder: Path
    names: tuple[str, ...]
    config: Mapping[str, Any]
    eos_token_ids: frozenset[int]
    note: str
    random: bool

    @property
    def name(self) -> str:
        """The first of the names that it is served as."""
        return self.names[0]


ROLES: Final = ("softmax", "prefill", "decode", "recurrent")


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The leaves, by what they are for. One backend for prefills and decoding, unless the user asked for two; None: not needed.

    considered: every candidate of each role, with why it was refused.
    """

    softmax: Offer[AttnBackendSpec] | None
    prefill: Offer[AttnBackendSpec] | None
    decode: Offer[AttnBackendSpec] | None
    recurrent: Offer[AttnBackendSpec] | None
    considered: tuple[str, ...] = ()

    @property
    def by_role(self) -> dict[str, Offer[AttnBackendSpec]]:
        """Those that there are."""
        return {role: offer for role in ROLES if (offer := vars(self)[role]) is not None}

    @property
    def name(self) -> str:
        """The names, for people and metrics."""
        return "+".join(dict.fromkeys(offer.spec.name for offer in self.by_role.values()))


@dataclass(frozen=True, kw_only=True)
class KernelWish:
    """A chosen backend whose kernels are not all compiled, and what it was chosen for. missing: their names."""

    backend: str
    needs: AttnNeeds
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """All that was decided.

    first_attention: the backends to begin with while kernels of `attention` are compiled; None: begin with `attention`.
    to_compile: what `attention` lacks. considered: every attention backend and set of operations, with why it was refused. taps:
    hidden states that a draft model takes from this one. reads: of a draft model, see `DrafterSpec`. parallel: the part that is run
    here; a draft model is whole.
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
        """The settings' dtype as torch knows it."""
        return TORCH_DTYPES[self.settings.dtype]

    @property
    def results(self) -> ModelResults:
        """What the family's model has to return."""
        return ModelResults(self.facts.hidden_size, self.facts.vocab_size, self.family.source)


def choose(
    asked: EngineOptions, registry: Registry, device: DeviceFacts | None = None, *, parallel: ParallelFacts = WHOLE
) -> Choice:
    """Everything that can be decided, and refused, from configuration and facts alone. device: None for the one asked for.

    parallel: the rank that will run it; its needs are those of its own layers and heads.
    """
    checkpoint = find_checkpoint(asked, registry)
    family, family_reason = registry.find_model(checkpoint.config)
    with inside(family, f"describe the model in {checkpoint.folder}"):
        facts = family.spec.describe(checkpoint.config)
    device = of_one_rank(device or device_facts(asked.device, asked.num_threads), parallel)
    settings = resolve(asked, device, facts, config=checkpoint.config)
    shipped = shipped_drafters(checkpoint, registry)
    config, folder = checkpoint.config, checkpoint.folder
    drafter = choose_drafter(asked, registry, device=device.kind, shipped=shipped, config=config, folder=folder)
    refuse_trees(drafter, facts, parallel, max_model_len=settings.max_model_len)
    layers, drafts = stage_of(facts, parallel).memory, {"verifies": drafter.offer is not None, "trees": drafter.trees}
    softmax, recurrent = (attn_needs(layers, settings, device, recurrent=each, **drafts) for each in (False, True))
    attention, attention_decisions = choose_attention(asked, registry, softmax=softmax, recurrent=recurrent)
    to_compile = missing_kernels(attention, registry, softmax=softmax, recurrent=recurrent)
    first_attention, first_decisions = choose_first(asked, registry, to_compile, softmax=softmax, recurrent=recurrent)
    coordinator = None if asked.sparse_coordinator == "off" else registry.sparse_coordinator(asked.sparse_coordinator)
    if coordinator is not None:
        refuse_idle_coordinator(coordinator, attention)
    op_needs = OpNeeds(device=device.kind, dtype=settings.dtype, compute_capability=device.compute_capability)
    ops = registry.select_ops(op_needs)
    weight_format, format_decisions = _weight_format(checkpoint.config, registry, op_needs, ops)
    return Choice(
        checkpoint=checkpoint,
        family=family,
        facts=facts,
        device_facts=device,
        device=torch_device(asked.device),
        settings=settings,
        attention=attention,
        first_attention=first_attention,
        to_compile=to_compile,
        coordinator=coordinator,
        drafter=drafter.offer,
        draft_length=drafter.length,
        op_needs=op_needs,
        ops=ops,
        weight_format=weight_format,
        considered=(*attention.considered, *_considered_ops(op_needs, registry)),
        parallel=parallel,
        decisions=(
            Decision(setting="model", value=checkpoint.name, reason=checkpoint.note or str(checkpoint.folder)),
            Decision(setting="family", value=family.name, reason=f"{family_reason}, from {family.source}", source=family.source),
            *settings.decisions,
            *attention_decisions,
            *first_decisions,
            *format_decisions,
            *op_decisions(ops),
            policy_decision(asked, registry),
            *drafter_decisions(drafter),
        ),
    )


def _considered_ops(needs: OpNeeds, registry: Registry) -> list[str]:
    considered = [f"ops: {line}" for line in weigh_ops(needs, registry.ops)]
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
    offer, why = choose_format(stated, registry.weight_formats, format_needs)
    stays = [f"{scheme} for {name}" for name, schemes in kept_schemes(ops).items() for scheme in schemes]
    reason = f"{why}, from {offer.source}; in memory stays {', '.join(stays) or 'nothing'} of it, the rest becomes {needs.dtype}"
    decision = Decision(setting="weight format", value=offer.name, reason=reason, source=offer.source)
    return offer, (decision,)


def choose_attention(
    asked: EngineOptions,
    registry: Registry,
    *,
    softmax: AttnNeeds,
    recurrent: AttnNeeds,
    leave_out: Collection[str] = (),
) -> tuple[AttentionChoice, tuple[Decision, ...]]:
    """A backend for each role that the model has work for. softmax, recurrent: needs of those layers.

    Left to choose, it takes two for the softmax layers where the best one for prefills is not the best one for decoding.
    leave_out: backends that are no candidates.
    """
    softmax = _needing_ragged(softmax, asked.mla_prefill)
    chosen: dict[str, Offer[AttnBackendSpec]] = {}
    decisions: list[Decision] = []
    considered: list[str] = []
    for role, (name, needs) in _wanted(asked, registry, softmax=softmax, recurrent=recurrent, leave_out=leave_out).items():
        selection = registry.select_attn_backend(name, needs, leave_out=leave_out)
        considered += [f"{role}: {candidate}" for candidate in selection.candidates]
        chosen[role] = selection.winner
        reason = "asked for" if name != "auto" else "highest priority that refuses nothing"
        setting = "attention" if role == "softmax" else f"{role} attention"
        source = selection.winner.source
        decisions.append(Decision(setting=setting, value=selection.winner.name, reason=f"{reason}, from {source}", source=source))
    for line in considered:
        log.debug("attention backend, %s", line)
    return AttentionChoice(**{role: chosen.get(role) for role in ROLES}, considered=tuple(considered)), tuple(decisions)


def op_decisions(offers: Sequence[Offer[OpSpec]]) -> list[Decision]:
    """One for each set that an operation is taken from. offers: those that refuse nothing, the highest priority first."""
    taken: dict[str, list[str]] = {}
    sources = {offer.spec.name: offer for offer in offers}
    for operation, offer in op_winners(offers).items():
        taken.setdefault(offer.spec.name, []).append(operation)
    return [
        Decision(
            setting="ops",
            value=f"{name}: {', '.join(operations)}",
            reason=f"the highest priority that has them and refuses nothing, from {sources[name].source}",
            source=sources[name].source,
        )
        for name, operations in taken.items()
    ]


def policy_decision(asked: EngineOptions, registry: Registry) -> Decision:
    """The order among waiting requests."""
    offer = registry.schedule_policy(asked.schedule_policy)
    why = "auto: first come, first served" if asked.schedule_policy == "auto" else "asked for"
    return Decision(setting="schedule policy", value=offer.name, reason=f"{why}, from {offer.source}")


def refuse_idle_coordinator(coordinator: Offer[SparseCoordinatorSpec], attention: AttentionChoice) -> None:
    """Raise `Unsupported` where no chosen backend would ask the coordinator anything."""
    if not any(offer.spec.capabilities.sparse for offer in attention.by_role.values()):
        raise Unsupported(
            f"--sparse-coordinator {coordinator.name}, from {coordinator.source}, would be built and never asked: "
            f"the attention backend {attention.name} is not sparse; name one that is, or leave --sparse-coordinator out"
        )


def _wanted(
    asked: EngineOptions, registry: Registry, *, softmax: AttnNeeds, recurrent: AttnNeeds, leave_out: Collection[str]
) -> dict[str, tuple[str, AttnNeeds]]:
    """Each role that the model has work for: the name that is asked for, or auto, and what the role needs."""
    wanted = {"softmax": (asked.attention_backend, softmax)}
    if _is_split(asked, registry, softmax, leave_out=leave_out):
        phases = by_phase(softmax)
        wanted = {
            "prefill": (asked.prefill_attention_backend or asked.attention_backend, phases["prefill"]),
            "decode": (asked.decode_attention_backend or asked.attention_backend, phases["decode"]),
        }
    wanted["recurrent"] = (asked.linear_attention_backend, recurrent)
    return {role: (name, needs) for role, (name, needs) in wanted.items() if needs.layers}


def _is_split(asked: EngineOptions, registry: Registry, softmax: AttnNeeds, *, leave_out: Collection[str]) -> bool:
    """Whether prefills and decoding have a backend each: both are named, or the best for one is not the best for the other."""
    if asked.prefill_attention_backend is not None or asked.decode_attention_backend is not None:
        return True
    if not softmax.layers or asked.attention_backend != "auto":
        return False
    phases = by_phase(softmax).values()
    return len({registry.select_attn_backend("auto", needs, leave_out=leave_out).winner.name for needs in phases}) > 1


def missing_kernels(
    chosen: AttentionChoice, registry: Registry, *, softmax: AttnNeeds, recurrent: AttnNeeds
) -> tuple[KernelWish, ...]:
    """What the chosen backends have to compile before they can run."""
    needs_of = {"softmax": softmax, "recurrent": recurrent, **by_phase(softmax)}
    wishes = []
    for role, offer in chosen.by_role.items():
        store, needs = offer.spec.kernel_store, needs_of[role]
        if store is None:
            continue
        with inside(offer, f"look for the compiled kernels of {offer.name!r}"):
            missing = tuple(store.missing(needs, registry.options_for(offer.name)))
        if missing:
            wishes.append(KernelWish(backend=offer.name, needs=needs, missing=missing))
    return tuple(wishes)


def choose_first(
    asked: EngineOptions,
    registry: Registry,
    to_compile: Sequence[KernelWish],
    *,
    softmax: AttnNeeds,
    recurrent: AttnNeeds,
) -> tuple[AttentionChoice | None, tuple[Decision, ...]]:
    """The best backends that need nothing compiled. None where nothing is missing, or nothing else serves: then the start waits.

    A backend that was asked for by name is waited for too, and all are where that was asked for.
    """
    late = {wish.backend for wish in to_compile}
    named = {
        asked.attention_backend,
        asked.prefill_attention_backend,
        asked.decode_attention_backend,
        asked.linear_attention_backend,
    }
    while late and not (asked.wait_for_kernels or late & named):
        try:
            chosen, _ = choose_attention(asked, registry, softmax=softmax, recurrent=recurrent, leave_out=late)
        except Unsupported:
            break
        slow = {wish.backend for wish in missing_kernels(chosen, registry, softmax=softmax, recurrent=recurrent)}
        if not slow:
            waited_for = " and ".join(dict.fromkeys(wish.backend for wish in to_compile))
            source = " and ".join(dict.fromkeys(str(offer.source) for offer in chosen.by_role.values()))
            reason = f"begins, while the kernels of {waited_for} are compiled, from {source}"
            return chosen, (Decision(setting="attention at first", value=chosen.name, reason=reason, source=source),)
        late |= slow
    return None, ()


def _needing_ragged(needs: AttnNeeds, strategy: str) -> AttnNeeds:
    """With what a strategy that was asked for needs, so that a backend without it is refused now, not batch after batch."""
    if strategy in ("auto", PrefillStrategy.ABSORBED):
        return needs
    has_latents = any(layer.latent is not None for layer in needs.layers)
    return dataclasses.replace(needs, mla_ragged=has_latents, lse=has_latents and strategy == PrefillStrategy.CHUNKED)


def find_checkpoint(asked: EngineOptions, registry: Registry) -> Checkpoint:
    """The checkpoint asked for, or the best that is installed."""
    model = registry.default_checkpoint().name if asked.model is None else asked.model
    folder = find_folder(model, registry, revision=asked.revision)
    offer = registry.checkpoint(model)
    shipped = offer.spec if offer and offer.spec.folder == folder else None
    config = read_config(folder)
    return Checkpoint(
        folder=folder,
        tokenizer_folder=find_tokenizer_folder(asked, registry, folder),
        names=served_names(asked, model),
        config=config,
        eos_token_ids=_eos_token_ids(folder, config),
        note=shipped.note if shipped else "",
        random=asked.load_format == "dummy",
    )


def shipped_drafters(checkpoint: Checkpoint, registry: Registry) -> Mapping[str, Path]:
    """Folders of the draft models that come with a checkpoint, by drafter."""
    return next((offer.spec.drafters for offer in registry.checkpoints if offer.spec.folder == checkpoint.folder), {})


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """generation_config.json states it, else config.json; one id or several."""
    stated = read_json(folder / "generation_config.json").get("eos_token_id")
    stated = config.get("eos_token_id") if stated is None else stated
    if stated is None:
        return frozenset()
    ids = stated if isinstance(stated, list) else [stated]
    if not all(isinstance(one, int) for one in ids):
        raise CheckpointError(f"eos_token_id of {folder} is {stated!r}, which must be a token id or a list of them")
    return frozenset(ids)
