"""Which drafter guesses next tokens, and how many: decided, or refused, before anything heavy happens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from enginery.checkpoint.files import scan_checkpoint, unstack
from enginery.checkpoint.folder import find_folder, read_config
from enginery.config.schema import Decision, EngineOptions
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.model import ModelFacts, ModelSpec
from enginery.contracts.parallel import ParallelFacts
from enginery.errors import CheckpointError, ConfigError, PluginError
from enginery.plugin.boundary import gives_trees, inside, siblings_of
from enginery.plugin.records import Offer, not_found
from enginery.plugin.registry import Registry
from enginery.worker.weights.needed_weights import needed_weights

MOST_MEASURED: Final = 7  # by what pays, which is measured while the engine runs, see `enginery.speculate.length`
STANDALONE: Final = "standalone"  # the core's own, for models of any family
_NO_ROW: Final = "a step has --max-batch-requests 1, the row of one token, and each guess needs one more"


class ChosenDrafter(NamedTuple):
    """length: tokens of a request in one step, at most. reason: for people to read, empty where nothing was said of drafters.

    trees: whether its guesses may branch. siblings: of a draft model, how many tokens are verified beside each guess.
    """

    offer: Offer[DrafterSpec] | None
    length: int
    reason: str
    trees: bool = False
    siblings: int = 0


def choose_drafter(
    asked: EngineOptions, registry: Registry, *, shipped: Mapping[str, Path], config: Mapping[str, object], folder: Path
) -> ChosenDrafter:
    """What guesses next tokens, and how many of a request in one step.

    shipped: draft models that come with the target, by drafter, the best first. config, folder: the target's.
    Raises `ConfigError` for one that is no part of this target, more than it is good for or has rows for, or what it does not run.
    """
    if asked.drafter == "off":
        return ChosenDrafter(None, 0, "")
    every = _beside(registry, config)
    if asked.drafter == "auto":
        come = (*shipped, *(name for name, each in every.items() if each.spec.suits and is_stored(each.spec, config, folder)))
        offer, why = _best(asked, every, registry, come=come)
        if offer is None:
            return ChosenDrafter(None, 0, why)
    else:
        offer, why = _named(asked, every, registry, config), "asked for"
    length = _length(asked, offer, config)
    options = registry.options_for(offer.name)
    siblings = siblings_of(offer, options) * (length > 0)
    trees = siblings > 0 or gives_trees(offer, options)
    branching = f", each beside its {siblings} likeliest others" if siblings else ", which may branch" if trees else ""
    said = f"{why}, from {offer.source}; up to {length} tokens of a request in a step{branching}"
    return ChosenDrafter(offer, length, said, trees, siblings)


def _beside(registry: Registry, config: Mapping[str, object]) -> dict[str, Offer[DrafterSpec]]:
    return {offer.name: offer for offer in registry.offers(DrafterSpec) if _suits(offer, config)}


def _named(
    asked: EngineOptions, every: Mapping[str, Offer[DrafterSpec]], registry: Registry, config: Mapping[str, object]
) -> Offer[DrafterSpec]:
    name, given = asked.drafter, asked.draft_model
    if (offer := every.get(name)) is not None:
        is_part = offer.spec.suits is not None
        if given is not None and (is_part or not offer.spec.is_model):
            what = "a part of the model's own checkpoint" if is_part else "which runs no model"
            raise ConfigError(f"--drafter is {name}, {what}; leave --draft-model out")
        if asked.max_batch_requests == 1 and asked.draft_length != "0":  # it would guess, and nothing would ever be verified
            raise ConfigError(f"--drafter is {name}, and {_NO_ROW}; take one more than guesses in a step, or leave --drafter out")
        return offer
    names = {"auto", "off", *(offer.name for offer in registry.offers(DrafterSpec))}
    if name in names:
        raise _no_part(name, registry, config)
    raise PluginError(not_found("drafter", name, names, registry.records))


def _no_part(name: str, registry: Registry, config: Mapping[str, object]) -> ConfigError:
    """For a drafter that is a part of other models' checkpoints."""
    models = (offer.spec.model for offer in registry.offers(DrafterSpec) if offer.name == name)
    run, here = {each for model in models if model for each in model.architectures}, config["architectures"]
    assert isinstance(here, list)
    why = "config.json of this one does not say that it has one"
    if not run & set(here):
        why = f"no plugin runs that of {', '.join(here)} yet, only those of {', '.join(sorted(run))}"
    what = f"a part of some models' own checkpoints, and {why}"
    return ConfigError(f"--drafter is {name}, {what}; take another drafter, or leave --drafter out")


def _suits(offer: Offer[DrafterSpec], config: Mapping[str, object]) -> bool:
    """Whether it is none of those that are a part of a checkpoint, or one of the checkpoint with this config.json."""
    spec, architectures = offer.spec, config["architectures"]
    assert isinstance(architectures, list)
    if spec.suits is None:
        return True
    if spec.model is None or not set(architectures) & set(spec.model.architectures):
        return False
    with inside(offer, "look for its layers in config.json"):
        return spec.suits(config)


def is_stored(spec: DrafterSpec, config: Mapping[str, object], folder: Path) -> bool:
    """Whether the checkpoint has its tensors: who copies or converts one may leave them out."""
    return spec.model is not None and not why_not_stored(spec.model, config, folder)


def why_not_stored(model: ModelSpec, config: Mapping[str, object], folder: Path) -> str:
    """What the checkpoint lacks of this model, or is wrong in its config.json for it; nothing where it has all tensors."""
    try:
        stored = unstack(scan_checkpoint(folder), model.stacked_weights)
        needed = needed_weights(model, config, torch.float32, names=stored.keys()).pieces
    except CheckpointError as error:
        return str(error)
    names = (source.name for piece in needed for part in piece.slices for source in part.sources)
    return next((f"it has no tensor {name!r}" for name in names if name not in stored), "")


def _best(
    asked: EngineOptions, every: Mapping[str, Offer[DrafterSpec]], registry: Registry, *, come: Sequence[str]
) -> tuple[Offer[DrafterSpec] | None, str]:
    """The one to take if none is named, and why. come: those whose models come with the target, the best first."""
    if asked.max_batch_requests == 1:
        return None, f"auto: {_NO_ROW}"
    if asked.draft_model is not None:
        return _running(every, find_folder(asked.draft_model, registry)), "auto: runs the draft model that is given"
    for name in come:
        if name in every:
            return every[name], "auto: its draft model comes with this model"
    return None, "auto: no draft model comes with this model, and none is given with --draft-model"


def _running(every: Mapping[str, Offer[DrafterSpec]], folder: Path) -> Offer[DrafterSpec]:
    """What runs the draft model in a folder: a drafter for its architecture, one whose tensors it has, or else any family."""
    config = read_config(folder)
    heads = [offer for offer in every.values() if offer.spec.suits is None and offer.spec.model is not None]
    named = (offer for offer in heads if offer.spec.model and set(config["architectures"]) & set(offer.spec.model.architectures))
    stored = (offer for offer in heads if is_stored(offer.spec, config, folder))  # many name the architecture of the target
    return next(itertools.chain(named, stored), every[STANDALONE])


def _length(asked: EngineOptions, offer: Offer[DrafterSpec], config: Mapping[str, object]) -> int:
    """config: the target's, where the drafter is a part of its checkpoint."""
    most, modules = offer.spec.most, offer.spec.modules
    if modules is not None and (count := modules(config)) > 1:
        most = min(most, count)
    if asked.draft_length == "auto":
        return min(MOST_MEASURED, most)
    if int(asked.draft_length) > most:
        raise ConfigError(
            f"--draft-length is {asked.draft_length}, but {offer.name}, from {offer.source}, is good for {most} at most; "
            "take fewer, or leave --draft-length out"
        )
    if int(asked.draft_length) == 0 and not offer.spec.is_model:
        raise ConfigError(f"--draft-length is 0, so {offer.name} would guess nothing; leave --drafter out, or take more")
    return int(asked.draft_length)


def refuse_trees(chosen: ChosenDrafter, facts: ModelFacts, parallel: ParallelFacts, *, max_model_len: int) -> None:
    """Raises `ConfigError` where drafts may not branch: in a window rows count from the end, and states go along one line."""
    if not chosen.trees or (offer := chosen.offer) is None:
        return
    windows = [layer.sliding_window for layer in facts.layers if layer.sliding_window is not None]
    reasons = {
        "the model has layers with sliding windows": bool(windows) and min(windows) < max_model_len,
        "the model has recurrent layers": facts.has_states,
        "there are several ranks": parallel.num_ranks > 1,
    }
    if found := [reason for reason, there in reasons.items() if there]:
        raise ConfigError(
            f"--drafter is {offer.name}, from {offer.source}, whose guesses branch, and {' and '.join(found)}; chains alone are "
            "verified there: have it give no trees, or take another drafter"
        )


def drafter_decisions(chosen: ChosenDrafter) -> list[Decision]:
    """What guesses, and how much, for people to read; nothing where nothing was asked."""
    if not chosen.reason:
        return []
    name, source = ("off", "") if chosen.offer is None else (chosen.offer.name, chosen.offer.source)
    return [Decision(setting="drafter", value=name, reason=chosen.reason, source=source)]
