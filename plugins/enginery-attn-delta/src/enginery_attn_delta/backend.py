"""The backend: plans on the host, then runs a kernel for the convolution and one for the recurrence. T tokens, C channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from enginery.api import (
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
    Unsupported,
    covering_plan,
    hookimpl,
)
from enginery_attn_delta.launch import Conv, Gating, Heads, Rows, convolve, linear_chunks, recur, scan
from enginery_attn_delta.plan import DeltaPlan, plan_rows, refresh

CONVOLVED_WITHIN: Final = 2  # requests: each of a key head's programs convolves its query and key anew
BY_TOKEN: Final = 8  # tokens: linear attention of no more of each request, and of float32, takes one after the other


class Kept(NamedTuple):
    """What a layer was given of rows that verify drafts, until its states move on."""

    layer: LayerSpec
    mixed: torch.Tensor
    gates: torch.Tensor


class GraphState:
    """Where captured steps that verify drafts keep what recurrent layers are given: one place for all, as one runs at a time.

    most_requests, most_rows: of a captured step.
    """

    def __init__(self, most_requests: int, most_rows: int) -> None:
        self.most_requests, self.most_rows = most_requests, most_rows
        self._places: dict[LocalLayerId, tuple[torch.Tensor, ...]] = {}

    def kept(self, layer: LayerSpec, mixed: torch.Tensor, gates: torch.Tensor) -> Kept:
        """A copy of both, where every step has it: [most rows, C] and [most rows, G], taken when a layer's first is captured."""
        given = (mixed, gates)
        if layer.local_id not in self._places:
            self._places[layer.local_id] = tuple(part.new_empty(self.most_rows, part.shape[1]) for part in given)
        places = zip(self._places[layer.local_id], given, strict=True)
        return Kept(layer, *(place[: len(part)].copy_(part) for place, part in places))


class DeltaAttention:
    """Recurrent layers of every rule, from one page of states to another; decoding steps in graphs.

    Implements `enginery.api.AttnBackend` and `Advances`.
    """

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = context.instance
        self.states = context.states
        self.device = context.device
        self.graphs = GraphState(0, 0)
        facts = [layer.recurrent for layer in context.geometry.layers]
        self._num_layers, self._most_heads = len(facts), max((each.key_heads for each in facts if each is not None), default=0)
        self._unsettled: WeakKeyDictionary[ForwardPlan, dict[LocalLayerId, Kept]] = WeakKeyDictionary()

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> DeltaPlan:
        """Upload where rows and states are; of a plan that is captured, `refresh_graph_metadata` writes the pages there."""
        if capture:
            self._check_capture(batch)
        planned = plan_rows(batch, PlanKey.of(batch, self.backend_id, capture=capture), self.device)
        if planned.decode is None or batch.num_decode_requests > CONVOLVED_WITHIN:
            return planned
        arrived = torch.zeros(self._num_layers, batch.num_decode_requests * self._most_heads, dtype=torch.int32, device=self.device)
        return dataclasses.replace(planned, decode=dataclasses.replace(planned.decode, arrived=arrived))

    def _check_capture(self, batch: ForwardBatch) -> None:
        """Raises `Unsupported` for a batch that is larger than `init_graph_state` was told."""
        graphs = self.graphs
        if batch.num_requests > graphs.most_requests or batch.num_tokens > graphs.most_rows:
            raise Unsupported(
                f"{self.backend_id} captures steps of up to {graphs.most_requests} requests and {graphs.most_rows} rows, as "
                f"init_graph_state was told; this is a batch of {batch.num_requests} requests and {batch.num_tokens} tokens"
            )

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        """Each captured plan has memory of its own, of a request some bytes, and of up to `CONVOLVED_WITHIN` four for each layer
        and key head; for verified rows see `GraphState`.
        """
        self.graphs = GraphState(max_batch_size, max_num_tokens)
        return True

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        """Write this batch's pages to where the captured plan has them."""
        if not isinstance(plan, DeltaPlan) or not plan.key.capture or plan.key.num_requests != batch.num_requests:
            raise StalePlan(f"the plan to refresh was made for {plan.key}, and the batch has {batch.num_requests} requests")
        refresh(plan, batch)
        return True

    def advance(
        self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: torch.Tensor
    ) -> None:
        """mixed: [T, C], gates: [T, G], out: [T, HV, V]. See `enginery.api.Advances`."""
        planned = covering_plan(plan, batch, DeltaPlan, backend=self.backend_id)
        for rows in planned.leading:
            self.advance_rows(mixed, gates, layer, rows, out)
        for rows in planned.prompts:
            self.advance_rows(mixed, gates, layer, rows, out, are_prompts=True)
        self.keep(mixed, gates, layer, batch, planned)

    def keep(self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, plan: DeltaPlan) -> None:
        """Keep what the layer was given of rows that verify drafts, for `commit_state`; of a captured step, where the graph writes
        it each time.
        """
        if plan.verified is None:
            return
        rows = slice(0, plan.verified.num_requests * batch.decode_len)
        mixed, gates = mixed[rows], gates[rows]
        kept = self.graphs.kept(layer, mixed, gates) if plan.key.capture else Kept(layer, mixed.clone(), gates.clone())
        self._unsettled.setdefault(plan, {})[layer.local_id] = kept

    def advance_rows(
        self,
        mixed: torch.Tensor,
        gates: torch.Tensor,
        layer: LayerSpec,
        rows: Rows,
        out: torch.Tensor,
        *,
        are_prompts: bool = False,
    ) -> None:
        """Some requests' rows: of a few with one token each, the recurrence convolves what it reads itself; linear attention takes
        longer prompts in chunks.
        """
        (facts, weights), states = facts_of(layer), self.states.layer(layer.local_id)
        columns = weights.conv if facts.rule in ("linear", "delta") and facts.conv_kernel > 1 else None
        if (arrived := rows.arrived) is not None and columns is not None:
            conv = Conv(
                weight=columns,
                bias=weights.conv_bias,
                states=states["conv"],
                activates=facts.conv_silu,
                arrived=arrived[layer.local_id],
            )
            recur_rows(mixed, gates, layer, states, rows, out, conv=conv)
            return
        in_chunks = are_prompts and facts.rule == "linear" and rows.longest > BY_TOKEN and mixed.element_size() == 2
        convolved = convolve_rows(mixed, layer, states, rows, out, dtype=mixed.dtype if in_chunks else torch.float32)
        recur_rows(convolved, gates, layer, states, rows, out, in_chunks=in_chunks)

    @hookimpl
    def commit_state(self, plan: ForwardPlan, accepted: Accepted) -> bool:
        """Run over the rows that stand once more, now from the states to where they are written.

        Of a captured plan as often as it is asked: it is captured too, and replayed.
        """
        if not isinstance(plan, DeltaPlan) or plan.key.backend != self.backend_id:
            raise StalePlan(f"{self.backend_id} is to commit states of {plan!r:.100}, which it has not planned")
        if plan.verified is None:
            return True
        unsettled = self._unsettled.get(plan) if plan.key.capture else self._unsettled.pop(plan, None)
        if unsettled is None:
            raise StalePlan(f"the states of the plan made for {plan.key} were committed before, or no layer has advanced with it")
        groups = plan.verified.standing(accepted.counts[: plan.verified.num_requests])
        after = [dataclasses.replace(rows, chained=False) for rows in groups]  # the first kernels read what was made just now
        for layer, mixed, gates in unsettled.values():
            facts, _ = facts_of(layer)
            out = mixed.new_empty(len(mixed), facts.value_heads, facts.value_dim)  # which nobody reads
            for rows in after:
                self.advance_rows(mixed, gates, layer, rows, out)
            after = groups
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
    in_chunks: bool = False,
) -> None:
    """The recurrence over some requests' rows, token after token, or `in_chunks`, which a linear rule can.

    mixed: [T, C], after the convolution, or before `conv`.
    """
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
    given: dict[str, Any] = {
        "states": matrix,
        "rows": rows,
        "heads": heads_of(facts),
        "gating": gating,
        "scale": layer.scale,
        "out": out,
    }
    if in_chunks:
        linear_chunks(mixed, gates, **given)
    else:
        recur(mixed, gates, **given, conv=conv)


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
