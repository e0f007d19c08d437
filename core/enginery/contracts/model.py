"""The model contract: a family is found by the checkpoint's architecture, described without torch, and built from weights.

T tokens, N rows, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from enginery.contracts.attention import AttnLayerFacts, GlobalLayerId, LayerSpec, LocalLayerId, Reason
from enginery.contracts.batch import NamedTensor
from enginery.contracts.parallel import Channel, Collectives, Cut, StageTensors
from enginery.contracts.versions import ApiVersion

if TYPE_CHECKING:
    import torch

    from enginery.contracts.batch import ForwardBatch
    from enginery.contracts.memory import KVPool
    from enginery.contracts.ops import OpTable
    from enginery.contracts.weights import Experts, ExpertsShape, Linear, LinearShape


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the core must know of a model before it is built; the rest is the model's own affair.

    max_positions: longest context. activation_width: the largest number of values that the model keeps alive per token of a step
    (for the memory plan). layers: those that have memory, in the order in which they run, each with its `decoder_layer`; a
    decoder layer may have several, or none. `GlobalLayerId` is a place in it. num_decoder_layers: 0 for as many as `layers` names.
    boundary: what crosses from one pipeline stage to the next; empty where the family cannot be cut into stages. Sizes are the
    whole model's, not a rank's. inputs, outputs: what a batch has of this family alone, see `NamedTensor`.
    """

    vocab_size: int
    hidden_size: int
    max_positions: int
    activation_width: int
    layers: tuple[AttnLayerFacts, ...]
    num_decoder_layers: int = 0
    boundary: tuple[Channel, ...] = ()
    inputs: tuple[NamedTensor, ...] = ()
    outputs: tuple[NamedTensor, ...] = ()

    def __post_init__(self) -> None:
        for of in (self, *self.layers):
            for name in {name for name, value in vars(of).items() if isinstance(value, float | str)} - {"softcap"}:
                raise TypeError(f"{name} of {type(of).__name__} is {vars(of)[name]!r}, and must be a whole number")
        places = [layer.decoder_layer for layer in self.layers]
        if places != sorted(places):
            raise ValueError(f"layers must stand in the order in which they run; their decoder layers are {places}")
        if not self.num_decoder_layers:
            object.__setattr__(self, "num_decoder_layers", max(places, default=-1) + 1)
        if places and places[-1] >= self.num_decoder_layers:
            raise ValueError(f"a layer is in decoder layer {places[-1]}, and num_decoder_layers is {self.num_decoder_layers}")

    @property
    def has_latents(self) -> bool:
        """Whether it has MLA layers."""
        return any(layer.latent is not None for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Whether it has recurrent layers."""
        return any(layer.recurrent is not None for layer in self.layers)


Point = Literal["input", "final"]


class Feature(NamedTuple):
    """Hidden states of the model that verifies, which a draft model takes: [T, C].

    point: "input", the residual stream into decoder layer `layer`. Where `layer` is the number of layers, that is what the last
    norm is given, and "final" is what it returns.
    """

    layer: int
    point: Point = "input"


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """The part of the model that is built here. layers: decoder layers of this pipeline stage, by their number in the model.

    memory: of those that have memory, by `LocalLayerId`, with the heads of this rank. first_global_id: of the first of them.
    reads: of a draft model without memory, the target's layer that each of them reads; empty: its own.
    """

    layers: range
    memory: tuple[AttnLayerFacts, ...]
    first_global_id: int = 0
    is_first: bool = True
    is_last: bool = True
    reads: tuple[int, ...] = ()

    def specs(self, decoder_layer: int, *, scale: float, sinks: torch.Tensor | None = None) -> tuple[LayerSpec, ...]:
        """The spec of each layer with memory in `decoder_layer`: none, one or several. scale, sinks: see `LayerSpec`."""
        return tuple(
            LayerSpec(
                global_id=GlobalLayerId(self.first_global_id + place),
                local_id=LocalLayerId(self.reads[place] if self.reads else place),
                facts=facts,
                scale=scale,
                sinks=sinks,
            )
            for place, facts in enumerate(self.memory)
            if facts.decoder_layer == decoder_layer
        )

    def spec(self, decoder_layer: int, *, scale: float, sinks: torch.Tensor | None = None) -> LayerSpec:
        """The same for a decoder layer with one such layer. Raises `ValueError` for others."""
        specs = self.specs(decoder_layer, scale=scale, sinks=sinks)
        if len(specs) != 1:
            raise ValueError(
                f"decoder layer {decoder_layer} has {len(specs)} layers with memory in ModelFacts.layers; set each one's "
                "decoder_layer, and take several by StageLayers.specs"
            )
        return specs[0]


class WeightSource(Protocol):
    """Where a model takes its weights from, by the names of the checkpoint. Which part of them this rank has is decided behind it.

    The first build runs against a source that only records (tensors on the `meta` device): the record is checked against the
    checkpoint and counted into the memory plan before anything is read. The second runs against loaded tensors. What is asked
    for twice, as a tied embedding, is in memory once.
    """

    def scope(self, prefix: str) -> WeightSource:
        """The same source with `prefix` and a dot before every name."""

    def over_lanes(self) -> WeightSource:
        """The same source for the products of a feed-forward: it is given the rows of all lanes, and cut over the ranks of all."""

    def linear(self, shape: LinearShape) -> Linear:
        """A product bound to its weights. Raises `Unsupported` for sizes that the ranks cannot share."""

    def experts(self, shape: ExpertsShape) -> Experts:
        """Experts bound to their weights, of all lanes. With several ranks they give partial sums, which the caller has to add."""

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        cut: Cut = Cut.NONE,
        unit: int | tuple[int, ...] = 1,
        parts: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """The tensor `name` on the model's device, in `dtype`, or in the model's. For what is no product: norms, tables.

        shape: in the checkpoint. cut, unit: see `LinearShape`; ROWS is the first axis, COLUMNS the last. parts: rows of each part
        of a packed tensor, which are cut by themselves. What is stored in a format comes as plain numbers. An integer `dtype`
        takes an integer tensor as it is.
        """

    def share(self, size: int, *, unit: int = 1) -> range:
        """Which of `size` rows this rank has of what is cut, in multiples of `unit`: for what is computed, as decays of heads."""

    def own_experts(self, count: int) -> range:
        """Which of so many experts this rank computes whole; all of them where it has a part of each, or is alone.

        Where it has some, `experts` gives nothing for the others, whose rank adds them. What is no expert is cut as ever.
        """

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of that name, for layouts that config.json does not tell apart.

        Both builds get the same answer. It is no for random weights.
        """


class AttendFn(Protocol):
    """A backend's `attend`, as a model calls it: the core adds the batch's plan."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, out: torch.Tensor
    ) -> None: ...


class AdvanceFn(Protocol):
    """A backend's `advance`, as a model calls it: the core adds the batch's plan."""

    def __call__(
        self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, out: torch.Tensor
    ) -> None: ...


@runtime_checkable
class DraftTarget(Protocol):
    """What a draft model may use of the model that verifies. C: its hidden size, V: its vocabulary."""

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C], what the first layer is given for these tokens."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C], as after the last norm, -> [N, V]."""


@runtime_checkable
class Tapped(Protocol):
    """A model that writes hidden states for a draft model, side by side, to the named output `FEATURES`: [T, F * C].

    A batch without that output is one that the draft model does not follow. taps: which it writes, `ModelContext.taps`.
    """

    taps: tuple[Feature, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelContext:
    """All that a model is built from. config is the checkpoint's config.json. pool: where keys and values go.

    stage: the layers to build, and whether embedding and head belong to them. comm: what is exchanged with other ranks.
    max_positions: the longest context that is served. target: of a draft model, what verifies its guesses; None elsewhere, and in
    the build that only records. taps: hidden states that a draft model takes from this one, see `Tapped`.
    """

    config: Mapping[str, Any]
    facts: ModelFacts
    weights: WeightSource
    ops: OpTable
    attend: AttendFn
    advance: AdvanceFn
    pool: KVPool
    device: torch.device
    dtype: torch.dtype
    max_positions: int
    stage: StageLayers
    comm: Collectives
    target: DraftTarget | None = None
    taps: tuple[Feature, ...] = ()


class Model(Protocol):
    """A live model, or its part of one pipeline stage, complete when built."""

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor | StageTensors:
        """Hidden states after the last norm: [T, C], or [N, C] of the batch's `logits_rows` alone.

        arrived: what the stage before returned; None on the first. Stages before the last return what crosses to the next.
        Keys and values go to `batch.slots_for(layer)`; named outputs are written to `batch.outputs`.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V], in the model's dtype; of several ranks each has some columns, which the caller joins.

        It is called on every rank of the last stage, as often as the step says and no rank decides.
        """


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model family on offer.

    architectures: entries of config.json's `architectures` it serves. priority: of several families for one architecture the
    highest is taken that refuses nothing. refuse: reasons to leave a config.json to another family. describe: config.json ->
    facts, without torch; raises `CheckpointError` for what it cannot serve. build: imports what is heavy. ignored_weights: fnmatch
    patterns of tensors that checkpoints carry and the model does not need, or what gives them for a config.json.
    stacked_weights: by the end of a tensor's name, the ends of those that are stacked in it, with `{}` for the index along its
    first dimension, see `unstack`. lanes: whether it may run in several (`--dp-attention`): its feed-forwards are given
    `Collectives.all_rows`, and take their products from `WeightSource.over_lanes`.
    """

    name: str
    api: ApiVersion
    architectures: tuple[str, ...]
    describe: Callable[[Mapping[str, object]], ModelFacts]
    build: Callable[[ModelContext], Model]
    priority: int = 0
    refuse: Callable[[Mapping[str, object]], list[Reason]] = lambda _: []
    ignored_weights: tuple[str, ...] | Callable[[Mapping[str, object]], Sequence[str]] = ()
    stacked_weights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lanes: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """A checkpoint that ships inside a plugin. The one of highest priority is used when no model is named.

    folder: Hugging Face layout. note: said at start, for instance how to name a larger model. drafters: folders of draft models
    that were trained for it, by the drafter that runs them.
    """

    name: str
    api: ApiVersion
    priority: int
    folder: Path
    note: str
    drafters: Mapping[str, Path] = field(default_factory=dict)
