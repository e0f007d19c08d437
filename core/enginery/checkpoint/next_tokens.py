"""Layers beside a model's own that were trained to predict further tokens (multi-token prediction), as config.json tells of them.

In DeepSeek's spelling, which others took over: they are behind the last layer, in its names. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from enginery.checkpoint.decoder_shape import whole_number
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.model import Feature, Model, ModelContext, ModelFacts, ModelSpec, Point
from enginery.contracts.weights import ExpertNames

_COUNT: Final = "num_nextn_predict_layers"


def num_next_layers(config: Mapping[str, object]) -> int:
    """Layers behind the last, each of which predicts one token more. Raises `CheckpointError` where config.json states none."""
    return whole_number(config, _COUNT)


def next_layers(config: Mapping[str, object], *, least: int = 0) -> list[str]:
    """Their tensors, for `ModelSpec.ignored_weights`: only a drafter asks for them. least: where config.json states none."""
    first, count = whole_number(config, "num_hidden_layers"), whole_number(config, _COUNT, least)
    return [f"model.layers.{first + index}.*" for index in range(count)]


def next_token_drafter(
    *architectures: str,
    describe: Callable[[Mapping[str, object]], ModelFacts],
    build: Callable[[ModelContext], Model],
    modules: Callable[[Mapping[str, object]], int] = num_next_layers,
    suits: Callable[[Mapping[str, object]], bool] = lambda config: bool(config.get(_COUNT)),
    point: Point = "input",
    stacked_weights: Mapping[str, tuple[str, ...]] = ExpertNames().stacked,
) -> DrafterSpec:
    """The drafter `mtp` of models of these architectures: `nn.next_token` has its layers, each a module.

    describe: of the modules alone. point: of the target's last hidden states, before its last norm or behind it, the modules take
    these. The others are fields of `DrafterSpec` and of `ModelSpec`.
    """
    return DrafterSpec(
        name="mtp",
        api=(2, 0),
        summary="layers beside the model's own that were trained to predict further tokens",
        most=8,
        takes_features=True,
        features=lambda config, target: (Feature(target.num_decoder_layers, point),),
        modules=modules,
        suits=suits,
        model=ModelSpec(
            name="mtp",
            api=(2, 0),
            architectures=architectures,
            describe=describe,
            build=build,
            ignored_weights=("*",),  # the model's own
            stacked_weights=stacked_weights,
        ),
    )
