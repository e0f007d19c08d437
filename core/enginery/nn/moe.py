"""Mixtures of experts (arXiv:2101.03961, arXiv:2401.06066): router, experts, and the expert that every token has.

T tokens, C hidden size, E experts, I an expert's inner size, S how many times that of the shared expert is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

from enginery.checkpoint.decoder_shape import DecoderShape, MixtureShape
from enginery.contracts.model import ModelContext, WeightSource
from enginery.contracts.ops import ExpertsFn, OpTable, Routed
from enginery.contracts.weights import Activation, ExpertsShape, Linear, LinearShape
from enginery.nn.activation import gate_function
from enginery.nn.decoder import DecoderLayer, GatedMLP, dense_mlp, layer_attention, summed_early

JOINED_ROWS: Final = 64  # tokens for which it pays, see docs/benchmarks/kernels_moe.py


class JoinedExperts:
    """Experts that every token has, as one product up and one down for each. gate_up [S, 2I, C], down [S, C, I]."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation, ops: OpTable) -> None:
        self._gate_up, self._down = gate_up, down
        self._gate = gate_function(activation, ops)

    def __call__(self, out: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """Added to out [T, C] in place, times the gate [T, 1]."""
        count, columns, inner = self._down.shape
        both = F.linear(x, self._gate_up.view(-1, columns)).view(-1, 2 * inner)  # [T S, 2I]
        hidden = self._gate(both).view(-1, count, inner)
        if gate is not None:
            hidden.mul_(gate[:, None])
        for values, down in zip(hidden.unbind(1), self._down, strict=True):
            out.addmm_(values, down.T)
        return out


class OwnExperts:
    """Some of the experts, of which a rank has each whole: what is routed to others adds nothing here."""

    def __init__(self, experts: ExpertsFn, own: range, note: Callable[[torch.Tensor], None] | None = None) -> None:
        """experts: those of `own`, counted from 0. note: told which experts are routed to, of all ranks; see `ExpertLoads`."""
        self._experts, self._first, self._count, self._note = experts, own.start, len(own), note

    def __call__(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """[T, C] -> [T, C].

        Kernels take K experts of each token, no fewer. So another rank's is replaced by one of the token's own here, which is read
        anyway, with a weight of zero.
        """
        if self._note is not None:
            self._note(routed.ids)
        places = routed.ids - self._first  # [T, K]
        is_own = (places >= 0) & (places < self._count)
        some = torch.where(is_own, places, -1).amax(-1, keepdim=True).clamp(min=0)  # [T, 1]
        return self._experts(x, Routed(torch.where(is_own, places, some), routed.weights.masked_fill(~is_own, 0.0)))


class BoundExperts:
    """Implements `enginery.contracts.weights.Experts` over what an operation bound."""

    def __init__(self, experts: ExpertsFn, joined: JoinedExperts | None) -> None:
        self.add_joined = joined
        self._experts = experts

    def __call__(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return self._experts(x, routed)


class MixtureOfExperts:
    """Each token's own few of many gated MLPs, weighted and summed, and the shared one with them.

    A shared expert of inner size S I is the sum of S experts, so few tokens have those too, in the same kernels. For many tokens,
    and if it cannot be cut so, it is a product of its own. Every rank has some columns of each expert, or some experts, and the
    router whole.
    """

    def __init__(self, context: ModelContext, weights: WeightSource, *, experts: MixtureShape, mlp_bias: bool) -> None:
        """mlp_bias: of the shared expert."""
        count, hidden, ops, names = experts.num_experts, context.facts.hidden_size, context.ops, experts.names
        self.num_joined = 0 if len(weights.own_experts(count)) < count else _num_joined(experts, mlp_bias=mlp_bias)
        self.experts = weights.experts(
            ExpertsShape(
                names=names,
                count=count,
                inner=experts.inner_size,
                hidden=hidden,
                bias=experts.expert_bias,
                activation=experts.activation,
                order=experts.order,
                turned=experts.turned,
                joined=self.num_joined,
            )
        )
        self.routes_gate = experts.shared_gate and not (experts.wide_router or experts.router_bias)  # one product for both
        self.entry = self.router = _take_router(context, weights, experts, with_gate=self.routes_gate)
        self.bias: torch.Tensor | None = None
        if experts.correction_bias:
            self.bias = weights.take(names.correction, (count,), dtype=torch.float32)
        self.num_experts = count
        self.route, self.route_gated, self.routing = ops.route, ops.route_gated, experts.routing
        self.joined = dataclasses.replace(experts.routing, num_shared=self.num_joined)
        self.shared: GatedMLP | None = None
        if experts.shared_size and not self.num_joined:
            shared = weights.scope(names.shared)
            self.shared = GatedMLP(
                context, shared, intermediate_size=experts.shared_size, bias=mlp_bias, activation=experts.activation
            )
        self.shared_gate: Linear | None = None
        if experts.shared_gate and not self.routes_gate:
            self.shared_gate = weights.linear(LinearShape(names=(f"{names.shared}_gate",), rows=(1,), columns=hidden))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]: with several ranks a partial sum."""
        add_joined = self.experts.add_joined
        joins = self.num_joined > 0 and (add_joined is None or len(x) <= JOINED_ROWS)
        made = self.router(x)
        if joins and self.routes_gate:
            return self.experts(x, self.route_gated(made[:, : self.num_experts + 1], self.bias, self.joined))
        logits, gate = self._apart(made, x)
        routed = self.route(logits, self.bias, self.joined if joins else self.routing)
        if joins and gate is not None:
            routed.weights[:, -self.num_joined :] = gate
        out = self.experts(x, routed)
        return out if joins else self._add_shared(out, x, gate)

    def _apart(self, made: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [T, E] and the shared expert's gate [T, 1], if it has one. made: what the router makes of x."""
        if self.routes_gate:
            return made[:, : self.num_experts], made[:, self.num_experts : self.num_experts + 1].sigmoid()
        return made, None if self.shared_gate is None else self.shared_gate(x).sigmoid_()

    def _add_shared(self, out: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """The shared expert's output, if there is one, added to [T, C] in place."""
        if self.experts.add_joined is not None:
            return self.experts.add_joined(out, x, gate)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out.add_(shared if gate is None else shared.mul_(gate))


def _num_joined(experts: MixtureShape, *, mlp_bias: bool) -> int:
    """As how many experts the shared one is computed; 0: it cannot be split into such."""
    if mlp_bias or experts.expert_bias or experts.turned or experts.shared_size % experts.inner_size:
        return 0
    return experts.shared_size // experts.inner_size


def _take_router(
    context: ModelContext, weights: WeightSource, experts: MixtureShape, *, with_gate: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product that gives logits; with_gate: and the shared expert's gate behind them."""
    names, shape = experts.names, (experts.num_experts, context.facts.hidden_size)
    if with_gate:
        taken = torch.zeros(shape[0] // 8 * 8 + 8, shape[1], dtype=context.dtype, device=context.device)  # logits fill 16 bytes
        taken[: shape[0]] = weights.take(f"{names.router}.weight", shape)
        taken[shape[0]] = weights.take(f"{names.shared}_gate.weight", (1, shape[1]))[0]
        return context.ops.bind_linear(taken, None)
    if experts.wide_router:  # x W^T in float32
        return take_wide_router(context, weights, names.router, shape)
    return weights.linear(LinearShape(names=(names.router,), rows=shape[:1], columns=shape[1], bias=experts.router_bias))


def take_wide_router(
    context: ModelContext, weights: WeightSource, name: str, shape: tuple[int, int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`name`.weight [E, C] as a product in float32 of rows of any type."""
    wide = weights.take(f"{name}.weight", shape, dtype=torch.float32)
    narrow = wide.to(context.dtype)
    if wide.is_cuda and narrow.dtype.itemsize == 2 and torch.equal(narrow.float(), wide):  # which loses nothing
        return context.ops.bind_router(narrow)
    linear = context.ops.bind_linear(wide, None)
    return lambda x: linear(x.float())


def layer_mlp(
    context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Layer `index`'s mixture of experts, or its dense MLP."""
    experts = shape.experts
    if experts is not None and index in experts.layers:
        return MixtureOfExperts(context, weights.scope(experts.names.block), experts=experts, mlp_bias=shape.mlp_bias)
    return dense_mlp(context, weights, shape=shape)


def expert_layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    """A layer as `DecoderShape` describes it: grouped-query attention, and experts where it has them."""
    attention = layer_attention(context, weights, shape=shape, index=index)
    mlp = layer_mlp(context, weights, shape=shape, index=index)
    return summed_early(context, DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp))
