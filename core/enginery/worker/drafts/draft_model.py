"""Drafting with a model: it follows each step of the target, then takes one step after another, each with its own guess.

    target    step n     rows    t0 t1 t2 | d1 d2 d3 ...      T rows; some are sampled, of verified drafts the first ones count
    follow               the same rows: writes the model's own keys and values, in the pages of the target's
    guess 1, 2, ...      one row for each request that was sampled, behind the last token that is told

Its keys and values have a pool of their own with the target's page numbers, so that one page table serves both. What it wrote for
drafts that were wrong is written again. Guesses may lie behind the last page of their request; behind the target's pages the pool
has some for each seat, and what is written there is not needed after the step: `follow` writes the told ones again.

    [ the target's pages | scratch | seat 0 | seat 1 | ... ]

A decoding step after which nothing is guessed is not followed: guesses do not pay where many requests decode, and following costs
what a layer does. Where a prefix is shared, the last row of a page may stem from another continuation. Both cost acceptance, never
a token.

A draft model may be a chain of modules (MTP). Each runs over all rows and guesses one token further, by what the one before
returned; the last rows of a request are run over again in its next step, see `enginery.worker.drafts.tails`. One that reads the
target's keys and values has none, and follows nothing.

Runs where lengths are known to the host as soon as they are to the device, on a CPU.

T rows, S items that sample, R sampled rows, d guesses, F hidden states of C values from the target, C' values that are carried on.
"""

from __future__ import annotations

import numpy as np
import torch

from enginery.attention.axes import renewed
from enginery.attention.socket import LayerSocket
from enginery.contracts.batch import FULL, ForwardBatch, Phase, View
from enginery.contracts.drafting import CARRIED, FEATURES, Chained, MappedVocabulary
from enginery.contracts.model import Model
from enginery.contracts.parallel import StageTensors
from enginery.contracts.step import StepInput
from enginery.worker.drafts.draws import GuessDraws
from enginery.worker.drafts.tails import FollowedRows, Tails
from enginery.worker.layout import rows_of_items
from enginery.worker.page_tables import PageTables


def pages_behind(most: int, page_size: int) -> int:
    """Pages of a seat for guesses behind the last page of its request."""
    return -(-most // page_size)


class DraftModel:
    """most: guesses a step. takes_features: see `DrafterSpec`. max_positions: what lies behind is written to scratch memory.

    reads: it reads the target's keys and values, and `socket` is the target's.
    """

    def __init__(
        self, model: Model, socket: LayerSocket, *, most: int, takes_features: bool, max_positions: int, reads: bool = False
    ) -> None:
        self._modules = model.modules if isinstance(model, Chained) else (model,)
        self._tails = Tails(len(self._modules))
        self._socket = socket
        self._reads = reads
        self._most = most
        self._takes_features = takes_features
        self._max_positions = max_positions
        self._target_ids = model.target_ids if isinstance(model, MappedVocabulary) else None

    def drafts(
        self,
        step: StepInput,
        batch: ForwardBatch,
        features: torch.Tensor,
        *,
        tokens: torch.Tensor,
        accepted: torch.Tensor | None,
        draws: GuessDraws,
        tables: PageTables,
    ) -> torch.Tensor:
        """Guesses at what follows the last told token of each item that samples: [S, d] int64, device.

        batch: the step's, with all of its input tokens. features: [T, F * C], of the target. tokens: [R], what was sampled.
        accepted: [S], how many drafts of each item are among that; None: none. draws: how a guess is chosen.
        """
        items, counts = step.columns(), step.sampled_rows
        firsts = np.cumsum(rows_of_items(step))[step.sampling] - counts  # [S], the first of each item's rows that are sampled
        inside = np.arange(int(counts.sum())) - (np.cumsum(counts) - counts).repeat(counts)  # [R], each row's place in its item
        right = torch.zeros(len(counts), dtype=torch.int64) if accepted is None else accepted.cpu()
        told = tokens[torch.from_numpy(np.cumsum(counts) - counts) + right]  # [S], each item's last token
        at = (items.start + items.num_tokens - 1 - items.num_drafts)[step.sampling].astype(np.int64)
        positions = torch.from_numpy(at) + right + 1  # [S], of that token
        last = torch.from_numpy(firsts) + right  # [S], the row before it
        if self._reads:
            state = features[last]
            guesses = self._read(items.seat[step.sampling], told, positions, state, tables, most=step.draft_len, draws=draws)
        elif self._takes_features:
            rows = self._tails.before(step, batch, features, tables)
            self._tails.keep(step, rows, last)
            sampled, last = rows.place[torch.from_numpy(firsts.repeat(counts) + inside)], rows.place[last]
            state, guesses = self._follow(rows, sampled, tokens, last=last, first=positions + 1, most=step.draft_len, draws=draws)
        else:
            state, guesses = self._forward(renewed(batch, views={FULL: batch.views[FULL]}, logits_rows=None)), []
        seats, first, ids = items.seat[step.sampling], positions + 1, guesses[-1] if guesses else told
        while len(seats) and len(guesses) < step.draft_len and not self._reads:
            state = self._step(seats, ids, positions, state, tables)
            guesses.append(self._guess(self._modules[0], state, first + len(guesses), draws))
            ids, positions = guesses[-1], positions + 1
        return torch.stack(guesses, 1) if guesses else told.new_empty(len(seats), 0)

    def _follow(
        self,
        rows: FollowedRows,
        sampled: torch.Tensor,
        tokens: torch.Tensor,
        *,
        last: torch.Tensor,
        first: torch.Tensor,
        most: int,
        draws: GuessDraws,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run each module over all rows: what the last returned of the rows `last`, [S, C'], and a guess of each, up to `most`.

        sampled: [R], rows that are followed by `tokens`, [R]. first: [S], positions of the first guesses. One plan serves all.
        """
        ids, guesses = rows.batch.input_ids.roll(-1), list[torch.Tensor]()
        ids[sampled] = tokens
        there, arrived = self._planned(renewed(rows.batch, input_ids=ids)), {FEATURES: rows.features}
        for module in self._modules:
            if CARRIED in arrived:
                ids.copy_(ids.roll(-1))  # each module is given the token behind
                if guesses:
                    ids[last] = guesses[-1]
            state = _ran(module, there, arrived)
            arrived = {CARRIED: state}
            if len(last) and len(guesses) < most:
                guesses.append(self._guess(module, state[last], first + len(guesses), draws))
        return state[last], guesses

    def _read(
        self,
        seats: np.ndarray,
        ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        tables: PageTables,
        *,
        most: int,
        draws: GuessDraws,
    ) -> list[torch.Tensor]:
        """Guess by the target's keys and values before these positions, [S]. Nothing is written, and one plan serves all."""
        guesses, arrived = list[torch.Tensor](), {FEATURES: features}
        if not len(seats) or not most:
            return guesses
        table = torch.from_numpy(tables.full.of(seats, int((positions - 1).max()) // tables.page_size + 1))
        slots = torch.full_like(positions, tables.full.scratch_page * tables.page_size)
        view, lengths = View(slots=slots, page_table_cpu=table), positions.int()
        there = self._planned(_one_each(seats, ids.clone(), positions.clamp(max=self._max_positions - 1), lengths, view))
        while len(guesses) < most:
            state = _ran(self._modules[0], there, arrived)
            guesses.append(self._guess(self._modules[0], state, positions + 1 + len(guesses), draws))
            there.input_ids.copy_(guesses[-1])
            arrived = {CARRIED: state}
        return guesses

    def _step(
        self, seats: np.ndarray, ids: torch.Tensor, positions: torch.Tensor, state: torch.Tensor, tables: PageTables
    ) -> torch.Tensor:
        """One row for each request: [S, C']."""
        there = positions < self._max_positions
        positions = positions.clamp(max=self._max_positions - 1)
        columns, offsets = positions // tables.page_size, positions % tables.page_size
        table = self._table(seats, tables, int(columns.max()) + 1)
        pages = torch.where(there, table.gather(1, columns[:, None]).squeeze(1).long(), tables.full.scratch_page)
        view = View(slots=pages * tables.page_size + offsets, page_table_cpu=table)
        return self._forward(
            _one_each(seats, ids, positions, (positions + 1).int(), view), {CARRIED: state} if self._takes_features else None
        )

    def _table(self, seats: np.ndarray, tables: PageTables, num_columns: int) -> torch.Tensor:
        """The pages of each request, and behind its last one those of its seat: [S, num_columns] int32."""
        scratch, count = tables.full.scratch_page, pages_behind(self._most, tables.page_size)
        held = tables.full.of(seats, num_columns)
        behind = np.arange(num_columns) - (held != scratch).sum(1, keepdims=True)
        own = scratch + 1 + seats[:, None] * count + behind.clip(0, count - 1)
        return torch.from_numpy(np.where(behind < 0, held, own).astype(np.int32))

    def _forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor:
        return _ran(self._modules[0], self._planned(batch), arrived)

    def _planned(self, batch: ForwardBatch) -> ForwardBatch:
        assert self._socket.relay is not None, "a draft model has backends"
        return self._socket.relay.plan(batch)

    def _guess(self, module: Model, state: torch.Tensor, positions: torch.Tensor, draws: GuessDraws) -> torch.Tensor:
        """The target's tokens for these positions: [S]."""
        chosen = draws.choose(module.logits(state), positions)
        return chosen if self._target_ids is None else self._target_ids[chosen]


def _one_each(seats: np.ndarray, ids: torch.Tensor, positions: torch.Tensor, kv_lens: torch.Tensor, view: View) -> ForwardBatch:
    """A row of each request: [S] each."""
    ones = torch.ones(len(seats), dtype=torch.int32)
    return ForwardBatch(
        phase=Phase.DECODE,
        input_ids=ids,
        positions=positions,
        q_lens_cpu=ones,
        kv_lens_cpu=kv_lens,
        num_logits_cpu=ones,
        seats_cpu=torch.from_numpy(seats),
        views={FULL: view},
    )


def _ran(module: Model, batch: ForwardBatch, arrived: StageTensors | None) -> torch.Tensor:
    made = module.forward(batch, arrived)
    assert isinstance(made, torch.Tensor), "a draft model is in one stage"
    return made
