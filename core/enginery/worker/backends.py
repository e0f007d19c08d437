"""The attention backend of an engine: leaves by role, and the composites that the model and the settings need around them.

micro-batches ( kinds ( split ( mla ( prefill leaf ), mla ( decode leaf ), mla ( single leaf ) ), window leaf, recurrent leaf ) )
"""

from __future__ import annotations

import itertools
from typing import Final

from enginery.attention.latent import LatentAttention, LatentSettings
from enginery.attention.layer_kinds import LATENTS, LayerKinds
from enginery.attention.micro_batches import MicroBatches
from enginery.attention.phase_split import PhaseSplit
from enginery.attention.relay import BackendRelay
from enginery.attention.watch import Watch
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import AttnBackend, AttnBackendSpec, BackendContext, SparseCoordinator
from enginery.contracts.batch import FULL, WINDOW
from enginery.errors import PluginError, Unsupported
from enginery.kv.arena import DeviceArena
from enginery.kv.pool import PagedKVPool
from enginery.kv.states import RecurrentStatePool
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.worker.attention_choice import AttentionChoice
from enginery.worker.choice import Choice

CORE: Final = "the core"
_SOFTMAX_CHILDREN: Final = {(FULL, False): FULL, (FULL, True): LATENTS, (WINDOW, False): WINDOW}  # by kind, and whether of latents
_numbers: Final = itertools.count()  # of all backends that live in this process: the plan of one is never taken for another's


class AttentionParts:
    """What leaves are built from, with states for the pool's geometry, and an arena of their own.

    role: of the model whose layers they serve. watched: with the checks of `Watch`.
    """

    def __init__(
        self,
        asked: EngineOptions,
        choice: Choice,
        registry: Registry,
        *,
        pool: PagedKVPool,
        coordinator: SparseCoordinator | None = None,
        role: str = "target",
    ) -> None:
        self.choice, self.registry, self.pool, self.coordinator, self.role = choice, registry, pool, coordinator, role
        self.states, self.arena = RecurrentStatePool(pool.geometry, choice.device), DeviceArena(choice.device)
        self.watched = asked.check_attention


def build_backend(parts: AttentionParts, chosen: AttentionChoice, *, micro_batches: bool) -> BackendRelay:
    """Every backend in it is registered and checked."""
    relay = _of_all_kinds(parts, chosen)
    return _composite(parts, MicroBatches(relay)) if micro_batches else relay


def _of_all_kinds(parts: AttentionParts, chosen: AttentionChoice) -> BackendRelay:
    """A backend for each kind of memory, and for latents beside keys; where there is one, and no window, that one alone.

    Raises `Unsupported` for latents of windows.
    """
    kinds = {(parts.pool.geometry.kind_of(layer), layer.latent is not None) for layer in parts.pool.geometry.layers}
    if (WINDOW, True) in kinds:
        raise Unsupported("the model has MLA in windows that contexts outgrow: no backend plans latents of windows")
    children: dict[str, BackendRelay] = {}
    for kind, name in _SOFTMAX_CHILDREN.items():
        if kind in kinds:
            children[name] = _softmax(parts, chosen, prefix=f"{name} " if children else "", latent=name == LATENTS)
    if "recurrent" in chosen.by_role:
        children["state"] = _leaf(parts, chosen.by_role["recurrent"], part="recurrent")
    assert children, "a model without attention layers"
    (first, *others) = children.values()
    return _composite(parts, LayerKinds(**children)) if others or WINDOW in parts.pool.geometry.pages else first


def _softmax(parts: AttentionParts, chosen: AttentionChoice, *, prefix: str, latent: bool) -> BackendRelay:
    """What serves the layers with keys and values, or latents, of one kind of memory."""
    offers = {role: offer for role, offer in chosen.by_role.items() if role != "recurrent"}
    made = {role: _over_leaf(parts, offer, part=f"{prefix}{role}", latent=latent) for role, offer in offers.items()}
    if made.keys() == {"softmax"}:
        return made["softmax"]
    prefill, decode = (made.get(role) or made["softmax"] for role in ("prefill", "decode"))
    return _composite(parts, PhaseSplit(prefill=prefill, decode=decode, single=made.get("single")))


def _over_leaf(parts: AttentionParts, offer: Offer[AttnBackendSpec], *, part: str, latent: bool) -> BackendRelay:
    leaf = _leaf(parts, offer, part=part)
    if not latent:
        return leaf
    pool, chosen, can = parts.pool, parts.choice.settings, offer.spec.capabilities
    settings = LatentSettings(strategy=chosen.mla_prefill, chunk_tokens=chosen.mla_chunk_tokens)
    return _composite(parts, LatentAttention(leaf, capabilities=can, geometry=pool.geometry, pool=pool, settings=settings))


def _leaf(parts: AttentionParts, offer: Offer[AttnBackendSpec], *, part: str) -> BackendRelay:
    name, choice = offer.spec.name, parts.choice
    instance = f"{parts.role}/{choice.parallel.tensor_rank}/{part}/{name}#{next(_numbers)}"
    context = BackendContext(
        instance=instance,
        geometry=parts.pool.geometry,
        pool=parts.pool,
        states=parts.states,
        device=choice.device,
        dtype=choice.dtype,
        arena=parts.arena,
        parallel=choice.parallel,
        coordinator=parts.coordinator,
        options=parts.registry.options_for(name),
    )
    backend = parts.registry.create_attn_backend(name, context)
    relay = BackendRelay(backend, offer.source, instance=instance, watch=Watch() if parts.watched else None)
    if part == "recurrent" and choice.drafter is not None and not relay.has("commit_state"):
        raise PluginError(
            f"{offer.source}: {name} claims to verify drafts of models with recurrent layers, and its {type(backend).__name__} has "
            "no hook commit_state, by which states move behind the accepted ones"
        )
    if offer.spec.capabilities.trees and not relay.has("verify_mask"):
        raise PluginError(
            f"{offer.source}: {name} claims to verify drafts that branch, and its {type(backend).__name__} has no hook "
            "verify_mask, by which it is told what each row sees"
        )
    return relay


def _composite(parts: AttentionParts, backend: AttnBackend) -> BackendRelay:
    return BackendRelay(backend, CORE, watch=Watch() if parts.watched else None)
