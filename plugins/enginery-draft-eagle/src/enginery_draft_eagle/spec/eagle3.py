"""What config.json says of an EAGLE-3 head (arXiv:2503.01840), without torch: as its authors write it, and as speculators does.

V vocabulary of the target, V' of the head, C hidden size of the head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginery.api import (
    CheckpointError,
    DecoderShape,
    DrafterSpec,
    Feature,
    Model,
    ModelContext,
    ModelFacts,
    ModelSpec,
    whole_number,
)
from enginery_draft_eagle.spec.eagle import one_layer

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape:
    """decoder: its one layer. vocab_size: V'. layers: of the target, whose input it takes; None for what the paper takes.

    target_size: hidden size of the target. norms_residual: the residual stream begins behind `hidden_norm`. norms_features: a norm
    stands before `fc`. carries_normed: what a guess leaves to the next is behind the last norm. bias: of `fc`. own_embedding: its
    embedding is not the target's.
    """

    decoder: DecoderShape
    vocab_size: int
    layers: tuple[int, ...] | None
    target_size: int
    norms_residual: bool
    norms_features: bool
    carries_normed: bool
    bias: bool
    own_embedding: bool

    @property
    def num_features(self) -> int:
        """How many hidden states of the target it takes."""
        return 3 if self.layers is None else len(self.layers)

    def facts(self) -> ModelFacts:
        """The part that the core needs."""
        facts = self.decoder.facts()
        beside = self.num_features * self.target_size + 4 * self.decoder.hidden_size
        return dataclasses.replace(facts, activation_width=facts.activation_width + beside)


def shape(config: Mapping[str, Any]) -> Eagle3Shape:
    """Raises `CheckpointError` for several layers, and for variants that are not served."""
    is_speculators = "transformer_layer_config" in config
    layer = config["transformer_layer_config"] if is_speculators else config
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"config.json has transformer_layer_config {layer!r:.60}, which must be an object")
    own = config.get("eagle_config") or {}
    for key, wanted in (("fc_norm", False), ("use_aux_hidden_state", True)):
        if (stated := config.get(key, own.get(key))) is not None and bool(stated) != wanted:
            raise CheckpointError(f"config.json of the EAGLE-3 head has {key} {stated!r}; heads are served with {wanted} only")
    decoder = one_layer(layer)
    target_size = whole_number(config, "target_hidden_size", decoder.hidden_size)
    return Eagle3Shape(
        decoder=decoder,
        vocab_size=whole_number(config, "draft_vocab_size", decoder.vocab_size),
        layers=_layers(config.get(LAYER_IDS), own.get(LAYER_IDS)),
        target_size=target_size,
        norms_residual=bool(config.get("norm_before_residual", is_speculators)),
        norms_features=bool(config.get("norm_before_fc", False)),
        carries_normed=bool(config.get("norm_output", False)),
        bias=bool(config.get("bias", False)),
        own_embedding=target_size != decoder.hidden_size or bool(config.get("embed_requires_grad", False)),  # of speculators
    )


def _layers(inputs: object, outputs: object) -> tuple[int, ...] | None:
    """Layers whose input is taken. speculators and vLLM state these; `eagle_config`, as SGLang reads it, whose output: one less."""
    stated, offset = (inputs, 0) if inputs else (outputs, 1)
    if not stated:
        return None
    if not isinstance(stated, list) or not all(type(each) is int for each in stated):
        raise CheckpointError(f"config.json of the EAGLE-3 head has {LAYER_IDS} {stated!r}, which must be a list of layer numbers")
    return tuple(each + offset for each in stated)


def features(config: Mapping[str, Any], target: ModelFacts) -> tuple[Feature, ...]:
    """What goes into a low, a middle and a high layer. Raises `CheckpointError` for a target of another hidden size."""
    head, count = shape(config), target.num_decoder_layers
    if head.target_size != target.hidden_size:
        raise CheckpointError(
            f"the EAGLE-3 head is for a model whose hidden states have {head.target_size:,} values, and those of this one have "
            f"{target.hidden_size:,}; give the head that was trained for it"
        )
    return tuple(Feature(layer) for layer in head.layers or (2, count // 2, count - 3))


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_draft_eagle.eagle3 import Eagle3Head

    return Eagle3Head(context, shape(context.config))


EAGLE3 = DrafterSpec(
    name="eagle3",
    api=(2, 0),
    summary="an EAGLE-3 head: one layer over hidden states of three of the target's layers",
    most=8,
    takes_features=True,
    features=features,
    model=ModelSpec(
        name="eagle3",
        api=(2, 0),
        architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
        describe=describe,
        build=build,
        ignored_weights=("embed_tokens.weight", "t2d", "*.rotary_emb.inv_freq"),
    ),
)
