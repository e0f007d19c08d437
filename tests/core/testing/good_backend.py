"""A correct backend in plain loops, for softmax attention, MLA and recurrence: what the bad ones differ from by one thing each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from enginery.api import (
    STATE,
    Accepted,
    AttnBackendSpec,
    BackendContext,
    Capabilities,
    ChunkPlan,
    ForwardBatch,
    ForwardPlan,
    KVPiece,
    LayerSpec,
    MaskPart,
    Phase,
    PlanKey,
    StalePlan,
    VerifyMask,
    covering_plan,
    hookimpl,
)

DTYPES = frozenset({"float32", "bfloat16"})
CAPABILITIES = Capabilities(
    devices=frozenset({"cpu"}),
    dtypes=DTYPES,
    kv_dtypes=DTYPES,
    phases=frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.VERIFY}),
    head_dims=frozenset({16, 64}),
    page_sizes=frozenset({1, 16}),
    sliding_window=True,
    softcap=True,
    sinks=True,
    mla=True,
    mla_ragged=True,
    latent_dims=frozenset({(32, 16)}),
    recurrences=frozenset({("linear", "head"), ("linear", "constant")}),
    batch_invariant=True,
    lse_base="e",
    device_lengths=True,
    trees=True,
    prompt_checkpoints=True,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One request: its number, its rows of the batch, its length, its pages [n], those that its state is read from and written to.

    verifies: whether its state waits for `commit_state`. checkpoint: a page, and after how many rows it is written.
    tree: which of its last keys each of its rows sees, [N, N] bool.
    """

    index: int
    rows: slice
    length: int
    pages: torch.Tensor
    states: tuple[int, int]
    verifies: bool = False
    checkpoint: tuple[int, int] = (0, 0)
    tree: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class GoodPlan(ForwardPlan):
    """The requests that have tokens. trees: the masks of those that verify, [requests, N, N] bool."""

    parts: tuple[Part, ...]
    trees: torch.Tensor | None = None


def softmax(q, k, v, *, seen, layer):
    """q: [S, H, D], k: [L, K, D], v: [L, K, V], seen: [S, L] -> [S, H, V], and the natural log-sum-exp [S, H]."""
    q, k, v = q.float(), k.float(), v.float()
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("shd,lhd->hsl", q, k.repeat_interleave(group, dim=1)) * layer.scale
    if layer.facts.softcap is not None:
        scores = layer.facts.softcap * torch.tanh(scores / layer.facts.softcap)
    lse = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
    total = lse if layer.sinks is None else torch.logaddexp(lse, layer.sinks[:, None])
    weights = (scores - total[..., None]).exp().masked_fill(~seen, 0.0)
    return torch.einsum("hsl,lhv->shv", weights, v.repeat_interleave(group, dim=1)), lse.T


class GoodBackend:
    """Implements `enginery.api.AttnBackend`."""

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = context.instance
        self.pool = context.pool
        self.states = context.states
        self.page_size = context.geometry.page_size
        self.device = context.device
        self.scratch = context.geometry.scratch_page(STATE)
        self.unsettled = {}  # by plan

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch) -> GoodPlan:
        parts, row, trees = [], 0, self.room_for_trees(batch) if batch.trees else None
        for index, (q_len, length) in enumerate(zip(batch.q_lens_cpu.tolist(), batch.kv_lens_cpu.tolist(), strict=True)):
            if q_len:
                pages = batch.page_table_cpu[index, : self.num_pages(length)].to(self.device, non_blocking=True)
                tree = None if trees is None or index >= len(trees) else trees[index]
                part = Part(index=index, rows=slice(row, row + q_len), length=length, pages=pages, states=(0, 0), tree=tree)
                parts.append(self.with_states(part, batch, index) if STATE in batch.views else part)
            row += q_len
        return GoodPlan(key=self.key(batch), parts=tuple(parts), trees=trees)

    def room_for_trees(self, batch):
        length = batch.decode_len
        return torch.zeros(batch.num_decode_requests, length, length, dtype=torch.bool, device=self.device)

    @hookimpl
    def verify_mask(self, plan: ForwardPlan) -> VerifyMask:
        return VerifyMask(parts=(MaskPart(slice(0, len(plan.trees)), plan.trees),))

    def with_states(self, part, batch, index):
        view, checkpoint = batch.states, (0, 0)
        if view.checkpoints_cpu is not None:
            checkpoint = int(view.checkpoints_cpu[index]), int(view.checkpoint_rows_cpu[index])
        return dataclasses.replace(
            part,
            states=(int(view.reads_cpu[index]), int(view.writes_cpu[index])),
            verifies=batch.decode_len > 1 and index < batch.num_decode_requests,
            checkpoint=checkpoint,
        )

    def key(self, batch: ForwardBatch) -> PlanKey:
        return PlanKey.of(batch, self.backend_id)

    def num_pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def plan_of(self, plan, batch: ForwardBatch) -> GoodPlan:
        return covering_plan(plan, batch, GoodPlan, backend=self.backend_id)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        plan: ForwardPlan,
        out: torch.Tensor,
    ) -> None:
        for part in self.plan_of(plan, batch).parts:
            self.attend_part(q, part if batch.kv_lens is None else self.as_long_as(part, batch.kv_lens), layer, out)

    def as_long_as(self, part, lengths):
        return dataclasses.replace(part, length=int(lengths[part.index]))

    def advance(
        self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: torch.Tensor
    ) -> None:
        for index, part in enumerate(self.plan_of(plan, batch).parts):
            rows = mixed[part.rows].float(), gates[part.rows].float()
            if part.verifies:
                self.unsettled.setdefault(plan, []).append((index, part, layer, *rows))
                part = dataclasses.replace(part, states=(part.states[0], self.scratch))
            elif part.checkpoint[1]:
                self.keep_amid(*rows, part, layer)
            self.recur(*rows, part, layer, out[part.rows])

    def keep_amid(self, mixed, gates, part, layer) -> None:
        page, rows = part.checkpoint
        so_far = dataclasses.replace(part, length=part.length - len(mixed) + rows, states=(part.states[0], page))
        out = mixed.new_empty(rows, layer.facts.recurrent.value_heads, layer.facts.recurrent.value_dim)
        self.recur(mixed[:rows], gates[:rows], so_far, layer, out)

    @hookimpl
    def commit_state(self, plan: ForwardPlan, accepted: Accepted) -> bool:
        if plan not in self.unsettled:
            raise StalePlan("nothing waits to be committed")
        for index, part, layer, mixed, gates in self.unsettled.pop(plan):
            self.commit(mixed, gates, part, layer, accepted.counts[index])
        return True

    def commit(self, mixed, gates, part, layer, count) -> None:
        states = self.states.layer(layer.local_id)
        out = mixed.new_empty(len(mixed), layer.facts.recurrent.value_heads, layer.facts.recurrent.value_dim)
        chosen = {name: kept[part.states[1]].clone() for name, kept in states.items()}
        for rows in range(1, len(mixed) + 1):
            length = part.length - len(mixed) + rows
            so_far = dataclasses.replace(part, length=length, states=(part.states[0], self.scratch))
            self.recur(mixed[:rows], gates[:rows], so_far, layer, out)
            for name, kept in states.items():
                chosen[name] = torch.where(self.stands(name, rows, count), kept[self.scratch], chosen[name])
                if rows == part.checkpoint[1]:
                    kept[part.checkpoint[0]] = kept[self.scratch]
        for name, kept in states.items():
            kept[part.states[1]] = chosen[name]

    def stands(self, name, rows, count):
        return count + 1 == rows

    def attend_part(self, q, part, layer, out) -> None:
        keys, values = (pages[part.pages].flatten(0, 1)[: part.length] for pages in self.pool.layer(layer.local_id))
        num_rows = part.rows.stop - part.rows.start
        rows = torch.arange(part.length - num_rows, part.length, device=self.device)[:, None]
        seen = self.seen(rows, torch.arange(len(keys), device=self.device), layer.facts.sliding_window)
        seen = seen if part.tree is None else self.branched(seen, part.tree)
        out[part.rows] = softmax(q[part.rows], keys, values, seen=seen, layer=layer)[0].to(out.dtype)

    def branched(self, seen, tree):
        return torch.cat((seen[:, : -len(tree)], tree), 1)

    def seen(self, rows, keys, window):
        return (keys <= rows) if window is None else (keys <= rows) & (keys > rows - window)

    def recur(self, mixed, gates, part, layer, out) -> None:
        facts, weights, states = layer.facts.recurrent, layer.recurrent, self.states.layer(layer.local_id)
        read, write = part.states
        before = {
            name: (kept[read].clone() if part.length > len(mixed) else torch.zeros_like(kept[0])) for name, kept in states.items()
        }
        if "conv" in states:
            inputs = torch.cat((before["conv"], mixed))
            states["conv"][write] = inputs[len(mixed) :]
            rows = [(inputs[row : row + facts.conv_kernel] * weights.conv.T).float().sum(0) for row in range(len(mixed))]
            mixed = torch.stack(rows) if weights.conv_bias is None else torch.stack(rows) + weights.conv_bias
            mixed = torch.nn.functional.silu(mixed)
        keys, _, values = facts.mixed_widths
        q, k, v = mixed.split([keys, keys, values], dim=1)
        if facts.ssm:
            v, k, q = mixed.split([values, keys, keys], dim=1)
        group = facts.value_heads // facts.key_heads
        q, k = (part.reshape(-1, facts.key_heads, facts.key_dim).repeat_interleave(group, dim=1) for part in (q, k))
        v = v.reshape(-1, facts.value_heads, facts.value_dim)
        written = v
        if facts.decay == "constant":
            decay = weights.log_decay.exp().expand(len(mixed), -1)
        else:
            steps = torch.nn.functional.softplus(gates + weights.dt_bias).clamp(*facts.step_limits)
            decay = (-weights.a_log.exp() * steps).exp()
            written = v * steps[..., None] if facts.ssm else v
        state = before["matrix"]
        for row in range(len(q)):
            state = decay[row, :, None, None] * state + written[row, :, :, None] * k[row, :, None, :]
            seen = layer.scale * torch.einsum("hd,hvd->hv", q[row].float(), state)
            out[row] = seen if weights.skip is None else seen + weights.skip[:, None] * v[row]
        states["matrix"][write] = state

    @hookimpl
    def init_mha_chunk_metadata(self, batch: ForwardBatch, chunks: tuple[KVPiece, ...], disable_ragged: bool) -> ChunkPlan:
        q_lens = batch.q_lens_cpu.tolist()
        lens = [chunk.lens_cpu.tolist() for chunk in chunks] + ([] if disable_ragged else [q_lens])

        def attend(q, k, v, layer, piece, out, lse) -> None:
            row, key = 0, 0
            for num_rows, num_keys in zip(q_lens, lens[piece.index], strict=True):
                rows, keys = slice(row, row + num_rows), slice(key, key + num_keys)
                seen = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q.device)
                seen = seen.tril(num_keys - num_rows) if piece.causal else seen
                attended, sums = softmax(q[rows], k[keys], v[keys], seen=seen, layer=layer)
                out[rows] = attended.to(out.dtype)
                if lse is not None:
                    lse[rows] = self.in_base(sums)
                row, key = rows.stop, keys.stop

        return ChunkPlan(key=self.key(batch), attend=attend)

    def in_base(self, lse):
        return lse


SPEC = AttnBackendSpec(name="good", api=(2, 0), priority=1, capabilities=CAPABILITIES, summary="plain loops")
GOOD = (SPEC, GoodBackend)
