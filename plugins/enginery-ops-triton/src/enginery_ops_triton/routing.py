"""Which experts a token goes to, in one kernel. T tokens, E experts."""

from __future__ import annotations

from typing import Final

import torch

from enginery.api import Routed, Routing
from enginery.nn import reference_experts
from enginery_ops_triton.kernels import routing as kernels
from enginery_ops_triton.kernels.launch import next_power_of_2

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
MOST_EXPERTS: Final = 1024  # a program has a token's scores in registers


def route(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing, *, dependent_launch: bool) -> Routed:
    """The experts of each row of logits [T, E], of equal scores the lowest."""
    if not _takes(logits, logits.shape[1]):
        return reference_experts.route(logits, bias, routing)
    return _route(logits, bias, routing, num_experts=logits.shape[1], dependent_launch=dependent_launch)


def route_gated(made: torch.Tensor, bias: torch.Tensor | None, routing: Routing, *, dependent_launch: bool) -> Routed:
    """The same of made [T, E + 1], whose last column is the gate of the shared experts."""
    if not _takes(made, made.shape[1] - 1):
        return reference_experts.route_gated(made, bias, routing)
    return _route(made, bias, routing, num_experts=made.shape[1] - 1, dependent_launch=dependent_launch)


def _takes(logits: torch.Tensor, num_experts: int) -> bool:
    return num_experts <= MOST_EXPERTS and logits.dtype in DTYPES and logits.stride(1) == 1


def _route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing, *, num_experts: int, dependent_launch: bool
) -> Routed:
    num_tokens = logits.shape[0]
    num_columns = routing.top_k + routing.num_shared
    ids = torch.empty((num_tokens, num_columns), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, num_columns), dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return Routed(ids, weights)
    kernels.route[(num_tokens,)](
        logits,
        logits if bias is None else bias.contiguous(),
        ids,
        weights,
        logits.stride(0),
        routing.scale,
        NUM_EXPERTS=num_experts,
        TOP_K=routing.top_k,
        NUM_COLUMNS=num_columns,
        NUM_GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups,
        TOP2=routing.group_score == "top2",
        SIGMOID=routing.scoring == "sigmoid",
        PACKED=bias is None and routing.num_groups == 1 and logits.dtype.itemsize == 2,
        RENORMALISE=routing.renormalise,
        BIAS=bias is not None,
        GATED=logits.shape[1] > num_experts,
        BLOCK_GROUPS=next_power_of_2(routing.num_groups),
        BLOCK_MEMBERS=next_power_of_2(num_experts // routing.num_groups),
        BLOCK_TOP=next_power_of_2(num_columns),
        CHAINED=dependent_launch,
        num_warps=1 if num_experts <= 512 else 4,
        launch_pdl=dependent_launch,
    )
    return Routed(ids, weights)
