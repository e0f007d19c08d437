"""Mixture-of-experts layers in plain torch: routing, and each expert on its own tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from enginery.contracts.ops import ExpertBiases, ExpertsFn, Routed, Routing
from enginery.contracts.weights import ExpertsShape, StoredWeight
from enginery.errors import Unsupported
from enginery.nn.activation import gated
from enginery.nn.stored import one_expert, widen


def route(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> Routed:
    """DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437), and without groups every other router in use."""
    scores = logits.float().softmax(-1) if routing.scoring == "softmax" else logits.float().sigmoid()  # [T, E]
    ranked = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        grouped = ranked.view(len(ranked), routing.num_groups, ranked.shape[1] // routing.num_groups)  # [T, G, E / G]
        best = grouped.amax(-1) if routing.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)  # [T, G]
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.top_groups, dim=-1).indices, True)
        ranked = grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(1)
    ids = ranked.topk(routing.top_k, dim=-1).indices  # [T, top_k]
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be zero
    shared = torch.arange(logits.shape[1], logits.shape[1] + routing.num_shared, device=ids.device).expand(len(ids), -1)
    ids, weights = torch.cat((ids, shared), dim=1), F.pad(weights * routing.scale, (0, routing.num_shared), value=1.0)
    return Routed(ids.to(torch.int32), weights)


def route_gated(made: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> Routed:
    """The shared experts' weight is the sigmoid of what stands behind the logits."""
    routed = route(made[:, :-1], bias, routing)
    routed.weights[:, routing.top_k :] = made[:, -1:].float().sigmoid()
    return routed


def bind_experts(
    gate_up: torch.Tensor | StoredWeight, down: torch.Tensor | StoredWeight, shape: ExpertsShape, biases: ExpertBiases | None = None
) -> ExpertsFn:
    """Stored weights are widened when an expert is used."""

    def weight(of: torch.Tensor | StoredWeight, expert: int, dtype: torch.dtype) -> torch.Tensor:
        return of[expert] if isinstance(of, torch.Tensor) else widen(one_expert(of, expert), dtype)

    def expert_of(expert: int, x: torch.Tensor) -> torch.Tensor:
        first, second = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        hidden = gated(F.linear(x, weight(gate_up, expert, x.dtype), first), shape.activation)
        return F.linear(hidden, weight(down, expert, x.dtype), second)

    return _summed(expert_of)


def bind_squared_experts(up: torch.Tensor, down: torch.Tensor) -> ExpertsFn:
    """Without a gate: see `OpTable`."""
    return _summed(lambda expert, x: F.linear(F.relu(F.linear(x, up[expert])).square_(), down[expert]))


def _summed(expert_of: Callable[[int, torch.Tensor], torch.Tensor]) -> ExpertsFn:
    """Each expert on its own tokens: `expert_of` it and their rows. A weight of zero adds nothing, and takes no time.

    The host reads which experts are used, so on a device the function raises `Unsupported` while a graph is captured.
    """

    def experts(x: torch.Tensor, routed: Routed) -> torch.Tensor:
        if routed.ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                "experts in plain torch wait for the device, which no graph can; no chosen operations have kernels for them"
            )
        out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        token, place = (routed.weights != 0).nonzero(as_tuple=True)
        ids, order = routed.ids[token, place].sort(stable=True)
        each, counts = (found.tolist() for found in torch.unique_consecutive(ids, return_counts=True))
        tokens, shares = (torch.split(of[order], counts) for of in (token, routed.weights[token, place, None]))
        for expert, rows, share in zip(each, tokens, shares, strict=True):
            out.index_add_(0, rows, (expert_of(expert, x[rows]) * share).to(out.dtype))
        return out.to(x.dtype)

    return experts
