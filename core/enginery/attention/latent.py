"""MLA over one backend: absorbed decoding, and prefills by the strategy that is cheapest for their sizes.

S rows, L tokens of a piece; H, R, N, P as in `contracts/attention.py`, V value dim of a head.

Absorbed, a row costs 2 R + P multiply-adds per key and head; over keys and values made from the latents it costs N + P + V, after
R (N + V) once for each of the request's tokens. So long prefills are ragged, and short ones over a long prefix are absorbed.
The strategy is chosen when the batch is planned, and what the backend denies is not begun. Log-sum-exps are natural in here; from a
backend they come in the base that its capabilities state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from enginery.attention.axes import cut_by_phase
from enginery.attention.composite import Composite, CompositePlan, Part
from enginery.attention.prefill_strategy import cut_pieces, strategies_to_try
from enginery.attention.relay import CHUNKS, MIXED_GRAPHS, BackendRelay
from enginery.contracts.attention import Capabilities, KVGeometry, LayerSpec
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.latent import ChunkPlan, Denied, KVPiece, PrefillStrategy
from enginery.contracts.memory import KVPool
from enginery.contracts.plan import ForwardPlan, covering_plan
from enginery.errors import StalePlan
from enginery.kv.upload import to_device
from enginery.plugin.hookspecs import hookimpl

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LatentSettings:
    """strategy: of every prefill, where the backend allows it; None chooses by size. chunk_tokens: keys and values made at once."""

    strategy: PrefillStrategy | None
    chunk_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RaggedPart(Part):
    """Prefilling requests whose keys and values are made from latents.

    slots: of each piece's tokens, [L] int64, device; None where they are the step's own, whose latents are at hand.
    """

    strategy: PrefillStrategy
    chunk_plan: ChunkPlan
    pieces: tuple[KVPiece, ...]
    slots: tuple[Tensor | None, ...]


class LatentAttention(Composite):
    """Absorbs, or makes keys and values, around its one child, which sees latents as one KV head or keys and values as given."""

    kind = "mla"

    def __init__(
        self, child: BackendRelay, *, capabilities: Capabilities, geometry: KVGeometry, pool: KVPool, settings: LatentSettings
    ) -> None:
        super().__init__(child)
        self.capabilities, self.pool, self.settings = capabilities, pool, settings
        self.page_size = geometry.page_size
        self.facts = next(layer.latent for layer in geometry.layers if layer.latent is not None)
        self._said: set[str] = set()

    @hookimpl
    def init_mixed_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool | None:
        """As the child does, which absorbs; None where another strategy is asked for."""
        absorbs = self.settings.strategy in (None, PrefillStrategy.ABSORBED)
        return self.children[0].ask(MIXED_GRAPHS, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens) if absorbs else None

    def cut(self, batch: ForwardBatch, *, capture: bool) -> Iterator[Part]:
        """Decoding requests, then prefilling ones; of a captured mixed step all, absorbed."""
        for cut in cut_by_phase(batch, capture=capture):
            yield Part(child=0, rows=cut.rows, requests=cut.requests, batch=cut.batch)

    def plan_part(self, part: Part, *, capture: bool) -> Part:
        """A prefilling part by the first strategy that the backend does not deny; else from the latents in their pages."""
        prefills = part.batch.phase is Phase.PREFILL and part.batch.num_requests > 0
        return (self._plan_ragged(part) if prefills else None) or super().plan_part(part, capture=capture)

    def _plan_ragged(self, part: Part) -> RaggedPart | None:
        """Plan a prefill by the first strategy that the backend takes. None: it runs absorbed, from the latents."""
        batch, asked, most = part.batch, self.settings.strategy, self.settings.chunk_tokens
        q_lens, kv_lens = batch.q_lens_cpu, batch.kv_lens_cpu
        order = strategies_to_try(self.facts, self.capabilities, asked=asked, chunk_tokens=most, q_lens=q_lens, kv_lens=kv_lens)
        for strategy in order:
            if strategy is PrefillStrategy.ABSORBED:
                return None
            chunks, own = cut_pieces(q_lens, kv_lens, strategy, chunk_tokens=most)
            answer = self.children[0].make_chunk_plan(batch, chunks, disable_ragged=own is None)
            if isinstance(answer, ChunkPlan):
                pieces = chunks if own is None else (own, *chunks)
                return RaggedPart(
                    child=0,
                    rows=part.rows,
                    requests=part.requests,
                    batch=batch,
                    strategy=strategy,
                    chunk_plan=answer,
                    pieces=pieces,
                    slots=tuple(self._slots(piece, batch) for piece in pieces),
                )
            why = answer.reason if isinstance(answer, Denied) else f"it has no {CHUNKS}"
            said = f"{self.children[0].backend_id} denies MLA prefill {strategy}: {why}; another strategy is taken"
            if said not in self._said:
                self._said.add(said)
                _log.warning(said)
        return None

    def _slots(self, piece: KVPiece, batch: ForwardBatch) -> Tensor | None:
        """Where the latents of a piece's tokens are: [L] int64, device; None for the step's own."""
        if piece.causal and torch.equal(piece.lens_cpu, batch.q_lens_cpu):
            return None
        lens, table = piece.lens_cpu.numpy().astype(np.int64), batch.page_table_cpu.numpy()
        request = np.arange(len(lens)).repeat(lens)  # [L]
        first = lens.cumsum() - lens - piece.starts_cpu.numpy()  # [B]
        column, offset = np.divmod(np.arange(len(request)) - first[request], self.page_size)
        slots = table[request, column].astype(np.int64) * self.page_size + offset
        return to_device(torch.from_numpy(slots), batch.input_ids.device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: Tensor
    ) -> None:
        """q: [T, H, N + P]; k: the step's latents [T, 1, R + P]; out: [T, H, V]. `layer.latent` has the layer's projection."""
        for part in covering_plan(plan, batch, CompositePlan, backend=self.backend_id).parts:
            rows = part.rows or slice(None)
            if isinstance(part, RaggedPart):
                self._attend_ragged(q[rows], k[rows], layer, part, out[rows])
            else:
                assert part.plan is not None, "a part is ragged or planned by the child"
                self._attend_absorbed(q[rows], k[rows], layer, part.batch, part.plan, out[rows])

    def _attend_absorbed(self, q: Tensor, k: Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: Tensor) -> None:
        """Multiply the key projection into the query and the value projection into the output; attend over latents between."""
        facts, kv_b = self.facts, _projection(layer)
        to_key, to_value = torch.split(kv_b, [facts.nope_dim, facts.value_dim], dim=1)  # [H, N, R], [H, V, R]
        q_nope, q_rope = torch.split(q, [facts.nope_dim, facts.rope_dim], dim=-1)
        latent_q = q.new_empty((*q.shape[:2], facts.rank + facts.rope_dim))  # [S, H, R + P]
        torch.bmm(q_nope.transpose(0, 1), to_key, out=latent_q[..., : facts.rank].transpose(0, 1))
        latent_q[..., facts.rank :] = q_rope
        latent_out = q.new_empty((*q.shape[:2], facts.rank))  # [S, H, R]
        child = self.children[0]
        child.needs_none(child.attend(latent_q, k, k[..., : facts.rank], layer, batch, plan, latent_out))
        torch.bmm(latent_out.transpose(0, 1), to_value.transpose(1, 2), out=out.transpose(0, 1))

    def _attend_ragged(self, q: Tensor, k: Tensor, layer: LayerSpec, part: RaggedPart, out: Tensor) -> None:
        """Piece by piece; the outputs of several are folded in float32."""
        if part.chunk_plan.key.batch != part.batch.identity:
            raise StalePlan(f"the pieces were planned for {part.chunk_plan.key}, and batch {part.batch.identity} is to run")
        attend = part.chunk_plan.attend
        if len(part.pieces) == 1:
            attend(q, *self._keys_values(k, layer, part.slots[0]), layer, part.pieces[0], out, None)
            return
        base = self.capabilities.lse_base
        assert base is not None
        whole, whole_lse = out, torch.empty(q.shape[:2], device=q.device)  # [S, H]
        for piece, slots in zip(part.pieces, part.slots, strict=True):
            lse = torch.empty_like(whole_lse)
            attend(q, *self._keys_values(k, layer, slots), layer, piece, out, lse)
            lse = to_natural_log(lse, base)
            if whole is out:  # the first piece
                whole, whole_lse = out.to(torch.float32, copy=True), lse
            else:
                whole_lse = fold(whole, whole_lse, out, lse)
        out.copy_(whole)

    def _keys_values(self, k: Tensor, layer: LayerSpec, slots: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys [L, H, N + P] and values [L, H, V] of a piece's tokens, made from latents: from `k`, or from those in `slots`."""
        latents = k[:, 0]  # [L, R + P]
        if slots is not None:
            pages = self.pool.layer(layer.local_id).k
            latents = pages.view(-1, pages.shape[-1]).index_select(0, slots)
        facts, kv_b = self.facts, _projection(layer)
        heads, length = len(kv_b), len(latents)
        keys = latents.new_empty((length, heads, facts.nope_dim + facts.rope_dim))
        values = latents.new_empty((length, heads, facts.value_dim))
        each = latents[:, : facts.rank].expand(heads, -1, -1)  # [H, L, R]
        from_key, from_value = torch.split(kv_b.transpose(1, 2), [facts.nope_dim, facts.value_dim], dim=2)  # [H, R, N], [H, R, V]
        torch.bmm(each, from_key, out=keys[..., : facts.nope_dim].transpose(0, 1))
        torch.bmm(each, from_value, out=values.transpose(0, 1))
        keys[..., facts.nope_dim :] = latents[:, None, facts.rank :]
        return keys, values


def to_natural_log(lse: Tensor, base: Literal["e", "2"]) -> Tensor:
    """[S, H] float32, converted in place where it is in base 2."""
    return lse.mul_(math.log(2.0)) if base == "2" else lse


def fold(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> Tensor:
    """Softmax attention over two disjoint sets of keys from that over each (the merge of split-KV kernels, arXiv:2311.01282).

    out: [S, H, V] float32, overwritten with that over both; more: [S, H, V], of any dtype; lse, more_lse: [S, H] float32, natural,
    -inf for rows that saw nothing, whose outputs must be 0. Returns the log-sum-exp over both sets, [S, H].
    """
    whole = torch.logaddexp(lse, more_lse)
    share = torch.where(more_lse == float("-inf"), 0.0, (more_lse - whole).exp())
    out.lerp_(more.to(out.dtype), share[..., None])
    return whole


def _projection(layer: LayerSpec) -> Tensor:
    """[H, N + V, R]."""
    assert layer.latent is not None, "a model with latents has MLA layers and recurrent ones, no others"
    return layer.latent.kv_b
