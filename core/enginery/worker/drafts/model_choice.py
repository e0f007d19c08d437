"""The model that drafts, as a choice of its own beside the target's: its checkpoint, its family, its attention backends."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from enginery.checkpoint.folder import find_folder, read_config
from enginery.config.schema import EngineOptions
from enginery.contracts.batch import FULL
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.model import ModelFacts, ModelSpec
from enginery.errors import CheckpointError, ConfigError, Unsupported
from enginery.plugin.boundary import described, inside
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.worker.attention_choice import AttentionChoice, choose_attention
from enginery.worker.choice import Choice, shipped_drafters
from enginery.worker.needs import LayerNeeds, verifying
from enginery.worker.weights.formats import stated_quantization
from enginery.worker.weights.shares import stage_of

_log: Final = logging.getLogger(__name__)


def choose_draft_model(asked: EngineOptions, registry: Registry, target: Choice) -> Choice | None:
    """What the model is run with that drafts for `target`; None where no model drafts. Settings are the target's.

    Raises `ConfigError` for a model that cannot draft for this target.
    """
    offer = target.drafter
    if offer is None or (folder := find_draft_folder(asked, registry, target)) is None:
        return None
    config = read_config(folder)
    stands_alone = offer.spec.stands_alone
    family = registry.find_model(config)[0] if stands_alone else _own_family(offer, config["architectures"], folder)
    facts = described(family, config, f"the draft model in {folder}")
    _refuse_misfits(facts, offer, config, target=target, folder=folder)
    reads = () if offer.spec.reads is None else _layers_read(facts, offer, config, target=target)
    checkpoint = dataclasses.replace(target.checkpoint, folder=folder, names=(str(folder),), config=config, note="")
    return dataclasses.replace(
        target,
        checkpoint=checkpoint,
        family=family,
        facts=facts,
        attention=_choose_attention(asked, registry, facts, target, reads=bool(reads)),
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
        if asked.draft_model is not None:
            raise ConfigError(f"--drafter is {offer.name}, a part of the model's own checkpoint; leave --draft-model out")
        return target.checkpoint.folder
    shipped = shipped_drafters(target.checkpoint, registry)
    if asked.draft_model is not None:
        return find_folder(asked.draft_model, registry)
    if offer.name not in shipped:
        raise ConfigError(f"--drafter is {offer.name}, a model; give its checkpoint with --draft-model")
    return shipped[offer.name]


def _own_family(offer: Offer[DrafterSpec], architectures: Sequence[str], folder: Path) -> Offer[ModelSpec]:
    """What builds the drafter's own model."""
    spec = offer.spec.model
    assert spec is not None, "a drafter that is a model states which"
    if not set(architectures) & set(spec.architectures):
        raise ConfigError(
            f"--drafter is {offer.name}, which runs {', '.join(spec.architectures)}, but {folder} is of the architecture "
            f"{', '.join(architectures)}; give another --draft-model, or --drafter standalone for a whole model"
        )
    return Offer(
        spec=spec, group=offer.group, name=offer.name, plugin=offer.plugin, distribution=offer.distribution, version=offer.version
    )


def _choose_attention(
    asked: EngineOptions, registry: Registry, facts: ModelFacts, target: Choice, *, reads: bool
) -> AttentionChoice:
    """The backends of its own layers, or the target's, if it reads what these wrote.

    Those that are asked for are the target's: where one cannot run a draft model, another is found.
    """
    if reads:
        return target.attention
    layers = stage_of(facts, target.parallel).memory
    softmax, recurrent = LayerNeeds.of(layers, target.settings, target.device_facts)
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
    if facts.vocab_size != wanted.vocab_size:
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
        raise CheckpointError(
            f"the draft model in {folder} has quantised weights, which draft models cannot have yet; give another"
        )
