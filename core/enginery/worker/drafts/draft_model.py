"""Drafting with a model: it follows each step of the target, then takes one step after another, each with its own guess.

    target    step n     rows    t0 t1 t2 | d1 d2 d3 ...      T rows; some are sampled, of verified drafts the first ones count
    follow               the same rows: writes the model's own keys and values, in the pages of the target's
    guess 1, 2, ...      one row for each request that was sampled, behind the last token that is told

Its keys and values have a pool of their own with the target's page numbers, so that one page table serves both. What it wrote for
drafts that were wrong is written again. Guesses may lie behind the last page of their request; behind the target's pages the pool
has some for each seat, and what is written there is not needed after the step: `follow` writes the told ones again.

    [ the target's pages | scratch | seat 0 | seat 1 | ... ]

A step after which nothing is guessed is not followed: guesses do not pay where many requests decode, and following costs what a
layer does. So what is cached of a prefix may never have been followed; where one is shared, the last row of a page may stem from
another continuation. Both cost acceptance, never a token.

A draft model may be a chain of modules (MTP). Each runs over all rows and guesses one token further, by what the one before
returned; the last rows of a request are run over again in its next step, see `enginery.worker.drafts.tails`. One that reads the
target's keys and values has none, and follows nothing.

Where the device alone knows how many drafts were right, lengths, positions and slots of the steps are computed there: out of a
window of slots that the host uploads, with plans for the largest lengths that there may be (`kv_lens`). Nothing waits for the
device. Chains of several modules, and models that read the target's keys and values, are not captured: they run eagerly behind the
target's graphs.

T rows, S items that sample, R sampled rows, d guesses, F hidden states of C values from the target, C' values that are carried on,
W places of a window, 1 + n tokens of a guess and beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from enginery.attention.axes import renewed
from enginery.attention.relay import BackendRelay
from enginery.attention.socket import LayerSocket
from enginery.contracts.batch import FULL, ForwardBatch, Phase, View
from enginery.contracts.drafting import CARRIED, FEATURES, Chained, MappedVocabulary
from enginery.contracts.model import Model
from enginery.contracts.parallel import StageTensors
from enginery.contracts.step import StepInput
from enginery.errors import PluginError
from enginery.kv.upload import to_device
from enginery.worker.drafts.draws import Choose, GuessDraws, verified_order
from enginery.worker.drafts.tails import FollowedRows, Tails
from enginery.worker.layout import begins_of, places_within
from enginery.worker.page_tables import PageTables


def pages_behind(most: int, page_size: int) -> int:
    """Pages of a seat for guesses behind the last page of its request."""
    return -(-most // page_size)


class GuessWindow(NamedTuple):
    """Where the guesses of a step may lie, on the host. S items, W places.

    at: [S] int64, the first position that the step may tell a token of. window: [W, S] int64, slots of the positions from there on.
    table: [S, P] int32. longest: [S] int32, of keys behind the last step, at the most.
    """

    seats: np.ndarray
    at: np.ndarray
    window: np.ndarray
    table: np.ndarray
    longest: np.ndarray


class Followed(NamedTuple):
    """What to guess on from. right: [S], drafts that were. made: of each module a guess, [S, 1 + n], or the last told token alone.
    state: what the last of these stands on, [S, C']; None where tokens alone are taken."""

    ahead: GuessWindow
    right: Tensor
    made: list[Tensor]
    state: Tensor | None


GoOn = Callable[[Followed, int, GuessDraws], Tensor]  # in so many steps; what `DraftModel.drafts` returns


class OneStep(NamedTuple):
    """What differs from step to step: positions, slots [S] int64, kv_lens [S] int32. Of several steps, [steps, S]."""

    positions: Tensor
    slots: Tensor
    kv_lens: Tensor

    @classmethod
    def of(cls, num_steps: int, size: int, device: torch.device) -> OneStep:
        """Room for several, of one key each. Each begins at a multiple of 16 bytes: for others kernels may be compiled anew."""
        room = torch.zeros(2, num_steps, -(-size // 4) * 4, dtype=torch.int64, device=device)[..., :size]
        return cls(room[0], room[1], torch.ones(num_steps, room.stride(1), dtype=torch.int32, device=device)[:, :size])


class DraftModel:
    """most: guesses a step. takes_features: see `DrafterSpec`. max_positions: what lies behind is written to scratch memory.

    takes_late: the target writes hidden states for it from behind its last attention. reads: it reads the target's keys and values,
    and `socket` is the target's. knows_lengths: whether the host can read at once what the device computed, as on a CPU.
    """

    def __init__(
        self,
        model: Model,
        socket: LayerSocket,
        *,
        most: int,
        takes_features: bool,
        max_positions: int,
        takes_late: bool = False,
        reads: bool = False,
        knows_lengths: bool = True,
    ) -> None:
        self._modules = model.modules if isinstance(model, Chained) else (model,)
        self._tails = Tails(len(self._modules))
        self.reads, self.can_be_captured = reads, not reads and len(self._modules) == 1
        self._max_positions = max_positions
        self._target_ids = model.target_ids if isinstance(model, MappedVocabulary) else None
        self.socket, self.most = socket, most
        self.takes_features, self.takes_late, self.knows_lengths = takes_features, takes_late, knows_lengths

    @property
    def relay(self) -> BackendRelay:
        """To its own backends, or the target's."""
        assert self.socket.relay is not None, "a draft model has backends"
        return self.socket.relay

    @property
    def vocab_size(self) -> int | None:
        """How many tokens its logits are of; None: as many as the target's."""
        return None if self._target_ids is None else len(self._target_ids)

    def drafts(
        self,
        step: StepInput,
        batch: ForwardBatch,
        features: Tensor,
        *,
        tokens: Tensor,
        accepted: Tensor | None,
        draws: GuessDraws,
        tables: PageTables,
        go_on: GoOn,
    ) -> Tensor:
        """Guesses at what follows the last told token of each item that samples: [S, d * (1 + n)] int64, device, see `combs`.

        batch: the step's, with all of its input tokens. features: [T, F * C], of the target. tokens: [R], what was sampled.
        accepted: [S], how many drafts of each item are among that; None: none. draws: how a guess is chosen. go_on: by what.
        """
        counts, device = step.sampled_rows, tokens.device
        begins, firsts = _firsts(step)
        right = torch.zeros(len(counts), dtype=torch.int64, device=device) if accepted is None else accepted
        ahead = self.ahead(step, tables)
        uploaded = to_device(torch.from_numpy(np.stack((begins, firsts, ahead.at))), device)
        told, at = tokens.index_select(0, uploaded[0] + right), uploaded[2]
        state: Tensor | None = None
        guesses = list[Tensor]()
        if self.reads:
            if len(counts) and step.draft_len:
                reading = self._reading(ahead, told, at + right, most_right=step.decode_len - 1, tables=tables)
                before = features.index_select(0, uploaded[1] + right)
                guesses = self._read(reading, before, first=at + right + 1, most=step.draft_len, draws=draws)
        elif self.takes_features:
            rows = self._tails.before(step, batch, features, tables)
            there, last = self._sampled_rows(step, rows, uploaded[1] + right)
            state, guesses = self._follow(rows, there, tokens, last=last, first=at + right + 1, most=step.draft_len, draws=draws)
        else:
            self.follow(self.relay.plan(renewed(batch, views={FULL: batch.views[FULL]}, logits_rows=None)), None)
        if len(counts) and len(guesses) < step.draft_len:  # not of one that reads
            return go_on(Followed(ahead, right, guesses or [told[:, None]], state), step.draft_len - len(guesses), draws)
        return verified_order(guesses) if guesses else told.new_empty(len(counts), 0)

    def _sampled_rows(self, step: StepInput, rows: FollowedRows, last: Tensor) -> tuple[Tensor, Tensor]:
        """Of the rows that are followed those that are sampled, [R], and the last told one of each item, [S]; device.

        last: the same of the step's rows. What is run over again in the next step is kept.
        """
        counts = step.sampled_rows
        _, firsts = _firsts(step)
        sampled = firsts.repeat(counts) + places_within(counts)
        if rows.place is not None:
            sampled, last = rows.place[sampled], to_device(torch.from_numpy(rows.place), last.device).index_select(0, last)
        self._tails.keep(step, rows, last)
        return to_device(torch.from_numpy(sampled), last.device), last

    def miss(self, step: StepInput) -> None:
        """Instead of `drafts`, of a step that is not followed: nothing that was kept for it fits what comes behind."""
        self._tails.forget(step)

    def ahead(self, step: StepInput, tables: PageTables) -> GuessWindow:
        items, size = step.columns(), tables.page_size
        seats = items.seat[step.sampling]
        at = (items.start + items.num_tokens - items.num_drafts)[step.sampling].astype(np.int64) - step.behind
        width = step.behind + step.decode_len + step.draft_len
        places = at + np.arange(width)[:, None]  # [W, S]
        longest = np.minimum(at + width - 1, self._max_positions)
        columns, offsets = np.divmod(np.minimum(places, self._max_positions - 1), size)
        table = _pages_of(seats, tables, int(columns.max(initial=0)) + 1, most=self.most)
        pages = np.where(places < self._max_positions, table[np.arange(len(seats)), columns], tables.full.scratch_page)
        window = pages.astype(np.int64) * size + offsets
        return GuessWindow(seats, at, window, table, longest.astype(np.int32))

    def place(self, steps: OneStep, at: Tensor, window: Tensor, right: Tensor) -> None:
        """Write where the rows of steps are, each field [steps, S], of requests of whose drafts so many were right.

        at, right: [S], window: [W, S]. Device work only, and little of it: a graph has it between those of the models.
        """
        behind = right + torch.arange(len(steps.positions), device=right.device)[:, None]  # [steps, S]
        torch.gather(window, 0, behind, out=steps.slots)
        torch.add(at, behind, out=steps.positions).clamp_(max=self._max_positions - 1)
        torch.add(steps.positions, 1, out=steps.kv_lens)

    def go_on(self, behind: Followed, num_steps: int, draws: GuessDraws) -> Tensor:
        """As `GoOn`, one step after the other."""
        ahead, right, made, state = behind
        uploaded = to_device(torch.from_numpy(np.concatenate((ahead.at[None], ahead.window))), right.device)
        at, guesses = uploaded[0], made if self.takes_features else []
        steps = OneStep.of(num_steps, len(at), at.device)
        self.place(steps, at, uploaded[1:], right)
        batches = self.relay.plan_steps([one_each(ahead, one, knows_lengths=self.knows_lengths) for one in map(OneStep, *steps)])
        first = at + right + 1 + len(guesses)
        return verified_order([*guesses, *self.steps(batches, made[-1][:, 0], state, first=first, choose=draws.choose)])

    def steps(
        self, batches: Sequence[ForwardBatch], ids: Tensor, state: Tensor | None, *, first: Tensor, choose: Choose
    ) -> list[Tensor]:
        """One row for each request in each step, with the token that the one before guessed: of each step [S, 1 + n].

        batches: planned. ids: [S], of the first step. state: [S, C'], what stands before it; None: tokens alone are taken. first:
        [S], the position of the first guess. Device work only.
        """
        guesses = []
        for index, there in enumerate(batches):
            there.input_ids.copy_(ids)
            made = self.follow(there, None if state is None else {CARRIED: state})
            guesses.append(self.guess(made, first + index, choose))
            ids = guesses[-1][:, 0]
            state = made if self.takes_features else None
        return guesses

    def follow(self, there: ForwardBatch, arrived: StageTensors | None) -> Tensor:
        """What the model returns of all rows of a planned batch: [T, C']."""
        return _ran(self._modules[0], there, arrived)

    def guess(self, state: Tensor, positions: Tensor, choose: Choose, module: Model | None = None) -> Tensor:
        """The target's tokens for these positions: [S, 1 + n]."""
        chosen = choose((module or self._modules[0]).logits(state), positions)
        return chosen if self._target_ids is None else self._target_ids[chosen]

    def _follow(
        self, rows: FollowedRows, sampled: Tensor, tokens: Tensor, *, last: Tensor, first: Tensor, most: int, draws: GuessDraws
    ) -> tuple[Tensor, list[Tensor]]:
        """Run each module over all rows: what the last returned of the rows `last`, [S, C'], and a guess of each, up to `most`.

        sampled: [R], rows that are followed by `tokens`, [R]. first: [S], positions of the first guesses. One plan serves all.
        """
        ids, guesses = rows.batch.input_ids.roll(-1).index_copy_(0, sampled, tokens), list[Tensor]()
        there, arrived = self.relay.plan(renewed(rows.batch, input_ids=ids)), {FEATURES: rows.features}
        for module in self._modules:
            if CARRIED in arrived:
                ids.copy_(ids.roll(-1))  # each module is given the token behind
                if guesses:
                    ids[last] = guesses[-1][:, 0]
            state = _ran(module, there, arrived)
            arrived = {CARRIED: state}
            if len(last) and len(guesses) < most:
                guesses.append(self.guess(state.index_select(0, last), first + len(guesses), draws.choose, module))
        return state.index_select(0, last), guesses

    def _reading(self, ahead: GuessWindow, ids: Tensor, positions: Tensor, *, most_right: int, tables: PageTables) -> ForwardBatch:
        """A planned row of each request, that sees the target's keys and values before `positions`, [S]; nothing is written.

        ids: [S], device, as positions. most_right: drafts of a request that may have been right.
        """
        longest = (ahead.at + most_right).astype(np.int32)
        table = tables.full.of(ahead.seats, (int(longest.max()) - 1) // tables.page_size + 1)
        slots = torch.full_like(positions, tables.full.scratch_page * tables.page_size)
        one = OneStep(positions.clamp(max=self._max_positions - 1), slots, positions.int())
        there = one_each(ahead._replace(table=table, longest=longest), one, knows_lengths=self.knows_lengths)
        there.input_ids.copy_(ids)
        return self.relay.plan(there) if self.knows_lengths else self.relay.plan_steps([there])[0]

    def _read(self, there: ForwardBatch, features: Tensor, *, first: Tensor, most: int, draws: GuessDraws) -> list[Tensor]:
        """`most` guesses, by one plan. there: see `_reading`. features: of the rows before. first: where the first ones are."""
        guesses, arrived = list[Tensor](), {FEATURES: features}
        while len(guesses) < most:
            state = _ran(self._modules[0], there, arrived)
            guesses.append(self.guess(state, first + len(guesses), draws.choose))
            there.input_ids.copy_(guesses[-1][:, 0])
            arrived = {CARRIED: state}
        return guesses


def _firsts(step: StepInput) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each item that samples, [S] each: of the rows that are sampled, and of all."""
    counts = step.sampled_rows
    return begins_of(counts), np.cumsum(step.rows)[step.sampling] - counts


def _pages_of(seats: np.ndarray, tables: PageTables, num_columns: int, *, most: int) -> np.ndarray:
    """The pages of each request, and behind its last one those of its seat: [S, num_columns] int32. most: guesses a step."""
    scratch, count = tables.full.scratch_page, pages_behind(most, tables.page_size)
    held = tables.full.of(seats, num_columns)
    item, column = (held == scratch).nonzero()  # behind what is held
    behind = column - num_columns + np.bincount(item, minlength=len(seats))[item]
    held[item, column] = scratch + 1 + seats[item] * count + np.minimum(behind, count - 1)
    return held


def one_each(ahead: GuessWindow, one: OneStep, *, knows_lengths: bool) -> ForwardBatch:
    """A row of each request, with ids of its own: zeros. knows_lengths: whether `one` is where the host can read it."""
    ones = torch.ones(len(ahead.seats), dtype=torch.int32)
    return ForwardBatch(
        phase=Phase.DECODE,
        input_ids=torch.zeros_like(one.positions),
        positions=one.positions,
        q_lens_cpu=ones,
        kv_lens_cpu=one.kv_lens if knows_lengths else torch.from_numpy(ahead.longest),
        num_logits_cpu=ones,
        seats_cpu=torch.from_numpy(ahead.seats),
        views={FULL: View(slots=one.slots, page_table_cpu=torch.from_numpy(ahead.table))},
        kv_lens=None if knows_lengths else one.kv_lens,
    )


def _ran(module: Model, batch: ForwardBatch, arrived: StageTensors | None) -> Tensor:
    made = module.forward(batch, arrived)
    if isinstance(made, Tensor) and made.ndim == 2 and len(made) == batch.num_tokens:
        return made
    told = list(made.shape) if isinstance(made, Tensor) else made
    raise PluginError(f"forward of the draft model (--drafter) returned {told!r:.60} instead of [{batch.num_tokens}, C']")
