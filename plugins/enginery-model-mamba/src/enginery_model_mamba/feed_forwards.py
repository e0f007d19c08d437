"""What follows attention or a mixer in a layer. T tokens, C hidden size."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from enginery.api import DecoderShape, ForwardBatch, MixtureShape, ModelContext, WeightSource
from enginery.nn.decoder import AttentionBlock, GatedMLP
from enginery.nn.moe import MixtureOfExperts
from enginery_model_mamba.blocks import Renamed


def plain_mlp(context: ModelContext, weights: WeightSource, *, shape: DecoderShape) -> GatedMLP:
    """A layer's gated MLP, `feed_forward`."""
    return GatedMLP(context, weights.scope("feed_forward"), intermediate_size=shape.intermediate_size, bias=shape.mlp_bias)


def routed_experts(
    context: ModelContext, weights: WeightSource, *, experts: MixtureShape, router: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer's experts. router: what the family calls it."""
    scope = Renamed(weights.scope(experts.names.block), {"gate": router})
    return MixtureOfExperts(context, scope, experts=experts, mlp_bias=False)


def shared_mlp(
    context: ModelContext, weights: WeightSource, *, shape: DecoderShape, shared_size: int, names: Mapping[str, str]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Granite's MLP that every token has, `shared_mlp`, and experts; one of the two may be missing. names: see `Renamed`."""
    experts = shape.experts and routed_experts(context, weights, experts=shape.experts, router="router.layer")
    if experts and not shared_size:
        return experts
    shared = GatedMLP(
        context, Renamed(weights.scope("shared_mlp"), names), intermediate_size=shared_size, bias=False, packed="input_linear"
    )
    return (lambda x: experts(x).add_(shared(x))) if experts else shared


class SideBySide:
    """A mixer and attention on the same input, whose outputs are added."""

    def __init__(self, mixer: AttentionBlock, attention: AttentionBlock) -> None:
        self._mixer, self._attention = mixer, attention

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C]. Returns [T, C]: with several ranks a partial sum."""
        return self._mixer(x, cos_sin, batch).add_(self._attention(x, cos_sin, batch))
