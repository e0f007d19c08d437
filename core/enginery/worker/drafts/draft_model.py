"""Drafting with a model: it follows each step of the target, then takes one step after another, each with its own guess.

    target    step n     rows    t0 t1 t2 | d1 d2 d3 ...      T rows; some are sampled, of verified drafts the first ones count
    follow               the same rows: writes the model's own keys and values, in the pages of the target's
    guess 1, 2, ...      one row for each request that was sampled, behind the last token that is told

Its keys and values have a pool of their own with the target's page numbers, so that one page table serves both. What it wrote for
drafts that were wrong is written again. Guesses may lie behind the last page of their request; behind the target's pages the pool
has some for each seat, and what is written there is not needed after the step: `follow` writes the told ones again.

    [ the target's pages | scratch | seat 0 | seat 1 | ... ]

A decoding step after which nothing is guessed is not followed: guesses do not pay where many requests decode, and following costs
what a layer does. Where a prefix is shared, the last row of a page may stem from another continuation, and of a prompt in several
chunks the last row of a chunk is given another token. All that costs acceptance, never a token.

Runs where lengths are known to the host as soon as they are to the device, on a CPU.

T rows, S items that sample, R sampled rows, d guesses, F hidden states of C values from the target, C' values that are carried on.
"""

from __future__ import annotations

import numpy as np
import torch

from enginery.attention.axes import renewed
from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import FULL, ForwardBatch, Phase, View
from enginery.contracts.drafting import CARRIED, FEATURES, MappedVocabulary
from enginery.contracts.model import Model
from enginery.contracts.parallel import StageTensors
from enginery.contracts.step import StepInput
from enginery.worker.drafts.draws import GuessDraws
from enginery.worker.layout import rows_of_items
from enginery.worker.page_tables import PageTables


def pages_behind(most: int, page_size: int) -> int:
    """Pages of a seat for guesses behind the last page of its request."""
    return -(-most // page_size)


class DraftModel:
    """most: guesses a step. takes_features: see `DrafterSpec`. max_positions: what lies behind is written to scratch memory."""

    def __init__(self, model: Model, relay: BackendRelay, *, most: int, takes_features: bool, max_positions: int) -> None:
        self._model = model
        self._relay = relay
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
        ends = np.cumsum(rows_of_items(step))[step.sampling]  # [S], behind the last row of each item
        firsts = torch.from_numpy(ends - counts)  # the first of its rows that are sampled
        inside = np.arange(int(counts.sum())) - (np.cumsum(counts) - counts).repeat(counts)  # [R], each row's place in its item
        sampled_rows = torch.from_numpy((ends - counts).repeat(counts) + inside)
        right = torch.zeros_like(firsts) if accepted is None else accepted.cpu()
        told = tokens[torch.from_numpy(np.cumsum(counts) - counts) + right]  # [S], each item's last token
        at = (items.start + items.num_tokens - 1 - items.num_drafts)[step.sampling].astype(np.int64)
        positions = torch.from_numpy(at) + right + 1  # [S], of that token
        state = self._follow(batch, features, sampled_rows, tokens)
        seats, first = items.seat[step.sampling], positions + 1
        guesses: list[torch.Tensor] = []
        ids = told
        if self._takes_features and step.draft_len:
            state = state[firsts + right]
            ids = self._guess(state, first, draws)
            guesses.append(ids)
        while len(seats) and len(guesses) < step.draft_len:
            state = self._step(seats, ids, positions, state, tables)
            ids = self._guess(state, first + len(guesses), draws)
            guesses.append(ids)
            positions = positions + 1
        return torch.stack(guesses, 1) if guesses else told.new_empty(len(seats), 0)

    def _follow(
        self, batch: ForwardBatch, features: torch.Tensor, sampled_rows: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Run over the step's rows: [T, C']."""
        own = renewed(batch, views={FULL: batch.views[FULL]}, logits_rows=None)
        if not self._takes_features:
            return self._forward(own)
        ids = batch.input_ids.roll(-1)
        ids[sampled_rows] = tokens
        return self._forward(renewed(own, input_ids=ids), {FEATURES: features})

    def _step(
        self, seats: np.ndarray, ids: torch.Tensor, positions: torch.Tensor, state: torch.Tensor, tables: PageTables
    ) -> torch.Tensor:
        """One row for each request: [S, C']."""
        there = positions < self._max_positions
        positions = positions.clamp(max=self._max_positions - 1)
        columns, offsets = positions // tables.page_size, positions % tables.page_size
        table = self._table(seats, tables, int(columns.max()) + 1)
        pages = torch.where(there, table.gather(1, columns[:, None]).squeeze(1).long(), tables.full.scratch_page)
        ones = torch.ones(len(seats), dtype=torch.int32)
        batch = ForwardBatch(
            phase=Phase.DECODE,
            input_ids=ids,
            positions=positions,
            q_lens_cpu=ones,
            kv_lens_cpu=(positions + 1).int(),
            num_logits_cpu=ones,
            seats_cpu=torch.from_numpy(seats),
            views={FULL: View(slots=pages * tables.page_size + offsets, page_table_cpu=table)},
        )
        return self._forward(batch, {CARRIED: state} if self._takes_features else None)

    def _table(self, seats: np.ndarray, tables: PageTables, num_columns: int) -> torch.Tensor:
        """The pages of each request, and behind its last one those of its seat: [S, num_columns] int32."""
        scratch, count = tables.full.scratch_page, pages_behind(self._most, tables.page_size)
        held = tables.full.of(seats, num_columns)
        behind = np.arange(num_columns) - (held != scratch).sum(1, keepdims=True)
        own = scratch + 1 + seats[:, None] * count + behind.clip(0, count - 1)
        return torch.from_numpy(np.where(behind < 0, held, own).astype(np.int32))

    def _forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor:
        made = self._model.forward(self._relay.plan(batch), arrived)
        assert isinstance(made, torch.Tensor), "a draft model is in one stage"
        return made

    def _guess(self, state: torch.Tensor, positions: torch.Tensor, draws: GuessDraws) -> torch.Tensor:
        """The target's tokens for these positions: [S]."""
        chosen = draws.choose(self._model.logits(state), positions)
        return chosen if self._target_ids is None else self._target_ids[chosen]
