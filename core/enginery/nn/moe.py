"""Mixtures of experts (arXiv:2101.03961, arXiv:2401.06066): router, experts, and the expert that every token has.

T tokens, C hidden size, E experts, I an expert's inner size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from enginery.config.decoder_shape import DecoderShape, ExpertsShape
from enginery.contracts.model import ModelContext, WeightSource
from enginery.contracts.ops import ExpertScales, ExpertsFn
from enginery.nn.decoder import DecoderLayer, GatedMLP, layer_attention
from enginery.nn.reference_experts import BLOCK


class MixtureOfExperts:
    """Each token's own few of many gated MLPs, weighted and summed, and the shared one beside them.

    Checkpoints have every expert's projections apart; in memory they are gate_up [E, 2I, C] and down [E, C, I].
    """

    def __init__(self, context: ModelContext, weights: WeightSource, *, experts: ExpertsShape, mlp_bias: bool) -> None:
        """mlp_bias: of the shared expert; the others have none."""
        count, hidden = experts.num_experts, context.facts.hidden_size
        names, ops = experts.names, context.ops
        self.experts = _bind_experts(context, weights.scope("experts"), experts)
        self.wide = experts.wide_router
        router = weights.take("gate.weight", (count, hidden), dtype=torch.float32 if self.wide else None)
        self.router = ops.bind_linear(router, None)
        self.bias: torch.Tensor | None = None
        if experts.correction_bias:
            self.bias = weights.take("gate.e_score_correction_bias", (count,), dtype=torch.float32)
        self.route, self.routing = ops.route, experts.routing
        self.shared: GatedMLP | None = None
        if experts.shared_size:
            shared = weights.scope(names.shared)
            self.shared = GatedMLP(context, shared, intermediate_size=experts.shared_size, bias=mlp_bias)
        gated = experts.shared_gate
        self.shared_gate = ops.bind_linear(weights.take(f"{names.shared}_gate.weight", (1, hidden)), None) if gated else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        logits = self.router(x.float() if self.wide else x).float()  # [T, E]
        out = self.experts(x, self.route(logits, self.bias, self.routing))
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out.add_(shared if self.shared_gate is None else shared.mul_(self.shared_gate(x).sigmoid_()))


def _bind_experts(context: ModelContext, weights: WeightSource, experts: ExpertsShape) -> ExpertsFn:
    """Float8 experts stay so where no block has rows of both gate and up; else they are widened when they are read."""
    count, inner, hidden = experts.num_experts, experts.inner_size, context.facts.hidden_size
    halves = [f"{expert}.{name}.weight" for expert in range(count) for name in (experts.names.gate, experts.names.up)]
    downs = [f"{expert}.{experts.names.down}.weight" for expert in range(count)]
    dtype: torch.dtype | None = None
    scales: ExpertScales | None = None
    if experts.float8 and inner % BLOCK == 0:
        dtype, rows, columns = torch.float8_e4m3fn, inner // BLOCK, -(-hidden // BLOCK)
        half_scales = weights.merge([f"{name}_scale_inv" for name in halves], [(rows, columns)] * len(halves), dtype=torch.float32)
        down_scales = weights.merge([f"{name}_scale_inv" for name in downs], [(columns, rows)] * len(downs), dtype=torch.float32)
        scales = ExpertScales(gate_up=half_scales.view(count, 2 * rows, columns), down=down_scales.view(count, columns, rows))
    gate_up = weights.merge(halves, [(inner, hidden)] * len(halves), dtype=dtype).view(count, 2 * inner, hidden)
    down = weights.merge(downs, [(hidden, inner)] * len(downs), dtype=dtype).view(count, hidden, inner)
    return context.ops.bind_experts(gate_up, down, scales)


def layer_mlp(
    context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Layer `index`'s mixture of experts, or its dense MLP."""
    experts = shape.experts
    if experts is not None and index in experts.layers:
        return MixtureOfExperts(context, weights.scope(experts.names.block), experts=experts, mlp_bias=shape.mlp_bias)
    return GatedMLP(context, weights.scope("mlp"), intermediate_size=shape.intermediate_size, bias=shape.mlp_bias)


def expert_layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    """A layer as `DecoderShape` describes it: grouped-query attention, and experts where it has them."""
    attention = layer_attention(context, weights, shape=shape, index=index)
    mlp = layer_mlp(context, weights, shape=shape, index=index)
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp)
