"""The backend: plans on the host, then runs a kernel for the convolution and one for the recurrence. T tokens, C channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from enginery.api import (
    Accepted,
    BackendContext,
    ForwardBatch,
    ForwardPlan,
    LayerSpec,
    LocalLayerId,
    Phase,
    PlanKey,
    RecurrentFacts,
    RecurrentWeights,
    StalePlan,
    Unsupported,
    covering_plan,
    hookimpl,
)
from enginery_attn_delta.launch import Conv, Gating, Heads, Rows, convolve, recur, scan
from enginery_attn_delta.plan import DeltaPlan, plan_rows, refresh

CONVOLVED_WITHIN: Final = 8  # requests: each of a key head's programs convolves its query and key anew


class Kept(NamedTuple):
    """What a layer was given of rows that verify drafts, until its states move on. out: for results that nobody reads again."""

    layer: LayerSpec
    mixed: torch.Tensor
    gates: torch.Tensor
    out: torch.Tensor


class DeltaAttention:
    """Recurrent layers of every rule, from one page of states to another; decoding steps in graphs.

    Implements `enginery.api.AttnBackend` and `Advances`.
    """

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = context.instance
        self.states = context.states
        self.device = context.device
        self.max_graph_requests = 0
        self._taps: dict[LocalLayerId, torch.Tensor] = {}
        self._unsettled: WeakKeyDictionary[ForwardPlan, dict[LocalLayerId, Kept]] = WeakKeyDictionary()

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> DeltaPlan:
        """Upload where rows and states are; of a plan that is captured, `refresh_graph_metadata` writes the pages there."""
        one_each = batch.phase is Phase.DECODE and batch.num_tokens == batch.num_requests
        if capture and not (one_each and 0 < batch.num_requests <= self.max_graph_requests):
            raise Unsupported(
                f"{self.backend_id} captures decoding steps of one token for each of up to {self.max_graph_requests} requests; "
                f"this is a batch of {batch.num_requests} requests and {batch.num_tokens} tokens in phase {batch.phase}"
            )
        decode, verified, prefill = plan_rows(batch, self.device)
        key = PlanKey.of(batch, self.backend_id, capture=capture)
        return DeltaPlan(key=key, decode=decode, verified=verified, prefill=prefill)

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        """Each captured plan has memory of its own, of a few bytes a request."""
        self.max_graph_requests = max_batch_size
        return True

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        """Write this batch's pages to where the captured plan has them."""
        if not isinstance(plan, DeltaPlan) or plan.decode is None or plan.key.num_requests != batch.num_requests:
            raise StalePlan(f"the plan to refresh was made for {plan.key}, and the batch has {batch.num_requests} requests")
        refresh(plan.decode, batch)
        return True

    def advance(
        self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: torch.Tensor
    ) -> None:
        """mixed: [T, C], gates: [T, G], out: [T, HV, V]. See `enginery.api.Advances`."""
        planned = covering_plan(plan, batch, DeltaPlan, backend=self.backend_id)
        for rows in planned.groups:
            self.advance_rows(mixed, gates, layer, rows, out)
        if planned.verified is not None:
            stop = planned.verified.num_requests * batch.decode_len
            kept = Kept(layer, mixed[:stop].clone(), gates[:stop].clone(), torch.empty_like(out[:stop]))
            self._unsettled.setdefault(planned, {})[layer.local_id] = kept

    def advance_rows(self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, rows: Rows, out: torch.Tensor) -> None:
        """Some requests' rows, token after token: of a few with one token each, the recurrence convolves what it reads itself."""
        (facts, weights), states = facts_of(layer), self.states.layer(layer.local_id)
        few = rows.tile_rows == 1 and len(rows.reads) <= CONVOLVED_WITHIN
        if few and facts.rule in ("linear", "delta") and weights.conv is not None and facts.conv_kernel > 1:
            if layer.local_id not in self._taps:  # a tap's weights side by side, as its inputs are
                self._taps[layer.local_id] = weights.conv.T.contiguous()
            taps = self._taps[layer.local_id]
            conv = Conv(taps=taps, bias=weights.conv_bias, states=states["conv"], activates=facts.conv_silu)
            recur_rows(mixed, gates, layer, states, rows, out, conv=conv)
            return
        convolved = convolve_rows(mixed, layer, states, rows, out, dtype=torch.float32)
        recur_rows(convolved, gates, layer, states, rows, out)

    @hookimpl
    def commit_state(self, plan: ForwardPlan, accepted: Accepted) -> bool:
        """Run over the rows that stand once more, now from the states to where they are written."""
        if not isinstance(plan, DeltaPlan) or plan.key.backend != self.backend_id:
            raise StalePlan(f"{self.backend_id} is to commit states of {plan!r:.100}, which it has not planned")
        if plan.verified is None:
            return True
        unsettled = self._unsettled.pop(plan, None)
        if unsettled is None:
            raise StalePlan(f"the states of the plan made for {plan.key} were committed before, or no layer has advanced with it")
        groups = plan.verified.standing(accepted.counts[: plan.verified.num_requests])
        for layer, mixed, gates, out in unsettled.values():
            for rows in groups:
                self.advance_rows(mixed, gates, layer, rows, out)
        return True


def facts_of(layer: LayerSpec) -> tuple[RecurrentFacts, RecurrentWeights]:
    """What a recurrent layer has besides."""
    assert layer.facts.recurrent is not None, "only recurrent layers advance"
    assert layer.recurrent is not None, "a recurrent layer has its weights"
    return layer.facts.recurrent, layer.recurrent


def convolve_rows(
    mixed: torch.Tensor,
    layer: LayerSpec,
    states: Mapping[str, torch.Tensor],
    rows: Rows,
    out: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """mixed after the layer's convolution, [T, C] of `dtype`, of these rows; mixed itself if there is none.

    Where the convolution is all there is, it is written to `out`.
    """
    facts, weights = facts_of(layer)
    if weights.conv is None or "conv" not in states:
        return mixed
    convolved = out.view(mixed.shape) if facts.rule == "conv" else torch.empty(mixed.shape, dtype=dtype, device=mixed.device)
    convolve(mixed, weights.conv, weights.conv_bias, states=states["conv"], rows=rows, out=convolved, activates=facts.conv_silu)
    return convolved


def recur_rows(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    layer: LayerSpec,
    states: Mapping[str, torch.Tensor],
    rows: Rows,
    out: torch.Tensor,
    *,
    conv: Conv | None = None,
) -> None:
    """The recurrence over some requests' rows, token after token. mixed: [T, C], after the convolution, or before `conv`."""
    facts, weights = facts_of(layer)
    if facts.rule == "conv":
        return
    matrix = states["matrix"]
    if facts.rule == "scan":
        assert weights.a_log is not None, "a scan has a_log"
        flat = out.view(mixed.shape)
        scan(
            mixed,
            gates,
            a_log=weights.a_log,
            skip=weights.skip,
            states=matrix,
            rows=rows,
            scale=layer.scale,
            out=flat,
        )
        return
    gating = Gating(
        decay=facts.decay,
        delta=facts.rule == "delta",
        a_log=weights.a_log,
        dt_bias=weights.dt_bias,
        log_decay=weights.log_decay,
        skip=weights.skip,
        floor=facts.gate_floor,
        steps=facts.ssm,
        step_limits=facts.step_limits,
    )
    heads = heads_of(facts)
    recur(mixed, gates, states=matrix, rows=rows, heads=heads, gating=gating, scale=layer.scale, out=out, conv=conv)


def heads_of(facts: RecurrentFacts) -> Heads:
    """Where queries, keys and values are in a row of `mixed`."""
    keys, _, values = facts.mixed_widths
    q_at, k_at, v_at = (values + keys, values, 0) if facts.ssm else (0, keys, 2 * keys)
    return Heads(
        num_keys=facts.key_heads,
        num_values=facts.value_heads,
        key_dim=facts.key_dim,
        value_dim=facts.value_dim,
        q_at=q_at,
        k_at=k_at,
        v_at=v_at,
    )
