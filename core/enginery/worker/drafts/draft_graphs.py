"""A draft model as CUDA graphs, behind the target's graph of a decoding step: one that follows it, one that guesses on.

    target    [ .. model | logits | best, hidden states ]   accept, the early copy   size, rows of a request
    follow    [ model over the same rows | state of the last told row | a guess ]    size, rows of a request
    steps     [ positions, slots, lengths | model | a guess | model | a guess .. ]   size, steps, how guesses are chosen

The first reads the token fields of the target's graph where they are; its backend's plan is refreshed from the host's lengths.
Those of the second are true on the device alone. The guess of the first is the best token; where one is drawn, the second begins
with it. Several ranks guess together within their graphs. What guesses are drawn by the first one alone knows, and so which graph
it needs: all have those of every kind of draws, captured at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from enginery.attention.axes import renewed
from enginery.contracts.batch import FULL, ForwardBatch, View
from enginery.contracts.drafting import FEATURES
from enginery.contracts.step import StepInput
from enginery.kv.upload import pinned
from enginery.speculate.combs import num_verified
from enginery.worker.drafts.draft_model import DraftModel, Followed, GuessWindow, OneStep, one_each
from enginery.worker.drafts.draws import DRAW_KINDS, CapturedDraws, DrawKind, GuessDraws, beside, verified_order
from enginery.worker.drafts.trees import Chain, as_chain, chain_batch, chain_told, deepest, standing_chain
from enginery.worker.layout import grown
from enginery.worker.page_tables import PageTables
from enginery.worker.paths.captured_step import Capture, CapturedStep, NumGuesses, Replayable
from enginery.worker.paths.decode_graphs import graph_sizes
from enginery.worker.paths.path import Forwarded, first_rows
from enginery.worker.paths.results import StepParts
from enginery.worker.ranks.collectives import Agreement


class _Follow(NamedTuple):
    """batch: its token fields are those of the target's graph, or made of them."""

    batch: ForwardBatch
    graph: Replayable


@dataclass(frozen=True, kw_only=True, eq=False)
class _Steps:
    """packed: [1 + W, size] int64, device: the first position that may be told, and a window of slots.

    guesses: [size, d * (1 + n)] int64. draws: what guesses are drawn by; None: all are best tokens.
    """

    draws: CapturedDraws | None
    packed: torch.Tensor
    batches: Sequence[ForwardBatch]
    graph: Replayable
    guesses: torch.Tensor


class DraftGraphs:
    """Captured when first needed, or in idle moments. What was sampled and accepted is read where the target's graph leaves it.
    What is left for the steps is the same for all sizes.

    behind: [most rows] int64, how far the last told token is behind the first that may be told; state: [most rows, C'], ids: [most
    rows, 1 + n] int64, what follows it stands on, and a guess at it with n others, or that token alone where the model takes no
    features.
    """

    def __init__(self, model: DraftModel, target: StepParts, *, capture: Capture, state: torch.Tensor, siblings: int) -> None:
        """model: of a backend that can be captured. state: [most rows, C'], zeros. siblings: n."""
        self._model, self._relay, self._ops, self._geometry = model, model.relay, target.ops, target.pool.geometry
        self._capture, self.state, self._siblings, self._kept = capture, state, siblings, target.feed.named.buffers
        self._agreed = None if target.joined is None else Agreement.of(target.joined, model)
        self.behind = torch.zeros(len(state), dtype=torch.int64, device=state.device)
        self.ids = torch.zeros(len(state), 1 + siblings * model.takes_features, dtype=torch.int64, device=state.device)
        self._follows = weakref.WeakKeyDictionary[CapturedStep, _Follow]()  # by the target's
        self._steps: dict[tuple[int, int, DrawKind | None], _Steps] = {}

    def drafts(
        self, step: StepInput, forwarded: Forwarded, *, tokens: torch.Tensor, draws: GuessDraws, tables: PageTables
    ) -> torch.Tensor:
        """As `DraftModel.drafts`, of a step that the target ran as a graph, which has how many of its drafts are right."""
        count, model, captured, best = len(step.sampling), self._model, forwarded.captured, forwarded.greedy
        assert captured is not None, "the target ran a graph"
        assert best is not None, "with a head"
        assert forwarded.padded is not None, "and tells for what"
        if tokens.data_ptr() != best.data_ptr():  # not chosen within its graph
            best[: len(tokens)].copy_(tokens)
        self._follow(captured, forwarded.padded)
        step = as_chain(step, deepest(step)) if step.parents else step
        num_steps = step.draft_len - model.takes_features
        if not num_steps and draws.kind is None:
            return self.ids[:count]
        found = self._steps_of(captured.batch.num_requests, num_steps, draws.kind)
        return first_rows(self._guess(found, model.ahead(step, tables), draws), count)

    def go_on(self, behind: Followed, num_steps: int, draws: GuessDraws) -> torch.Tensor:
        """As `GoOn`, where no graph follows: behind steps of prompts. Eagerly for more requests than there is room for."""
        if (count := len(behind.right)) > len(self.state):
            return self._model.go_on(behind, num_steps, draws)
        self.behind[:count].copy_(behind.right)
        self.ids[:count].copy_(behind.made[-1])
        if behind.state is not None:
            self.state[:count].copy_(behind.state)
        size = next(size for size in graph_sizes(len(self.state)) if size >= count)
        return first_rows(self._guess(self._steps_of(size, num_steps, draws.kind), behind.ahead, draws), count)

    @torch.inference_mode()
    def prepare(self, captured: Iterable[CapturedStep], num_guesses: NumGuesses) -> bool:
        """Capture one more of what comes behind graphs of the target, drawn as guesses were before; False: it is all there."""
        kinds = list(dict.fromkeys([None, *(kind for _, _, kind in self._steps)]))
        for of in captured:
            size, scratch = of.batch.num_requests, self._geometry.scratch_page(FULL) * self._geometry.page_size
            if not of.followed or not (count := num_guesses(size)):
                continue
            if of not in self._follows:
                renewed(of.batch, views={FULL: of.batch.views[FULL]}).pages.slots.fill_(scratch)  # it ran where prefixes are
                self._follows[of] = self._capture_follow(of)
                return True
            num_steps = count - self._model.takes_features
            for kind in kinds if num_steps else kinds[1:]:
                if (size, num_steps, kind) not in self._steps:
                    self._steps_of(size, num_steps, kind)
                    return True
        return False

    def _choose(self, draws: CapturedDraws | None, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        def choose(whole: torch.Tensor) -> torch.Tensor:
            return beside(whole, self._ops.greedy(whole), self._siblings) if draws is None else draws.choose(whole, positions)

        if self._agreed is None:
            return choose(logits)
        return self._agreed.guess(logits, lambda whole: choose(whole)[:, 0], greedy=draws is None)[:, None]

    def _follow(self, of: CapturedStep, padded: ForwardBatch) -> None:
        if of not in self._follows:
            self._follows[of] = self._capture_follow(of)
        found = self._follows[of]
        assert found.batch.plan is not None, "what is captured is planned"
        if of.standing is None:
            padded = renewed(padded, views={FULL: padded.views[FULL]})
        else:
            padded = chain_batch(padded, _chain_of(found.batch), padded.num_requests, of.standing.depth)
        self._relay.refresh(found.batch.plan, padded)
        found.graph.replay()

    def _capture_follow(self, of: CapturedStep) -> _Follow:
        batch, model, standing = of.batch, self._model, of.standing
        best, features = of.made.marked, self._kept.get(FEATURES, of.made.hidden)
        assert best is not None, "a graph that a draft model follows has tokens"
        assert features is not None, "and keeps what it takes"
        size, num_rows, length = batch.num_requests, batch.num_tokens, batch.decode_len
        if standing is None:
            ids = torch.zeros_like(batch.input_ids) if model.takes_features else batch.input_ids
            there = renewed(batch, views={FULL: batch.views[FULL]}, input_ids=ids)
        else:
            there = chain_batch(batch, standing_chain(batch, standing.path, standing.depth), size, standing.depth)
        there = self._relay.plan(there, capture=True)

        def run() -> None:
            self._relay.ask("device_prologue", plan=there.plan)
            tokens, rows = best.clamp(min=0), features[:num_rows]
            if standing is not None:
                chain = standing_chain(batch, standing.path, standing.depth)
                for place, value in zip(_chain_of(there)[1:], chain[1:], strict=True):
                    place.copy_(value)
                tokens, rows = chain_told(tokens, size, length, standing.depth), rows.index_select(0, chain.rows)
            right = torch.zeros_like(of.seats) if of.accepted is None else of.accepted
            last = right + torch.arange(0, there.num_tokens, there.decode_len, device=tokens.device)  # a graph keeps nothing alive
            self.behind[:size].copy_(right if of.moved is None else right + of.moved)
            if model.takes_features:
                there.input_ids.copy_(tokens)
                hidden = model.follow(there, {FEATURES: rows})
                state = self.state[:size].copy_(hidden.index_select(0, last))
                self.ids[:size].copy_(model.guess(state, last, functools.partial(self._choose, None)))
            else:
                model.follow(there, None)
                self.ids[:size, 0].copy_(tokens.index_select(0, last))

        return _Follow(there, self._capture(run))

    def _steps_of(self, size: int, num_steps: int, kind: DrawKind | None) -> _Steps:
        if (size, num_steps, kind) not in self._steps:
            for each in (kind,) if kind is None or self._agreed is None else DRAW_KINDS:
                self._steps[size, num_steps, each] = self._capture_steps(size, num_steps, each)
        return self._steps[size, num_steps, kind]

    def _guess(self, found: _Steps, ahead: GuessWindow, draws: GuessDraws) -> torch.Tensor:
        padded = self._padded(ahead, found.packed.shape[1], width=len(found.packed) - 1)
        numbers = torch.from_numpy(np.concatenate((padded.at[None], padded.window)))
        found.packed.copy_(pinned(numbers, found.packed.device), non_blocking=True)
        if found.draws is not None:
            found.draws.fill(draws)
        if found.batches:
            last = found.batches[-1]
            assert last.plan is not None, "what is captured is planned"
            longest, table, seats = map(torch.from_numpy, (padded.longest, padded.table, padded.seats))
            view = View(slots=last.pages.slots, page_table_cpu=table)
            self._relay.refresh(last.plan, renewed(last, kv_lens_cpu=longest, seats_cpu=seats, views={FULL: view}))
        found.graph.replay()
        return found.guesses

    def _capture_steps(self, size: int, num_steps: int, kind: DrawKind | None) -> _Steps:
        model, device = self._model, self.state.device
        width = 1 + 2 * model.most + num_steps + model.takes_features  # as long as `DraftModel.ahead` gives it
        none, table = np.empty(0, np.int64), np.empty((0, 1), np.int32)
        nobody = GuessWindow(table[:, 0], none, none.reshape(0, 0), table, table[:, 0])
        ahead = self._padded(nobody, size, width=width)
        packed = torch.from_numpy(np.concatenate((ahead.at[None], ahead.window))).to(device)
        count = num_verified(num_steps + model.takes_features, self._siblings)
        guesses = torch.zeros(size, count, dtype=torch.int64, device=device)
        steps = OneStep.of(num_steps, size, device)
        unplanned = [one_each(ahead, one, knows_lengths=False) for one in map(OneStep, *steps)]
        batches = self._relay.plan_steps(unplanned, capture=True) if unplanned else []
        assert len(batches) == num_steps, "a backend that knows lengths of the device plans all steps"
        draws = None if kind is None else CapturedDraws(kind, size, ops=self._ops, device=device, siblings=self._siblings)

        def run() -> None:
            for there in batches:
                self._relay.ask("device_prologue", plan=there.plan)
            at, window, right = packed[0], packed[1:], self.behind[:size]
            model.place(steps, at, window, right)
            first, state, choose = self.ids[:size], None, functools.partial(self._choose, draws)
            behind = at + right + 1
            if model.takes_features:
                state = self.state[:size]
                if draws is not None:  # what follows is on the best one
                    first = model.guess(state, behind, choose)
            made = model.steps(batches, first[:, 0], state, first=behind + model.takes_features, choose=choose)
            guesses.copy_(verified_order((first, *made) if model.takes_features else made))

        return _Steps(draws=draws, packed=packed, batches=batches, graph=self._capture(run), guesses=guesses)

    def _padded(self, ahead: GuessWindow, size: int, *, width: int) -> GuessWindow:
        """Of `size` requests, with a window of `width`; what is added is scratch."""
        scratch = self._geometry.scratch_page(FULL)
        return GuessWindow(
            grown(ahead.seats, size, fill=self._geometry.num_seats),
            grown(ahead.at, size, fill=0),
            grown(ahead.window, width, size, fill=scratch * self._geometry.page_size),
            grown(ahead.table, size, ahead.table.shape[1], fill=scratch),
            grown(ahead.longest, size, fill=1),
        )


def _chain_of(batch: ForwardBatch) -> Chain:
    """Where the batch of what stands has it; which rows that is, is not there."""
    return Chain(batch.input_ids, batch.input_ids, batch.positions, batch.pages.slots)
