"""A step in the making: the items, tokens and pages that the planner decides on, packed as they come."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain
from typing import Final, TypeAlias

from enginery.contracts.batch import DECODING, FULL, WINDOW, Phase
from enginery.contracts.drafting import ON_DEVICE, DraftTree
from enginery.contracts.step import Item, NewPages, Run, RunSizes, StepInput, Way, phase_of
from enginery.kv.kinds import NO_STATE, StatePages
from enginery.kv.manager import SequenceKV
from enginery.schedule.request import Request

_pack_item: Final = struct.Struct(f"<{len(Item._fields)}i").pack
_pack_state: Final = struct.Struct("<4i").pack
_NO_DRAFTS: Final = 0
_NO_ADAPTER: Final = -1
Agreed: TypeAlias = tuple[Run, tuple[int, int]]  # of all lanes: the way of a step, and what each is padded to


class _PageNews:
    """What is new in the page tables of one kind."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int]] = []
        self.pages = array("i")

    def packed(self) -> NewPages:
        return NewPages(array("i", chain.from_iterable(self.rows)).tobytes(), self.pages.tobytes())


class StepBuilder:
    """Collects one step, of one lane. requests: those of its items, in order. embedding: items whose hidden state is asked for.

    num_rows: with those of padding, so `decode_len` is set before anything is added. greedy: each token that is sampled is that of
    the largest logit. branches: whether drafts do. behind: see `StepInput`.
    """

    def __init__(self, *, has_states: bool = False) -> None:
        self.requests: list[Request] = []
        self.num_decode = 0
        self.num_rows = 0
        self.decode_len = 1
        self.draft_len = self.behind = 0
        self.greedy = True
        self._items: list[bytes] = []
        self._ids = array("i")
        self._pages = _PageNews()
        self._window = _PageNews()
        self._has_states = has_states
        self._states: list[bytes] = []
        self.embedding: list[int] = []
        self._drafts: list[Sequence[int]] = []
        self.branches = False

    def add_drafts(self, request: Request, drafts: Sequence[int]) -> None:
        """Schedule its last token and guesses at the next ones. It has the pages.

        In a step in flight, its last token is on the device too, see `ahead`.
        """
        start, count, kv = request.num_computed, 1 + len(drafts), request.kv
        self.greedy &= start + 1 >= request.greedy_from
        if start + 1 == request.num_prompt_tokens and request.asked.embed:
            self.embedding.append(len(self.requests))
        pending = len(drafts) if ON_DEVICE in drafts else 0
        if start < len(request.token_ids):
            self._ids.append(request.token_ids[start])
        else:
            pending = count
        if not pending:
            self._ids.extend(drafts)
        self._drafts.append(drafts)
        self.branches = self.branches or (isinstance(drafts, DraftTree) and not drafts.is_chain)
        self._items.append(_pack_item(kv.seat, start, count, start, count, True, len(drafts), pending, _NO_ADAPTER))
        if self._has_states:
            self._add_state(kv.states)
        request.num_computed, request.num_expected = start + count, start + count + 1
        request.in_flight += 1
        self.num_rows += self.decode_len
        self.requests.append(request)

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedule its next tokens, and move it on. It has the pages."""
        start, tokens = request.num_computed, request.token_ids
        request.num_computed = end = start + num_tokens
        kv = request.kv
        first_write = min(max(start, kv.num_shared), end)
        pending = start >= len(tokens)  # its one token is what its previous item samples, in a step that is still in flight
        if samples := end == request.num_expected:
            request.num_expected = end + 1
            self.greedy &= end >= request.greedy_from
            if end == request.num_prompt_tokens and request.asked.embed:
                self.embedding.append(len(self.requests))
        if num_tokens > 1:
            self._ids.extend(tokens[start:end])
        elif not pending:
            self._ids.append(tokens[start])
        num_logits = num_tokens if (num_tokens > 1 or not samples) and request.wants_prompt_logits else int(samples)
        self._items.append(
            _pack_item(kv.seat, start, num_tokens, first_write, num_logits, samples, _NO_DRAFTS, pending, _NO_ADAPTER)
        )
        if self._has_states:
            self._add_state(kv.states)
        request.in_flight += 1
        self.num_rows += num_tokens
        self.requests.append(request)

    def _add_state(self, states: StatePages) -> None:
        self._states.append(_pack_state(states.read, states.current, states.checkpoint, states.checkpoint_rows))
        states.read, states.checkpoint, states.checkpoint_rows = states.current, NO_STATE, 0

    def tell_pages(self, kv: SequenceKV) -> None:
        """Note the pages of it that the workers do not know yet."""
        first, count = kv.num_told, len(kv.pages)
        if count > first:
            self._pages.rows.append((kv.seat, first, 0, count - first))
            self._pages.pages.extend(kv.pages[first:])
            kv.num_told = count
        window = kv.window
        if window.stop > window.num_told or window.first > window.first_told:
            first = max(window.num_told, window.first)
            self._window.rows.append((kv.seat, first, window.first, window.stop - first))
            self._window.pages.extend(window.pages[first - window.first :])
            window.num_told, window.first_told = window.stop, window.first

    def build(self, number: int, way: Agreed, released: Sequence[int]) -> StepInput:
        news, parents = {FULL: self._pages, WINDOW: self._window}, array("i")
        if self.branches:  # of each draft the row that it follows
            each = (one.parents if isinstance(one, DraftTree) else range(-1, len(one) - 1) for one in self._drafts)
            parents.extend(parent + 1 for found in each for parent in found)
        return StepInput(
            number=number,
            phase=self.phase,
            run=way[0],
            padded=way[1],
            num_decode=self.num_decode,
            items=b"".join(self._items),
            input_ids=self._ids.tobytes(),
            pages={kind: new.packed() for kind, new in news.items() if new.rows},
            states=b"".join(self._states),
            released=array("i", released).tobytes(),
            embedding=array("i", self.embedding).tobytes(),
            parents=parents.tobytes(),
            decode_len=self.decode_len,
            draft_len=self.draft_len,
            behind=self.behind,
        )

    @property
    def phase(self) -> Phase:
        if self.num_decode == len(self.requests):
            return (Phase.DECODE if self.decode_len == 1 else Phase.VERIFY) if self.requests else Phase.IDLE
        return Phase.MIXED if self.num_decode else Phase.PREFILL


def agreed(lanes: Sequence[StepBuilder], sizes: RunSizes) -> Agreed:
    """How a step of these lanes runs, those without work too, and what each is padded to: requests and tokens of the largest."""
    length = max([built.decode_len for built in lanes])
    if length > 1 or not sizes.followed:
        sizes = _with_drafts(lanes, length, sizes)
    num_requests, num_rows = max([len(built.requests) for built in lanes]), max([built.num_rows for built in lanes])
    run = _run(lanes, num_requests, num_rows, sizes=sizes)
    if run.way is Way.GRAPH:
        return run, (run.size, run.size * length)
    return run, (num_requests, run.size if run.way is Way.PIECES else num_rows)


def _with_drafts(lanes: Sequence[StepBuilder], length: int, sizes: RunSizes) -> RunSizes:
    """Of a step that verifies drafts, `length` rows of a request, or that may be followed by a draft model."""
    if length == 1:
        return RunSizes(pieces=sizes.pieces) if any(built.draft_len for built in lanes) else sizes
    most = 0 if any(built.branches for built in lanes) and not sizes.combs else sizes.verified_rows
    return RunSizes(tuple(size for size in sizes.graphs if size * length <= most), sizes.pieces)


def _run(lanes: Sequence[StepBuilder], num_requests: int, num_rows: int, *, sizes: RunSizes) -> Run:
    """Lists, not generators: this takes microseconds of every step."""
    phase = lanes[0].phase if len(lanes) == 1 else phase_of([built.phase for built in lanes])
    greedy = False not in [built.greedy for built in lanes]
    tokens_only = greedy and True not in [request.reports_logprobs for built in lanes for request in built.requests]
    embeds = True in [bool(built.embedding) for built in lanes]
    way, size = choose_way(phase, num_requests, num_rows, sizes=sizes, embeds=embeds)
    return Run(way, size, greedy, tokens_only)


def choose_way(phase: Phase, num_requests: int, num_tokens: int, *, sizes: RunSizes, embeds: bool) -> tuple[Way, int]:
    """The fastest way to run such a step, and its size. A decoding graph gives no hidden states, so `embeds` rules it out."""
    if phase in DECODING:
        way, size = Way.GRAPH, 0 if embeds else _fitting(sizes.graphs, num_requests)
    else:
        way, size = Way.PIECES, _fitting(sizes.pieces, num_tokens)
    return (way, size) if size else (Way.EAGER, 0)


def _fitting(sizes: Sequence[int], count: int) -> int:
    """The smallest of the sizes that is enough; 0 if none is. sizes: the smallest first."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else 0
