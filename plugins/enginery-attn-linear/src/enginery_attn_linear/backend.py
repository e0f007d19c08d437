"""The backend: plans on the host, then updates states, the decoding ones together and the others request by request.

T tokens, S rows of some requests, B requests, H value heads, K key dim, V value dim, C: `RecurrentFacts.mixed_width`, G:
`gates_width`, W: taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from weakref import WeakKeyDictionary

import torch

from enginery.api import (
    STATE,
    Accepted,
    BackendContext,
    ForwardBatch,
    ForwardPlan,
    LayerSpec,
    LocalLayerId,
    PlanKey,
    RecurrentFacts,
    RecurrentWeights,
    StalePlan,
    covering_plan,
    hookimpl,
)
from enginery_attn_linear.inputs import Rows, rows_of
from enginery_attn_linear.kernels import chunk, convolve, step
from enginery_attn_linear.plan import DecodeGroup, LinearPlan, RequestPart, plan_group, plan_parts
from enginery_attn_linear.verification import Kept, commit, read, run_rows

CHUNK_TOKENS: Final = 64


class LinearAttention:
    """Recurrent layers over the states of their requests. Implements `enginery.api.AttnBackend` and `Advances`."""

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = context.instance
        self.states = context.states
        self.device = context.device
        self._scratch = context.geometry.scratch_page(STATE)
        self._unsettled: WeakKeyDictionary[ForwardPlan, dict[LocalLayerId, Kept]] = WeakKeyDictionary()

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
        """mixed: [T, C], gates: [T, G]; out: [T, H, V]. See `enginery.api.Advances`.

        Rows that belong to no request are left as they are in `out`.
        """
        planned = covering_plan(plan, batch, LinearPlan, backend=self.backend_id)
        states, facts, weights = self.states.layer(layer.local_id), layer.facts.recurrent, layer.recurrent
        assert facts is not None, "only recurrent layers advance"
        assert weights is not None, "a recurrent layer has its weights"
        if planned.group is not None:
            rows = slice(0, planned.group.num_rows)
            out[rows], kept = _advance_group(
                mixed[rows], gates[rows], facts, weights, group=planned.group, states=states, scale=layer.scale
            )
            if kept is not None:
                self._unsettled.setdefault(planned, {})[layer.local_id] = kept
        for part in planned.parts:
            rows = slice(part.start, part.stop)
            out[rows] = _advance_part(mixed[rows], gates[rows], facts, weights, part=part, states=states, scale=layer.scale)

    @hookimpl
    def commit_state(self, plan: ForwardPlan, accepted: Accepted) -> bool:
        """Move the states of requests that verified drafts, at once."""
        if not isinstance(plan, LinearPlan) or plan.key.backend != self.backend_id:
            raise StalePlan(f"{self.backend_id} is to commit states of {plan!r:.100}, which it has not planned")
        if plan.group is None or plan.group.length == 1:
            return True
        kept = self._unsettled.pop(plan, None)
        if kept is None:
            raise StalePlan(f"the states of the plan made for {plan.key} were committed before, or no layer has advanced with it")
        counts = accepted.counts[: plan.group.size]
        for layer, of_layer in kept.items():
            commit(of_layer, counts, self.states.layer(layer), group=plan.group, scratch=self._scratch)
        return True


def _advance_group(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    facts: RecurrentFacts,
    weights: RecurrentWeights,
    *,
    group: DecodeGroup,
    states: Mapping[str, torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, Kept | None]:
    """L tokens of each of B requests: [B L, H, V]. Where they verify drafts, states stay, and what moves them on is kept."""
    verifies, inputs, rows = group.length > 1, None, None
    if "conv" in states:
        new = mixed.view(group.size, group.length, -1)  # [B, L, C]
        inputs = torch.cat((read(states, "conv", group), new), dim=1)  # [B, W - 1 + L, C]
        if not verifies:
            states["conv"].index_copy_(0, group.writes, inputs[:, 1:])
        windows = inputs.float().unfold(1, facts.conv_kernel, 1).transpose(2, 3)  # [B, L, W, C]
        mixed = _convolved(windows, facts, weights).flatten(0, 1)
    if "matrix" not in states:
        made = mixed.reshape(-1, facts.value_heads, facts.value_dim)
    else:
        rows, state = rows_of(mixed, gates, facts, weights), read(states, "matrix", group)  # [B, H, V, K]
        made = run_rows(rows, state, length=group.length, scale=scale)
        if not verifies:
            states["matrix"].index_copy_(0, group.writes, state)
    return made, Kept(inputs=inputs, rows=rows) if verifies else None


def _advance_part(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    facts: RecurrentFacts,
    weights: RecurrentWeights,
    *,
    part: RequestPart,
    states: Mapping[str, torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """The S rows of one request: [S, H, V]."""
    if "conv" in states:
        stored = states["conv"]
        before = torch.zeros_like(stored[0]) if part.fresh else stored[part.read]
        inputs = torch.cat((before, mixed))  # [W - 1 + S, C]
        stored[part.write] = inputs[len(mixed) :]
        mixed = _convolved(inputs.float().unfold(0, facts.conv_kernel, 1).transpose(1, 2), facts, weights)
    if "matrix" not in states:
        return mixed.view(-1, facts.value_heads, facts.value_dim)
    state = states["matrix"][part.write]  # [H, V, K], a view
    if part.fresh:
        state.zero_()
    elif part.read != part.write:
        state.copy_(states["matrix"][part.read])
    made = []
    for start in range(0, len(mixed), CHUNK_TOKENS):
        some = slice(start, start + CHUNK_TOKENS)
        made.append(_chunk(rows_of(mixed[some], gates[some], facts, weights), state, scale=scale))
    return torch.cat(made)


def _convolved(windows: torch.Tensor, facts: RecurrentFacts, weights: RecurrentWeights) -> torch.Tensor:
    assert weights.conv is not None, "a layer with a convolution has its weight"
    return convolve(windows, weights.conv, weights.conv_bias, silu=facts.conv_silu)


def _chunk(rows: Rows, state: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Some rows of one request, [S, H, V]; by products where its rule has such a form here, else token by token."""
    q, k, v, log_decay, beta, skipped = rows
    if beta is None and log_decay.shape[-1] == 1:
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))  # [H, S, ...]
        made = chunk(q, k, v, log_decay[..., 0].T, state, scale=scale).transpose(0, 1)
    else:
        tokens = [slice(row, row + 1) for row in range(len(q))]
        betas = [None if beta is None else beta[one] for one in tokens]
        made = torch.cat(
            [
                step(q[one], k[one], v[one], log_decay[one], own, state[None], scale=scale)
                for one, own in zip(tokens, betas, strict=True)
            ]
        )
    return made if skipped is None else made + skipped
