"""What follows attention or a mixer in a layer. T tokens, C hidden size."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from enginery.api import DecoderShape, ModelContext, WeightSource
from enginery.nn.decoder import GatedMLP
from enginery.nn.moe import MixtureOfExperts
from enginery_model_mamba.blocks import Renamed


class Scaled:
    """A block whose output [T, C] is multiplied by a number."""

    def __init__(self, block: Callable[..., torch.Tensor], factor: float) -> None:
        self._block, self._factor = block, factor

    def __call__(self, *inputs: object) -> torch.Tensor:
        """What the block is given."""
        made = self._block(*inputs)
        return made if self._factor == 1.0 else made * self._factor


def plain_mlp(context: ModelContext, weights: WeightSource, *, shape: DecoderShape) -> GatedMLP:
    """A layer's gated MLP, `feed_forward`."""
    return GatedMLP(
        context, weights.scope("feed_forward"), intermediate_size=shape.intermediate_size, bias=shape.mlp_bias
    )


def shared_mlp(
    context: ModelContext, weights: WeightSource, *, shape: DecoderShape, shared_size: int, names: Mapping[str, str]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Granite's MLP that every token has, `shared_mlp`, and experts where there are some. names: see `Renamed`."""
    shared = GatedMLP(
        context, Renamed(weights.scope("shared_mlp"), names), intermediate_size=shared_size, bias=False, packed="input_linear"
    )
    if shape.experts is None:
        return shared
    scope = Renamed(weights.scope(shape.experts.names.block), {"gate": "router.layer"})
    experts = MixtureOfExperts(context, scope, experts=shape.experts, mlp_bias=False)
    return lambda x: experts(x).add_(shared(x))
