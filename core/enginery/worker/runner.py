"""One step on the device: lay out, forward, sample. Launching does not wait for the device; the result does.

The worker is given steps and sampling as values, and knows requests by their seats alone. B items, S items that sample, N rows that
need logits, C channels, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import torch

from enginery.contracts.batch import Phase
from enginery.contracts.drafting import FEATURES
from enginery.contracts.plan import Accepted
from enginery.contracts.step import INT, RunSizes, SamplingInput, StepInput, Way
from enginery.errors import Unsupported
from enginery.kv.upload import recorded, to_device
from enginery.speculate.acceptance import accept
from enginery.worker.drafts.draft_graphs import DraftGraphs
from enginery.worker.drafts.draft_model import DraftModel
from enginery.worker.drafts.draws import DRAW_KINDS, GuessDraws
from enginery.worker.drafts.trees import deepest, move_standing, parents_of, standing_first, straightened
from enginery.worker.layout import begins_of, lay_out, logits_of_items
from enginery.worker.page_tables import PageTables
from enginery.worker.paths.captured_step import NumGuesses
from enginery.worker.paths.decode_graphs import DecodeGraphs
from enginery.worker.paths.mixed_graphs import MixedGraphs
from enginery.worker.paths.path import EagerPath, ForwardPath, Launched, Paths, Verified, first_rows
from enginery.worker.paths.recorded_steps import RecordedSteps
from enginery.worker.paths.results import StepParts
from enginery.worker.paths.running_step import Guesses, RunningStep
from enginery.worker.ranks.collectives import Agreement
from enginery.worker.ranks.path import with_ranks
from enginery.worker.sampling import LogprobTable, mark_nan, prompt_logprob_tables, sample, token_logprobs

_log: Final = logging.getLogger(__name__)
NO_CUTS: Final[Mapping[int, int]] = MappingProxyType({})


class Captured(NamedTuple):
    """Of decoding steps, of the others, and of a draft model behind decoding steps. None: these run eagerly."""

    graphs: DecodeGraphs | RecordedSteps | None = None
    pieces: MixedGraphs | None = None
    drafts: DraftGraphs | None = None


class Runner:
    """Owns the model and its backend. Between steps it remembers, by seat, page tables and each last token, on the device.

    agreement: among tensor ranks, on what each has to know of a step beside the step; None where there is one rank. draft_model:
    what guesses, unless it is of the host. siblings: beside each guess.
    """

    def __init__(
        self,
        parts: StepParts,
        *,
        tables: PageTables,
        captured: Captured,
        draft_model: DraftModel | None = None,
        siblings: int = 0,
    ) -> None:
        self.parts, self.tables, self._is_full = parts, tables, False
        self.ops, self.feed, self._pool = parts.ops, parts.feed, parts.pool
        self.graphs, self.pieces, self._draft_graphs = captured
        self.device, self._is_cuda = self.feed.device, self.feed.device.type == "cuda"
        self._no_tokens = torch.empty(0, dtype=torch.int64, device=self.device)
        self.draft_model, self._siblings = draft_model, siblings
        joined = parts.joined
        self.agreement = None if joined is None else Agreement.of(joined, draft_model)
        self._lane = 0 if joined is None or joined.lanes is None else joined.lanes.lane
        self._paths = self._make_paths()

    @property
    def sizes(self) -> RunSizes:
        """The steps that need not run eagerly."""
        pieces = () if self.pieces is None else self.pieces.sizes
        if (graphs := self.graphs) is None:
            return RunSizes(pieces=pieces)
        return RunSizes(graphs.sizes, pieces, graphs.verified_rows, combs=self._siblings > 0, followed=graphs.follows)

    def prepare(self, num_guesses: NumGuesses) -> bool:
        """Capture one more of the graphs that loads begin with; False: all are there, or memory did not do."""
        graphs, pieces, drafts = Captured() if self._is_full else (self.graphs, self.pieces, self._draft_graphs)
        try:
            if graphs is not None and drafts is not None and drafts.prepare(graphs.captured.values(), num_guesses):
                return True
            if graphs is not None and (keys := graphs.waiting(num_guesses)):
                graphs.provide(keys[0])
                return True
            if pieces is not None and pieces.prepare(num_guesses, siblings=self._siblings):
                return True
        except torch.OutOfMemoryError as error:  # steps go on: what one needs is captured then, or it fails alone
            self._is_full = True
            _log.warning("nothing more is captured in idle moments: %s", error)
        return False

    def backend_changed(self) -> None:
        """The socket has other attention backends: capture steps anew, as they are needed. No step may be in flight."""
        if (graphs := self.graphs) is not None:
            graphs.captured.clear()  # the new ones are in their memory
            self.graphs = graphs.build(graphs.steps)
        if self.pieces is not None:
            self.pieces.backend_changed()
        self._paths = self._make_paths()

    def _make_paths(self) -> Paths:
        late = self.draft_model is None or self.draft_model.takes_late
        eager = EagerPath(self.parts, keeps_all=self.draft_model is not None, writes_late=late)
        paths, graphs = Paths(eager, self.graphs, self.pieces, without_graph=eager), self.graphs
        has_head = graphs is not None and graphs.steps.head is not None
        return with_ranks(paths, self.parts, has_head=has_head)

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Launched:
        """Start the step's forward. Inputs that are pending must be of the step launched before."""
        own = step.of_lane(self._lane)
        self.tables.take(own)
        batch = lay_out(own, self.tables)
        laid_out_s = time.perf_counter()
        try:
            forwarded = self._path_of(step).forward(step, batch)
        except Unsupported:  # without memory to capture it
            if step.run.way is not Way.PIECES:
                raise
            forwarded = self._paths.eager.forward(step, batch)
        if forwarded.logits is not None:
            logits = first_rows(forwarded.logits, int(step.sampled_rows.sum()) if step.verifies else len(step.sampling))
        else:
            assert forwarded.last is not None, "a forward gives logits or hidden states"
            logits = self.parts.logits(forwarded.last)
        return Launched(step, forwarded, logits, laid_out_s)

    @torch.inference_mode()
    def sample(self, launched: Launched, sampling: SamplingInput | None, cuts: Mapping[int, int] = NO_CUTS) -> RunningStep:
        """Choose the tokens of a launched step, the newest, and keep them for the next. None: best tokens, and nothing beside."""
        step, forwarded = launched.step, launched.forwarded
        prompts = {} if sampling is None else self._prompt_logprobs(step, sampling, forwarded.rows)
        embedding = np.frombuffer(step.embedding, INT).tolist()
        embedded = self._embedded(embedding, launched)
        tokens = marked = self._no_tokens
        accepted, path, logits = None, None, launched.logits
        if step.verifies:
            tokens, marked, accepted, path = self._verify(launched, sampling, cuts)
            logits = logits if path is None else logits.index_select(0, standing_first(path, len(tokens)))
        elif len(step.sampling):
            tokens, marked = self._choose(launched, sampling)
        num_top = sampling.num_top if sampling is not None else ()
        logprobs = token_logprobs(logits, tokens.clamp(min=0), [max(count, 0) for count in num_top]) if num_top else None
        sampled = marked.to("cpu", non_blocking=True, copy=True)  # the next replay overwrites a graph's own
        told = None if accepted is None else accepted.to("cpu", non_blocking=True, copy=True)
        copied = recorded(is_cuda=self._is_cuda)  # before anything is guessed, so that the host goes on with what is told meanwhile
        if self.agreement is not None:
            self.agreement.outcome(step, tokens.clamp(min=0), accepted)
        guesses = self.draft(launched, sampling, tokens, accepted, path)
        return RunningStep(
            step=step,
            sampling=step.sampling.tolist(),
            sampled=sampled,
            marked=marked,
            accepted=told,
            guesses=guesses,
            copied=copied,
            embedding=embedding,
            embedded=embedded,
            logprobs=logprobs,
            num_top=num_top,
            prompt_logprobs=prompts,
            captured=forwarded.in_graphs,
            laid_out_s=launched.laid_out_s,
            planned_s=forwarded.planned_s,
            launched_s=time.perf_counter(),
        )

    def _path_of(self, step: StepInput) -> ForwardPath:
        way, graphs = step.run.way, self.graphs
        if way is Way.EAGER:
            if step.phase is Phase.DECODE and graphs is not None and not step.embedding:
                graphs.note_too_large(step)
            return self._paths.eager
        if way is Way.GRAPH and graphs is not None and not graphs.ready(step):
            return self._paths.without_graph
        path = self._paths.graph if way is Way.GRAPH else self._paths.pieces
        assert path is not None, f"step {step.number} is to run as {way}, which this worker has not captured"
        return path

    def _choose(self, launched: Launched, sampling: SamplingInput | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of [S, V], kept for the next step, and the same with `NAN_TOKEN` for NaN logits; [S] int64 each, device."""
        step, forwarded, logits = launched.step, launched.forwarded, launched.logits
        if forwarded.greedy is not None and step.run.greedy:
            best = first_rows(forwarded.greedy, logits.shape[0])
            return best, best
        tokens = sample(logits, sampling, ops=self.ops)
        self.feed.keep(tokens, launched.seats())
        return tokens, mark_nan(logits, tokens)

    def _verify(self, launched: Launched, sampling: SamplingInput | None, cuts: Mapping[int, int]) -> Verified:
        """Sample all rows, of [R, V], and find the drafts that are right.

        What follows each item's last right draft is kept for the next step; what stands is kept, see `keep_accepted`. cuts: how
        many tokens some items may be told at the most.
        """
        step, logits, batch = launched.step, launched.logits, launched.forwarded.batch
        if (verified := launched.verified(cuts)) is not None:
            self.keep_accepted(launched, verified.accepted, verified.path)
            return verified
        assert batch is not None, "a step that verifies keeps its batch"
        if launched.forwarded.greedy is not None and step.run.greedy:
            marked = launched.forwarded.greedy[: len(logits)]
            tokens = marked.clamp(min=0)
        else:
            tokens = sample(logits, sampling, ops=self.ops, positions=launched.found_positions())
            marked = mark_nan(logits, tokens)
        count, length = step.num_decode, step.decode_len
        values = (batch.input_ids, batch.positions, marked)
        inputs, places, sampled = (each[: count * length].view(count, length) for each in values)
        if self.parts.forced is not None:
            inputs = self.parts.forced.tokens(inputs, sampled, places)
        most = _most_right(step, cuts)
        begins, seats = begins_of(step.sampled_rows), step.columns().seat[step.sampling]
        uploaded = to_device(torch.from_numpy(np.concatenate((most, begins, seats.astype(np.int64)))), self.device)
        num_drafts, first_rows, kept_at = torch.split(uploaded, [count, len(begins), len(seats)])
        parents = to_device(torch.from_numpy(parents_of(step)), self.device) if step.parents else None
        ways, right = accept(sampled, inputs, parents, num_drafts, depth=deepest(step))
        path = None if parents is None else ways
        self.keep_accepted(launched, right, path)
        if path is not None:
            order = standing_first(path, len(tokens))
            tokens, marked = tokens.index_select(0, order), marked.index_select(0, order)
        accepted = torch.nn.functional.pad(right, (0, len(step.sampling) - count))
        self.feed.keep(tokens.index_select(0, first_rows + accepted), kept_at)
        self.feed.wrong.index_copy_(0, kept_at[:count], num_drafts - right)
        return Verified(tokens, marked, accepted, path)

    def keep_accepted(self, launched: Launched, right: torch.Tensor, path: torch.Tensor | None = None) -> None:
        """Move states behind the drafts that are right, of the items that verified some; all rows of the others stand. Where drafts
        branch, bring what is kept of the right ones together. right: [n], path: [n, N], see `accept`; None: none branches.
        """
        step, batch, captured = launched.step, launched.forwarded.batch, launched.forwarded.captured
        assert batch is not None, "a step that verifies keeps its batch"
        if captured is not None:
            captured.keep_accepted(right, path)
            return
        if step.parents:
            assert path is not None, "and which rows stand"
            move_standing(batch, path, right, self._pool)
        if not step.states:
            return
        others = torch.from_numpy(step.rows[step.num_decode :].astype(np.int64)) - 1
        accepted = Accepted(counts=torch.cat((right, to_device(others, self.device))))
        done = self.parts.relay.ask("commit_state", plan=batch.plan, accepted=accepted)
        assert done is not None, "a backend of recurrent layers that verifies commits states"

    def draft(
        self,
        launched: Launched,
        sampling: SamplingInput | None,
        tokens: torch.Tensor | None,
        accepted: torch.Tensor | None,
        path: torch.Tensor | None = None,
    ) -> Guesses | None:
        """What the draft model guesses to follow each item that samples, kept for the next step; None if nobody guesses.

        tokens: [R], what was sampled; None where nobody guesses. accepted: [S], drafts that are right; None: there were none. path:
        of drafts that branch, see `Verified`.
        """
        model = self.draft_model
        step, forwarded = launched.step, launched.forwarded
        if model is None:
            return None
        if not step.draft_len:
            model.miss(step)
            return None
        assert tokens is not None, "a step that a draft model follows tells its tokens"
        features = self.feed.named.buffers.get(FEATURES, forwarded.hidden)
        assert features is not None, "and its hidden states"
        draws = self._draws(step, sampling)
        graphs, tables = self._draft_graphs, self.tables
        if forwarded.captured is not None and graphs is not None:
            found = graphs.drafts(step, forwarded, tokens=tokens, draws=draws, tables=tables)
        else:
            batch, told = forwarded.unpadded(step.num_items), tokens.clamp(min=0)
            features = features[: batch.num_tokens]
            if path is not None:
                step, batch, features, told = straightened(step, batch, path=path, features=features, tokens=told)
            go_on = (graphs or model).go_on
            found = model.drafts(step, batch, features, tokens=told, accepted=accepted, draws=draws, tables=tables, go_on=go_on)
        if model.knows_lengths:
            return Guesses(found, None)
        self.feed.keep_drafts(found, launched.seats())
        return Guesses(found.to("cpu", non_blocking=True), recorded(is_cuda=self._is_cuda))

    def _draws(self, step: StepInput, sampling: SamplingInput | None) -> GuessDraws:
        rows, agreed = begins_of(step.sampled_rows), self.agreement
        together = None if agreed is None else functools.partial(agreed.guess, greedy=step.run.greedy)
        kind = None if agreed is None or step.run.greedy else DRAW_KINDS[0]
        return GuessDraws(sampling, rows, ops=self.ops, device=self.device, siblings=self._siblings, together=together, kind=kind)

    def _embedded(self, embedding: Sequence[int], launched: Launched) -> torch.Tensor | None:
        """The last hidden states of these items, [E, C] float32, on their way to the host."""
        if not embedding:
            return None
        last = launched.forwarded.last
        assert last is not None, "a step of which hidden states are asked for runs no graph that keeps them"
        rows = torch.from_numpy(begins_of(launched.step.sampled_rows)[np.searchsorted(launched.step.sampling, embedding)])
        return last.index_select(0, to_device(rows, self.device)).float().to("cpu", non_blocking=True)

    def _prompt_logprobs(
        self, step: StepInput, sampling: SamplingInput, rows: torch.Tensor | None
    ) -> dict[int, list[LogprobTable]]:
        """Of each item that asks for them, what its rows of [N, C] say of the tokens that follow."""
        if not sampling.prompts:
            return {}
        assert rows is not None, "a step with rows that nobody samples from is no decoding step"
        firsts = begins_of(logits_of_items(step)).tolist()
        return {
            index: prompt_logprob_tables(self.parts.logits, targets, rows[firsts[index] :])
            for index, targets in sampling.prompts.items()
        }


def _most_right(step: StepInput, cuts: Mapping[int, int]) -> np.ndarray:
    """Of the items that verify drafts, how many of these may be right: [n] int64. cuts: see `Runner._verify`."""
    most = step.columns().num_drafts[: step.num_decode].astype(np.int64)
    for index, most_told in cuts.items():
        most[index] = min(most[index], most_told - 1)
    return most
