"""A model that drafts: what it will take is counted beside the target, then it is built with keys and values of its own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from enginery.attention.socket import LayerSocket
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, Axis, Fill, NamedTensor
from enginery.contracts.drafting import FEATURES
from enginery.contracts.engine import report_to_nobody
from enginery.contracts.model import DraftTarget, Feature, Model, Tapped
from enginery.contracts.ops import OpTable
from enginery.contracts.parallel import Collectives
from enginery.errors import ConfigError, Unsupported
from enginery.kv.pool import PagedKVPool, page_bytes
from enginery.plugin.boundary import inside
from enginery.plugin.registry import Registry
from enginery.worker.backends import AttentionParts, build_backend
from enginery.worker.choice import Choice
from enginery.worker.drafts.draft_model import DraftModel, pages_behind
from enginery.worker.drafts.model_choice import choose_draft_model
from enginery.worker.loading import NeededWeights, build_model, check_weights, load_weights, rank_setting
from enginery.worker.weights.shares import stage_of


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
        """What it adds to a page."""
        return page_bytes(self.geometry(0))

    @property
    def workspace_bytes(self) -> int:
        """Its activations, the target's hidden states of a whole step, and the pages that belong to seats."""
        facts, width = self.choice.facts, self.choice.dtype.itemsize
        features = max(1, len(self.taps)) * self.target_width
        activations = self.choice.settings.max_batch_tokens * (facts.activation_width + features) * width
        return activations + self._captured_bytes + (1 + self._pages_behind) * self.page_bytes

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
        choice = choose_draft_model(asked, registry, target)
        if choice is None:
            return None
        needed = check_weights(choice)
    except Unsupported as error:
        raise Unsupported(f"--drafter {asked.drafter} cannot run beside {target.checkpoint.name}: {error}") from error
    return DraftNeeds(
        choice=choice,
        needed=needed,
        most=target.draft_length,
        taps=_taps(target, choice),
        target_width=target.facts.hidden_size,
    )


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


class Beside(NamedTuple):
    """What the target runs with. model: this rank's, whose logits have its columns. pool, socket: its memory, and its way to its
    backends."""

    model: Model
    ops: OpTable
    pool: PagedKVPool
    socket: LayerSocket
    comm: Collectives


def build_draft_model(
    asked: EngineOptions,
    registry: Registry,
    needs: DraftNeeds | None,
    *,
    target: Choice,
    beside: Beside,
) -> DraftModel | None:
    """Loaded, and bound to a pool and attention backends of its own, or to the target's; None where no model drafts."""
    if needs is None or (offer := target.drafter) is None:
        return None
    choice, spec = dataclasses.replace(needs.choice, settings=target.settings), offer.spec
    verifier, ops, pool, socket, comm = beside
    if not choice.reads:
        pool = PagedKVPool(needs.geometry(pool.geometry.pages[FULL]), choice.device)
        attention = AttentionParts.of(asked, choice, registry, pool=pool, role="draft")
        socket = LayerSocket(build_backend(attention, choice.attention, micro_batches=False))
    weights, reader = load_weights(asked, choice, needs.needed, report_to_nobody), needs.needed.reader
    known = _as_target(verifier, target) if spec.takes_features else None
    setting = rank_setting(choice, reader, ops=ops, comm=comm)
    model = build_model(choice, weights, setting, pool=pool, socket=socket, target=known)
    return DraftModel(
        model,
        socket,
        most=target.draft_length,
        takes_features=spec.takes_features,
        takes_late=any(each.layer == target.facts.num_decoder_layers for each in target.taps),
        reads=bool(choice.reads),
        max_positions=choice.settings.max_model_len,
        knows_lengths=choice.device.type == "cpu",
    )


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
