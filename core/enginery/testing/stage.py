"""Memory and requests of a stage of three layers: pools full of noise, requests all over them, batches, and what is to come out.

    layers    [ 0: of the other kind | 1, 2: the case's ]    global ids are not local ids, and no layer may be taken for another
    pages     [ noise | request 0, in a row | noise | request 1 | noise | request 1 | ... | scratch ]

T tokens, H query heads, K KV heads, HV value heads, V value dim, L tokens of a request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from enginery.contracts.attention import (
    AttnLayerFacts,
    GlobalLayerId,
    KVGeometry,
    LatentWeights,
    LayerSpec,
    LocalLayerId,
)
from enginery.contracts.batch import FULL, STATE, ForwardBatch, Phase, StateView, View
from enginery.contracts.memory import RecurrentFacts
from enginery.kv.pool import TORCH_DTYPES, PagedKVPool
from enginery.kv.states import RecurrentStatePool
from enginery.testing import reference
from enginery.testing.cases import AttnCase
from enginery.testing.recurrences import random_rows, random_weights

_LAYER: Final = LocalLayerId(1)
_SOFTMAX: Final = AttnLayerFacts(num_heads=1, num_kv_heads=1, head_dim=8)
_RULE: Final = RecurrentFacts(rule="linear", decay="head", key_heads=1, value_heads=1, key_dim=8, value_dim=8)
_RECURRENT: Final = AttnLayerFacts(num_heads=1, num_kv_heads=1, head_dim=8, recurrent=_RULE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """All of one request.

    rows: what the layer is given for each token, [L, ...]: q, k and v, or mixed and gates. slots: [L] int64, device. states: the
    pages that its state has been on, the last one now.
    """

    rows: tuple[torch.Tensor, ...]
    pages: list[int]
    slots: torch.Tensor
    states: list[int]
    seat: int


class Turn(NamedTuple):
    """What a request does in a batch: `new` tokens after `cached` ones."""

    tokens: Tokens
    cached: int
    new: int


class Stage:
    """num_tokens, num_requests: room for requests. The same requests are made in every stage of a case."""

    def __init__(self, case: AttnCase, device: torch.device, *, num_tokens: int, num_requests: int = 40) -> None:
        self.case, self.device, self.dtype = case, device, TORCH_DTYPES[case.dtype]
        num_pages, num_states = -(-num_tokens // case.page_size) + num_requests, num_requests + 8
        layers = (_RECURRENT if case.facts.recurrent is None else _SOFTMAX, case.facts, case.facts)
        self.geometry = KVGeometry(
            pages={FULL: num_pages, STATE: num_states},
            page_size=case.page_size,
            layers=layers,
            dtype=case.dtype,
            num_seats=num_states + 16,  # seats and pages of states are different numbers
        )
        self.pool, self.states = PagedKVPool(self.geometry, device), RecurrentStatePool(self.geometry, device)
        self._random, noise = (torch.Generator().manual_seed(seed) for seed in (20, 30))
        for stored in self._stored():  # a prime number of values, again and again: no two pages are alike, and it is quick
            some, size = torch.randn(16_381, generator=noise) * 4, stored.numel()
            stored.copy_(some.repeat(1 + size // len(some))[:size].view(stored.shape))
        half = num_pages // 2  # in order from the front, shuffled from the back
        self._pages = [*range(half), *(half + torch.randperm(num_pages - half, generator=noise)).tolist()]
        self._states = torch.randperm(num_states, generator=noise).tolist()
        self.forget()
        self.layer = self._layer()

    def _stored(self) -> Sequence[torch.Tensor]:
        return self.pool.layer(_LAYER) if self.case.facts.recurrent is None else tuple(self.states.layer(_LAYER).values())

    def forget(self) -> None:
        """Forget all requests, and free their pages and states."""
        self._free_pages, self._free_states = list(self._pages), list(self._states)

    def memory(self) -> list[torch.Tensor]:
        """A copy of all memory of the layer that is not for padding."""
        return [stored[: self.geometry.scratch_page(self.case.facts.kind)].clone() for stored in self._stored()]

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random).to(self.device)

    @property
    def dims(self) -> tuple[int, int]:
        """The dims of a head's query and of its result, as the layer's caller sees them."""
        facts, latent = self.case.facts, self.case.facts.latent
        if self.case.strategy is not None and latent is not None:
            return latent.nope_dim + latent.rope_dim, latent.value_dim
        return facts.head_dim, facts.value_dim

    def _layer(self) -> LayerSpec:
        facts, weights = self.case.facts, None
        if self.case.strategy is not None and facts.latent is not None:
            latent = facts.latent
            kv_b = self.randn(facts.num_heads, latent.nope_dim + latent.value_dim, latent.rank) * latent.rank**-0.5
            weights = LatentWeights(kv_b=kv_b.to(self.dtype))
        sinks = self.randn(facts.num_heads) if facts.sinks else None
        scale = 1.3 * self.dims[0] ** -0.5
        return LayerSpec(
            global_id=GlobalLayerId(7),
            local_id=_LAYER,
            facts=facts,
            scale=scale,
            sinks=sinks,
            latent=weights,
            recurrent=None if facts.recurrent is None else random_weights(facts.recurrent, self.randn, self.dtype),
        )

    def tokens(self, length: int) -> Tokens:
        """A new request of so many tokens; nothing of it is in memory yet."""
        facts = self.case.facts
        if facts.recurrent is not None:
            return self._placed(random_rows(facts.recurrent, length, self.randn, self.dtype), shared=[])
        q = self.randn(length, facts.num_heads, self.dims[0])
        k = self.randn(length, facts.num_kv_heads, facts.head_dim).to(self.dtype)
        v = self.randn(length, facts.num_kv_heads, facts.value_dim)
        v = v.to(self.dtype) if facts.latent is None else k[..., : facts.latent.rank]
        return self._placed((q.to(self.dtype), k, v), shared=[])

    def _placed(self, rows: tuple[torch.Tensor, ...], *, shared: list[int]) -> Tokens:
        """On `shared` pages, and on new ones, which for every other request follow each other."""
        page, length = self.case.page_size, len(rows[0])
        seat, state = len(self._free_states), self._free_states.pop()
        end = 0 if len(self._free_states) % 2 else -1
        pages = shared + [self._free_pages.pop(end) for _ in range(-(-length // page) - len(shared))]
        slots = torch.tensor([pages[place // page] * page + place % page for place in range(length)], dtype=torch.int64)
        return Tokens(rows=rows, pages=pages, slots=slots.to(self.device), states=[state], seat=seat)

    def twin(self, tokens: Tokens) -> Tokens:
        """The same tokens again, on pages of its own."""
        return self._placed(tokens.rows, shared=[])

    def sharing(self, tokens: Tokens, num_pages: int, length: int) -> Tokens:
        """Another request of `length` tokens that begins with the same ones, on the same pages, for so many pages."""
        other, shared = self.tokens(length), num_pages * self.case.page_size
        both = zip(tokens.rows, other.rows, strict=True)
        rows = tuple(torch.cat((mine[:shared], theirs[shared:])) for mine, theirs in both)
        return self._placed(rows, shared=tokens.pages[:num_pages])

    def turns(self, lengths: Sequence[tuple[int, int]]) -> list[Turn]:
        """New requests of these (cached, new) lengths, whose cached keys and values, or state, are in memory."""
        turns = [Turn(self.tokens(cached + new), cached, new) for cached, new in lengths]
        for tokens, cached, _ in turns:
            if self.case.facts.recurrent is None:
                _, k, v = (part[:cached] for part in tokens.rows)
                self.pool.write(_LAYER, k, v, tokens.slots[:cached])
            elif cached:
                for name, state in _recurrence(self.layer, tokens, cached)[1].items():
                    self.states.layer(_LAYER)[name][tokens.states[-1]] = state.to(self.device, torch.float32)
        return turns

    def batch(self, turns: Sequence[Turn], phase: Phase) -> ForwardBatch:
        """Unplanned and unpadded; the new tokens' keys and values are written to the pool, as a model does before it attends.

        Of requests that verify drafts all have as many tokens as the first.
        """
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        ranges = [(turn.cached, turn.cached + turn.new) for turn in turns]
        positions = torch.cat([nothing, *(torch.arange(*each, device=self.device) for each in ranges)])
        slots = torch.cat([nothing, *(turn.tokens.slots[slice(*each)] for turn, each in zip(turns, ranges, strict=True))])
        moves = _int32([_move_state(turn, place, self._free_states) for place, turn in enumerate(turns)]).view(-1, 2)
        batch = ForwardBatch(
            phase=phase,
            input_ids=torch.zeros_like(positions),
            positions=positions,
            q_lens_cpu=_int32([turn.new for turn in turns]),
            kv_lens_cpu=_int32([end for _, end in ranges]),
            num_logits_cpu=_int32([1] * len(turns)),
            seats_cpu=_int32([turn.tokens.seat for turn in turns]),
            views={
                FULL: View(slots=slots, page_table_cpu=_page_table(turns)),
                STATE: StateView(reads_cpu=moves[:, 0].contiguous(), writes_cpu=moves[:, 1].contiguous()),
            },
            decode_len=_decode_len(turns, phase),
        )
        if self.case.facts.recurrent is None:
            _, k, v = self.inputs(turns, batch.num_tokens)
            self.pool.write(_LAYER, k, v, slots)
        return batch

    def inputs(self, turns: Sequence[Turn], num_tokens: int) -> tuple[torch.Tensor, ...]:
        """q, k, v of a batch, parts of one projection but for MLA's, or mixed and gates; rows past the requests' hold ones."""
        facts, shapes = self.case.facts, _row_shapes(self.case.facts, self.dims[0])
        merged, sizes = facts.recurrent is None and facts.latent is None, [math.prod(shape) for shape in shapes]
        ones = torch.split(torch.ones(num_tokens, sum(sizes), dtype=self.dtype, device=self.device), sizes, 1)
        parts = ones if merged else [part.contiguous() for part in ones]
        wholes = tuple(part.view(num_tokens, *shape) for part, shape in zip(parts, shapes, strict=True))
        row = 0
        for tokens, cached, new in turns:
            for whole, part in zip(wholes, tokens.rows, strict=True):
                whole[row : row + new] = part[cached : cached + new]
            row += new
        return wholes

    def expected(self, turn: Turn) -> torch.Tensor:
        """What the formula gives for it: [new, H, V] float64, host."""
        facts, layer, end = self.case.facts, self.layer, turn.cached + turn.new
        if facts.recurrent is not None:
            return _recurrence(layer, turn.tokens, end)[0][turn.cached :]
        q, k, v = (part[:end] for part in turn.tokens.rows)
        if layer.latent is not None and facts.latent is not None:
            k, v = reference.expand_latents(k, layer.latent.kv_b, facts.latent)
        return reference.attention(q[turn.cached :], k, v, facts=facts, scale=layer.scale, sinks=layer.sinks)[0]


def pointing(tokens: Tokens, product: float) -> Tokens:
    """The same, but each query times its own token's key is `product`; times others' keys it is far from that."""
    q, k, v = tokens.rows
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # [L, H, D]
    return replace(tokens, rows=((keys * (product / keys.square().sum(-1, keepdim=True))).to(q.dtype), k, v))


def num_out_heads(facts: AttnLayerFacts) -> int:
    """Heads of a layer's result."""
    return facts.num_heads if facts.recurrent is None else facts.recurrent.value_heads


def _row_shapes(facts: AttnLayerFacts, query_dim: int) -> list[tuple[int, ...]]:
    """What a layer is given for each token."""
    rule, kv_heads = facts.recurrent, facts.num_kv_heads
    if rule is not None:
        return [(rule.mixed_width,), (rule.gates_width,)]
    return [(facts.num_heads, query_dim), (kv_heads, facts.head_dim), (kv_heads, facts.value_dim)]


def _decode_len(turns: Sequence[Turn], phase: Phase) -> int:
    return turns[0].new if turns and phase is Phase.VERIFY else 1


def _page_table(turns: Sequence[Turn]) -> torch.Tensor:
    """[B, P] int32, 0 past a request's last page."""
    columns = max([1, *(len(turn.tokens.pages) for turn in turns)])
    return _int32([turn.tokens.pages + [0] * (columns - len(turn.tokens.pages)) for turn in turns]).view(len(turns), columns)


def _move_state(turn: Turn, place: int, free: list[int]) -> tuple[int, int]:
    """The pages that a request's state is read from and written to; for every other request it is a new one."""
    states = turn.tokens.states
    read = states[-1]
    if place % 2 and turn.cached and free:
        states.append(free.pop())
    return read, states[-1]


def _recurrence(layer: LayerSpec, tokens: Tokens, length: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What the formula gives for the first `length` tokens of a request, and the states after them."""
    facts, weights = layer.facts.recurrent, layer.recurrent
    assert facts is not None, "the layer is recurrent"
    assert weights is not None, "the layer is recurrent"
    mixed, gates = (part[:length] for part in tokens.rows)
    return reference.recurrence(mixed, gates, facts=facts, weights=weights, scale=layer.scale)


def _int32(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
