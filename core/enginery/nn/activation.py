"""The gates of gated MLPs: [N, 2I], gates before ups, to [N, I]."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from enginery.contracts.ops import GatableLinear, LinearFn, OpTable
from enginery.contracts.weights import Activation


def gate_function(activation: Activation, ops: OpTable) -> Callable[[torch.Tensor], torch.Tensor]:
    """[N, 2I] -> [N, I]: an operation for SiLU and for GELU by tanh, torch for the others."""
    fast = {"silu": ops.gated_silu, "gelu_tanh": ops.gated_gelu}
    return fast.get(activation.kind) or (lambda x: gated(x, activation))


def gated_product(product: LinearFn, activation: Activation, ops: OpTable) -> LinearFn:
    """[N, C] -> [N, I]: a product of gates before ups, and their gate."""
    if activation.kind == "silu" and isinstance(product, GatableLinear):
        return product.with_gate(ops.gated_silu)
    gate = gate_function(activation, ops)
    return lambda x: gate(product(x))


def gated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """In plain torch; see `Activation` for what each kind computes."""
    gate, up = x.chunk(2, dim=-1)
    match activation.kind:
        case "silu":
            return F.silu(gate).mul_(up)
        case "gelu":
            return F.gelu(gate).mul_(up)
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh").mul_(up)
        case "clamped_swiglu":
            gate, up = gate.clamp(max=activation.limit), up.clamp(min=-activation.limit, max=activation.limit)
            return (gate * torch.sigmoid(gate * activation.alpha)).mul_(up + 1)
