"""Decoding steps, captured for a number of requests and replayed for no more.

    host      pad to a captured size, copy the token fields over those of the graph, let the backend refresh its captured plan
    device    [ fill pending ids | device_prologue | model | head: logits, best tokens, kept ]      one launch

A graph's token fields are one tensor, made from the axes of the batch; everything else that it reads belongs to the backend or the
model. The best tokens are kept for the next step; what is sampled otherwise, from the logits, is kept in their place.

Of a step that verifies, drafts that are the best tokens are accepted within it; where tokens are sampled otherwise, that is done
anew behind it. Recurrent states move on in a graph of their own, which is replayed when it is settled how many drafts stand.
"""

from __future__ import annotations

import logging
import time
from dataclasses import KW_ONLY, dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from enginery.attention.axes import pad, renewed, token_fields, with_token_fields
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.drafting import FEATURES
from enginery.contracts.step import StepInput, Way
from enginery.speculate.acceptance import accept
from enginery.worker.drafts.trees import CapturedComb, standing_in_comb
from enginery.worker.layout import KNOWN, has_pending, no_requests, num_drafts, sampled_seats, token_sources
from enginery.worker.paths.captured_step import Capture, CapturedStep, Head, HeadResults, at_the_earliest, captured_moving, move_on
from enginery.worker.paths.path import Forwarded
from enginery.worker.paths.results import StepParts
from enginery.worker.token_feed import TokenFeed

_log: Final = logging.getLogger(__name__)


class DecodeKey(NamedTuple):
    """Of a captured step: requests, rows of each, whether a draft model follows it, and how deep the comb is that the rows begin;
    0: they are a chain."""

    size: int
    length: int
    followed: bool
    depth: int = 0


class Speculation(NamedTuple):
    """What steps that verify, or that a draft model follows, are captured with. hidden: [most rows, C], where the draft model takes
    the hidden states. siblings: of combs, whose rows are moved where they stand; 0: drafts that branch are verified eagerly.
    most_starts: the most requests that begin where the device finds, see `captured_step`; where more begin is known at the launch.
    most_positions: of a request."""

    hidden: Tensor | None = None
    siblings: int = 0
    most_starts: int = 0
    most_positions: int = 0


NO_SPECULATION: Final = Speculation()


@dataclass(frozen=True, eq=False)
class DecodeCapture:
    """most_rows: of a step. head: None where what is chosen from hidden states is of all ranks; then these are left. fills: pending
    ids are filled in within what is captured; else before it, where there are some. num_ranks: of the engine; they capture alike.
    """

    parts: StepParts
    most_rows: int
    _: KW_ONLY
    head: Head | None
    record: Capture
    speculation: Speculation = NO_SPECULATION
    fills: bool = True
    num_ranks: int = 1

    @torch.inference_mode()
    def capture(self, key: DecodeKey) -> CapturedStep:
        """Capture a step. Takes as long as two or three eager ones."""
        size, length, followed, depth = key
        model, relay, feed, pool, results = (parts := self.parts).model, parts.relay, parts.feed, parts.pool, parts.results
        siblings, most_starts = self.speculation.siblings, self.speculation.most_starts
        batch, packed = _padding_alone(feed, pool.geometry, key)
        accepted = torch.zeros(size, dtype=torch.int64, device=feed.device) if length > 1 else None
        moved = None if accepted is None or size > most_starts else torch.zeros_like(accepted)
        batch = batch if moved is None else renewed(batch, kv_lens=torch.full_like(moved, length, dtype=torch.int32))
        batch = relay.plan(feed.named.placed(batch, leaves=() if followed else (FEATURES,)), capture=True)
        standing = standing_in_comb(size, length, depth, siblings, batch, relay) if siblings and depth else None
        found = list[HeadResults]()

        def run() -> None:
            if moved is not None:  # bring the rows to where they begin, if they do not lie there
                behind, wrong = packed[-3, size : 2 * size], feed.wrong.index_select(0, packed[-1, :size])
                most_positions = self.speculation.most_positions
                move_on(batch, packed[-4], behind=behind, wrong=wrong, out=moved, most_positions=most_positions)
            if self.fills:
                feed.fill(batch.input_ids, packed[-2], out=batch.input_ids)
            relay.ask("device_prologue", plan=batch.plan)
            hidden = results.hidden(model.forward(batch), batch)
            found.append(self._made(hidden, followed=followed))
            _keep(self, found[-1], batch, packed, out=accepted, standing=standing)

        captured = CapturedStep(
            packed=packed,
            seats=packed[-1, :size],
            batch=batch,
            graph=self.record(run),
            made=found[-1],  # of the last run
            followed=followed,
            accepted=accepted,
            standing=standing,
            moving=None if accepted is None else captured_moving(self.parts, batch, accepted, standing, capture=self.record),
            moved=moved,
        )
        _log.debug("captured a decoding step of %d requests of %d rows", size, length)
        return captured

    def _made(self, hidden: Tensor, *, followed: bool) -> HeadResults:
        if self.head is None:
            return HeadResults(hidden=hidden)
        made, kept = self.head(hidden), self.speculation.hidden
        return made._replace(hidden=kept[: len(hidden)].copy_(hidden)) if followed and kept is not None else made

    def finds_start(self, step: StepInput) -> bool:
        """Whether the device finds where the items of a step that verifies begin, so that the one before need not be told first."""
        return step.run.way is Way.GRAPH and step.run.size <= self.speculation.most_starts

    def replay(self, captured: CapturedStep, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """Copy the batch's token fields over those of the graph, let the backend bring its plan up to date, and launch it."""
        relay, feed, pool = self.parts.relay, self.parts.feed, self.parts.pool
        size, num_rows = captured.batch.num_requests, captured.packed.shape[1]
        batch, beside = feed.named.with_inputs(batch, step.inputs), list[Tensor]()
        if captured.accepted is not None:
            beside = [later := torch.zeros(num_rows, dtype=torch.int64), num_drafts(step, size=num_rows)]
            if step.behind:
                batch, later[: batch.num_tokens] = at_the_earliest(batch, step.behind, page_size=pool.geometry.page_size)
                beside[1][size : size + step.num_items] = step.behind
        padded = pad(batch, num_requests=size, num_tokens=num_rows, geometry=pool.geometry)
        sources = token_sources(step, width=feed.width, size=num_rows)
        seats = sampled_seats(step, size=num_rows, fill=feed.scratch_seat)
        feed.overwrite(captured.packed, [*token_fields(padded), *beside, sources, seats])
        padded = feed.named.placed(padded, leaves=() if captured.followed else (FEATURES,))
        if captured.moved is not None:
            padded = renewed(padded, kv_lens=captured.batch.kv_lens)
        assert captured.batch.plan is not None, "what is captured is planned"
        relay.refresh(captured.batch.plan, padded)
        if not self.fills and has_pending(step):
            feed.fill(captured.batch.input_ids, captured.packed[-2], out=captured.batch.input_ids)
        planned_s = time.perf_counter()
        captured.graph.replay()
        return Forwarded(
            planned_s=planned_s,
            in_graphs=True,
            logits=captured.made.logits,
            greedy=captured.made.marked,
            batch=captured.batch,
            hidden=captured.made.hidden,
            accepted=captured.accepted,
            captured=captured,
            padded=padded,
        )


def _keep(
    steps: DecodeCapture,
    found: HeadResults,
    batch: ForwardBatch,
    packed: Tensor,
    *,
    out: Tensor | None,
    standing: CapturedComb | None,
) -> None:
    """For the next step, what the requests of a captured batch go on with. out: how many drafts of each are right; None: of a batch
    without drafts."""
    if found.best is None or found.marked is None:
        return
    seats, feed, forced = packed[-1, : batch.num_requests], steps.parts.feed, steps.parts.forced
    if out is None:
        feed.keep(found.best, seats)
        return
    num_drafts, shape = packed[-3, : len(seats)], (batch.num_requests, batch.decode_len)
    sampled, inputs, places = (each.view(shape) for each in (found.marked, batch.input_ids, batch.positions))
    if forced is not None and steps.num_ranks == 1:
        inputs = forced.tokens(inputs, sampled, places)
    parents, depth = (None, None) if standing is None else (standing.parents, standing.depth)
    path, counts = accept(sampled, inputs, parents, num_drafts, depth=depth)
    last = right = out.copy_(counts)
    if standing is not None:
        standing.path.copy_(path)
        last = path.gather(1, right[:, None]).squeeze(1)
    begins = torch.arange(0, len(found.best), batch.decode_len, device=found.best.device)
    feed.keep(found.best.index_select(0, begins + last), seats)
    feed.wrong.index_copy_(0, seats, num_drafts - out)


def _padding_alone(feed: TokenFeed, geometry: KVGeometry, key: DecodeKey) -> tuple[ForwardBatch, Tensor]:
    """A batch of so many requests that nobody made, and its token fields with what is beside them, see `CapturedStep`."""
    num_rows = key.size * key.length
    batch = feed.named.with_inputs(no_requests(geometry, key.length, trees=key.depth > 0))
    batch = pad(batch, num_requests=key.size, num_tokens=num_rows, geometry=geometry)
    nobody = torch.full((num_rows,), feed.scratch_seat)
    beside = [] if key.length == 1 else [torch.zeros(num_rows, dtype=torch.int64)] * 2
    packed = torch.stack([*token_fields(batch), *beside, torch.full((num_rows,), KNOWN), nobody]).to(feed.device)
    return with_token_fields(batch, iter(packed)), packed
