"""Which attention backends run a model: by role, and those that begin while kernels of the chosen ones are compiled."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from enginery.config.schema import Decision, EngineOptions
from enginery.contracts.attention import AttnBackendSpec, AttnNeeds
from enginery.contracts.latent import PrefillStrategy
from enginery.errors import Unsupported
from enginery.plugin.boundary import inside
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.plugin.selection import Selection
from enginery.worker.drafts.choice import ChosenDrafter
from enginery.worker.needs import LayerNeeds, by_phase, verifying

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The leaves, by what they are for: softmax, or prefill and decode where these have a backend each; single, where steps that
    decode one request have another; and recurrent. considered: every candidate of each role, with why it was refused.
    """

    by_role: Mapping[str, Offer[AttnBackendSpec]]
    considered: tuple[str, ...]

    @property
    def keeps_states_amid_prompts(self) -> bool:
        """Whether recurrent layers keep states amid an item of a prompt."""
        return "recurrent" in self.by_role and self.by_role["recurrent"].spec.capabilities.prompt_checkpoints

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(offer.spec.name for offer in self.by_role.values()))

    def plans_late(self, *, one: bool) -> bool:
        """Whether what verifies drafts, of any steps or those of one request, has to know lengths when it plans."""
        others = {"prefill", *(("softmax", "decode") if one and "single" in self.by_role else ())}
        return any(not offer.spec.capabilities.verify_lengths for role, offer in self.by_role.items() if role not in others)


@dataclass(frozen=True, kw_only=True)
class KernelWish:
    """A chosen backend whose kernels are not all compiled, and what it was chosen for. missing: their names."""

    backend: str
    needs: AttnNeeds
    missing: tuple[str, ...]


def choose_attention(
    asked: EngineOptions, registry: Registry, needs: LayerNeeds, *, leave_out: Collection[str] = ()
) -> tuple[AttentionChoice, tuple[Decision, ...]]:
    """A backend for each role that the model has work for.

    Left to choose, it takes two for the softmax layers where the best one for prefills is not the best one for decoding, and one
    more where that is not the best one for decoding one request. leave_out: backends that are no candidates.
    """
    of_role = _needs_of(needs._replace(softmax=_needing_ragged(needs.softmax, asked.mla_prefill)))

    @functools.cache  # weighing the candidates takes milliseconds
    def select(name: str, role: str) -> Selection:
        own = f"{'linear' if role == 'recurrent' else role}_attention_backend"
        flag = own if vars(asked).get(own) == name else "attention_backend"
        return registry.select_attn_backend(name, of_role[role], leave_out=leave_out, flag=f"--{flag.replace('_', '-')}")

    chosen: dict[str, Offer[AttnBackendSpec]] = {}
    decisions: list[Decision] = []
    considered: list[str] = []
    for role, name in _wanted(asked, of_role, select).items():
        selection = select(name, role)
        considered += [f"{role}: {candidate}" for candidate in selection.candidates]
        chosen[role] = selection.winner
        reason = "asked for" if name != "auto" else "highest priority that refuses nothing"
        setting = {"softmax": "attention", "single": "attention of one request"}.get(role, f"{role} attention")
        source = selection.winner.source
        decisions.append(Decision(setting=setting, value=selection.winner.name, reason=f"{reason}, from {source}", source=source))
    for line in considered:
        log.debug("attention backend, %s", line)
    return AttentionChoice(by_role=chosen, considered=tuple(considered)), tuple(decisions)


def unless_attention_changes(drafter: ChosenDrafter, asked: EngineOptions, registry: Registry, needs: LayerNeeds) -> ChosenDrafter:
    """The drafter, or none where plain decoding would have other attention backends: then guesses might cost more than they tell.

    needs: without a drafter.
    """
    plain, _ = choose_attention(asked, registry, needs)
    try:
        same = choose_attention(asked, registry, verifying_drafts(needs, drafter))[0].by_role == plain.by_role
    except Unsupported:
        same = False
    return drafter if same else ChosenDrafter(None, 0, f"auto: {plain.name}, the attention backend, verifies no guesses")


def verifying_drafts(needs: LayerNeeds, drafter: ChosenDrafter) -> LayerNeeds:
    """With a drafter or without. Trees are for models without recurrent layers."""
    if drafter.offer is None:
        return needs
    unread = drafter.offer.spec.reads is not None and needs.softmax.device != "cpu"
    return LayerNeeds(verifying(needs.softmax, trees=drafter.trees, device_lengths=unread), verifying(needs.recurrent))


def _needs_of(needs: LayerNeeds) -> dict[str, AttnNeeds]:
    return {**needs._asdict(), **by_phase(needs.softmax)}


def _wanted(asked: EngineOptions, of_role: Mapping[str, AttnNeeds], select: Callable[[str, str], Selection]) -> dict[str, str]:
    """The name that is asked for, or auto, of each role that the model has work for."""

    def differ(name: str, *roles: str) -> bool:
        return name == "auto" and len({select(name, role).winner.name for role in roles}) > 1

    wanted: dict[str, str] = {}
    if of_role["softmax"].layers:
        named = {"prefill": asked.prefill_attention_backend, "decode": asked.decode_attention_backend}
        names = {role: name or asked.attention_backend for role, name in named.items()}
        is_split = any(named.values()) or differ(asked.attention_backend, "prefill", "decode")
        wanted |= names if is_split else {"softmax": asked.attention_backend}
        wanted |= {"single": "auto"} if differ(names["decode"], "decode", "single") else {}
    if of_role["recurrent"].layers:
        wanted["recurrent"] = asked.linear_attention_backend
    return wanted


def missing_kernels(chosen: AttentionChoice, registry: Registry, needs: LayerNeeds) -> tuple[KernelWish, ...]:
    """What the chosen backends have to compile before they can run."""
    needs_of = _needs_of(needs)
    wishes = []
    for role, offer in chosen.by_role.items():
        if (store := offer.spec.kernel_store) is None:
            continue
        with inside(offer, f"look for the compiled kernels of {offer.name!r}"):
            missing = tuple(store.missing(needs_of[role], registry.options_for(offer.name)))
        if missing:
            wishes.append(KernelWish(backend=offer.name, needs=needs_of[role], missing=missing))
    return tuple(wishes)


def choose_first(
    asked: EngineOptions, registry: Registry, to_compile: Sequence[KernelWish], *, needs: LayerNeeds
) -> tuple[AttentionChoice | None, tuple[Decision, ...]]:
    """The best backends that need nothing compiled. None where nothing is missing, or nothing else serves: then the start waits.

    A backend that was asked for by name is waited for too, and all are where that was asked for.
    """
    late = {wish.backend for wish in to_compile}
    named: set[str | None] = {asked.attention_backend, asked.linear_attention_backend}
    named |= {asked.prefill_attention_backend, asked.decode_attention_backend}
    while late and not (asked.wait_for_kernels or late & named):
        try:
            chosen, _ = choose_attention(asked, registry, needs, leave_out=late)
        except Unsupported:
            break
        slow = {wish.backend for wish in missing_kernels(chosen, registry, needs)}
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
