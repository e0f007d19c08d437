"""What follows attention or a mixer in a layer. T tokens, C hidden size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from enginery.api import DecoderShape, ForwardBatch, MixtureShape, ModelContext, WeightSource
from enginery.nn.decoder import AttentionBlock, GatedMLP
from enginery.nn.moe import MixtureOfExperts
from enginery_model_mamba.blocks import Renamed


class ScaledAttention:
    """Attention or a mixer whose output is multiplied by a number."""

    def __init__(self, block: AttentionBlock, factor: float) -> None:
        self._block, self._factor = block, factor

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C]. Returns [T, C]: with several ranks a partial sum."""
        return self._block(x, cos_sin, batch) * self._factor


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
    """Granite's MLP that every token has, `shared_mlp`, and experts where there are some. names: see `Renamed`."""
    shared = GatedMLP(
        context, Renamed(weights.scope("shared_mlp"), names), intermediate_size=shared_size, bias=False, packed="input_linear"
    )
    if shape.experts is None:
        return shared
    experts = routed_experts(context, weights, experts=shape.experts, router="router.layer")
    return lambda x: experts(x).add_(shared(x))


class ScaledMLP:
    """Falcon-H1's gated MLP: the gate is multiplied before its SiLU, and the output."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, shape: DecoderShape, factors: Sequence[float]) -> None:
        """factors: of the gate, and of the output."""
        self._mlp = GatedMLP(context, weights, intermediate_size=shape.intermediate_size, bias=shape.mlp_bias)
        self._gate_factor, self._out_factor = factors

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]: with several ranks a partial sum."""
        gate_up = self._mlp.gate_up(x)
        gate_up[:, : gate_up.shape[1] // 2] *= self._gate_factor
        return self._mlp.down(self._mlp.gate(gate_up)) * self._out_factor


class SideBySide:
    """A mixer and attention on the same input, whose outputs are multiplied and added."""

    def __init__(
        self, mixer: AttentionBlock, attention: AttentionBlock, *, attention_in: float, factors: tuple[float, float]
    ) -> None:
        """attention_in: of attention's input. factors: of the mixer's output, and of attention's."""
        self._mixer, self._attention, self._attention_in, self._factors = mixer, attention, attention_in, factors

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C]. Returns [T, C]: with several ranks a partial sum."""
        mixed = self._mixer(x, cos_sin, batch) * self._factors[0]
        return mixed.add_(self._attention(x * self._attention_in, cos_sin, batch), alpha=self._factors[1])
