"""The backend: plans on the host, then updates states, the decoding ones together and the others request by request.

T tokens, S rows of some requests, HV value heads, D key dim, V value dim, C as in `enginery.api.RecurrentFacts.mixed_width`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from enginery.api import (
    BackendContext,
    ForwardBatch,
    ForwardPlan,
    LayerSpec,
    PlanKey,
    RecurrentFacts,
    RecurrentWeights,
    covering_plan,
    hookimpl,
)
from enginery_attn_linear.kernels import chunk, step
from enginery_attn_linear.plan import DecodeGroup, LinearPlan, RequestPart, plan_group, plan_parts

CHUNK_TOKENS: Final = 64


class Rows(NamedTuple):
    """q, k: [S, HV, D], v: [S, HV, V], log_decay: [S, HV]; float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor


class LinearAttention:
    """Recurrent layers over the states of their requests. Implements `enginery.api.AttnBackend` and `Advances`."""

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = context.instance
        self.states = context.states
        self.device = context.device

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> LinearPlan:
        """Decide which states are read and which begin from zero. See `LinearPlan`."""
        grouped = batch.num_decode_requests
        key = PlanKey.of(batch, self.backend_id, capture=capture)
        group = plan_group(batch, grouped, self.device) if grouped else None
        return LinearPlan(key=key, group=group, parts=plan_parts(batch, grouped))

    def advance(
        self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: torch.Tensor
    ) -> None:
        """mixed: [T, C], gates: [T, HV], or [T, 0] where the decay is constant; out: [T, HV, V]. See `enginery.api.Advances`.

        Rows that belong to no request are left as they are in `out`.
        """
        planned = covering_plan(plan, batch, LinearPlan, backend=self.backend_id)
        states = self.states.layer(layer.local_id)  # [pages + 1, HV, V, D]
        if planned.group is not None:
            rows = rows_of(mixed, gates, layer, slice(0, planned.group.size))
            _advance_group(rows, group=planned.group, states=states, scale=layer.scale, out=out)
        for part in planned.parts:
            _advance_part(mixed, gates, layer, part=part, states=states, out=out)


def rows_of(mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, rows: slice) -> Rows:
    """What the recurrence takes of these rows, S of them, float32."""
    facts, weights = layer.facts.recurrent, layer.recurrent
    assert facts is not None, "only recurrent layers advance"
    key_width = facts.key_heads * facts.key_dim
    q, k, v = mixed[rows].float().split_with_sizes([key_width, key_width, facts.value_heads * facts.value_dim], dim=-1)
    group = facts.value_heads // facts.key_heads
    q, k = (part.view(-1, facts.key_heads, facts.key_dim).repeat_interleave(group, dim=1) for part in (q, k))  # [S, HV, D]
    v = v.view(-1, facts.value_heads, facts.value_dim)  # [S, HV, V]
    return Rows(q, k, v, _log_decay(gates[rows], facts, weights))


def _log_decay(gates: torch.Tensor, facts: RecurrentFacts, weights: RecurrentWeights | None) -> torch.Tensor:
    """[S, HV] float32."""
    assert weights is not None, "a recurrent layer has weights for its decay"
    if facts.decay == "constant":
        assert weights.log_decay is not None, "a constant decay is a weight"
        return weights.log_decay.expand(len(gates), -1)
    raw = gates.float() if weights.dt_bias is None else gates.float() + weights.dt_bias
    slope = 1.0 if weights.a_log is None else weights.a_log.exp()
    decay = -slope * F.softplus(raw)
    return decay if facts.gate_floor is None else decay.clamp_(min=facts.gate_floor)


def _advance_group(rows: Rows, *, group: DecodeGroup, states: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    state = states.index_select(0, group.reads).masked_fill_(group.fresh, 0.0)  # [B, HV, V, D]
    out[: group.size] = step(*rows, state, scale=scale)
    states.index_copy_(0, group.writes, state)


def _advance_part(
    mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, *, part: RequestPart, states: torch.Tensor, out: torch.Tensor
) -> None:
    state = states[part.write]  # [HV, V, D], a view
    if part.fresh:
        state.zero_()
    elif part.read != part.write:
        state.copy_(states[part.read])
    for start in range(part.start, part.stop, CHUNK_TOKENS):
        rows = slice(start, min(start + CHUNK_TOKENS, part.stop))
        q, k, v, log_decay = (tensor.transpose(0, 1) for tensor in rows_of(mixed, gates, layer, rows))  # [HV, S, ...]
        out[rows] = chunk(q, k, v, log_decay, state, scale=layer.scale).transpose(0, 1)
