"""Decoding steps as CUDA graphs: one per batch size, captured when first needed or in idle moments, replayed for fewer requests.
On a CPU `recorded_steps` does the same without a device.

Of steps that verify drafts, one per batch size and number of rows of a request. Drafts that are the best tokens are accepted within
it; where tokens are sampled otherwise, that is done anew behind it. Recurrent states move on in a graph of their own, which is
replayed when it is settled how many drafts stand. What a draft model takes of the hidden states is kept by graphs of their own, for
steps that it follows: while nothing is guessed, the graphs are those of plain decoding.

    host      pad to a captured size, copy the token fields over those of the graph, let the backend refresh its captured plan
    device    [ fill pending ids | device_prologue | model | logits | best tokens, kept ]      one launch

A graph's token fields are one tensor, made from the axes of the batch; everything else that it reads belongs to the backend or the
model. The logits of all sizes are in one buffer. The best tokens are kept for the next step; what is sampled otherwise, from the
logits, is kept in their place. Prefills, mixed steps and larger batches run eagerly, or as piecewise graphs.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from enginery.attention.axes import pad, renewed, token_fields, with_token_fields
from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.drafting import FEATURES
from enginery.contracts.step import StepInput, Way
from enginery.errors import Unsupported
from enginery.speculate.acceptance import accept
from enginery.speculate.combs import num_verified
from enginery.worker.drafts.draws import ForcedAcceptance
from enginery.worker.drafts.trees import Standing, deepest, standing_in_comb
from enginery.worker.layout import KNOWN, no_requests, num_drafts, sampled_seats, token_sources
from enginery.worker.paths.captured_step import (
    Capture,
    CapturedStep,
    NumGuesses,
    Replayable,
    at_the_earliest,
    captured_moving,
    move_on,
    takes_graphs,
)
from enginery.worker.paths.path import Forwarded
from enginery.worker.paths.results import StepParts
from enginery.worker.ranks.collectives import JoinedHead
from enginery.worker.sampling import mark_nan
from enginery.worker.token_feed import NamedTensors, TokenFeed

_log: Final = logging.getLogger(__name__)


class CudaCapture:
    """Captures into one memory pool, which all graphs share because they run one after the other.

    On one stream, because cuBLAS keeps a workspace for each. meet: waits on the host for the ranks that graphs exchange something
    with; no exchange is on its way on any GPU while one of them captures.
    """

    def __init__(self, device: torch.device, meet: Callable[[], None] = lambda: None) -> None:
        self.device, self.meet = device, meet
        self.graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()  # all that there are
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], None]) -> Replayable:
        """`run` is called twice: the first time, not captured, kernels may compile and libraries make their plans."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            run()
        torch.cuda.synchronize(self.device)
        self.meet()
        self.graphs.add(graph := torch.cuda.CUDAGraph())
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            run()
        self.meet()
        return graph


def graph_sizes(max_requests: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 up to 64, 16 up to 256, 32 beyond: padding costs an eighth at most where batches are large."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_requests, 32)]
    return (*(size for size in sizes if size < max_requests), max_requests)


class GraphKey(NamedTuple):
    """Of a captured step: requests, rows of each, whether a draft model follows it, and how deep the comb is that the rows begin.

    0: they are a chain.
    """

    size: int
    length: int
    followed: bool
    depth: int = 0

    @classmethod
    def of(cls, step: StepInput, *, serves_drafts: bool) -> GraphKey:
        """Verifications are followed as a rule; what they keep where they are not is less than another graph would take."""
        followed = serves_drafts and (step.verifies or step.draft_len > 0)
        return cls(step.run.size, step.decode_len, followed, deepest(step))


class Starts(NamedTuple):
    """Verifications that begin where the device finds: of how many requests at the most, and how many positions these have."""

    most_requests: int = 0
    most_positions: int = 0


class GraphBuffers(NamedTuple):
    """What all graphs of decoding steps write. logits: [most rows, V], of several ranks this one's columns; hidden: [most rows, C],
    where a draft model takes the hidden states. forced: for benchmarks, writes over drafts, so that they are right by chance.
    siblings: of combs, whose rows are moved where they stand; 0: drafts that branch are verified eagerly. starts: see
    `captured_step`; where more requests begin is known at the launch."""

    logits: Tensor
    hidden: Tensor | None = None
    forced: ForcedAcceptance | None = None
    siblings: int = 0
    starts: Starts = Starts()


class HeadResults(NamedTuple):
    """Of hidden states. best: tokens, [rows] int64; None: none is chosen. logits, and marked, its best: of `CapturedStep`."""

    best: Tensor | None
    logits: Tensor
    marked: Tensor


class DecodeGraphs:
    """Implements `ForwardPath` for decoding steps whose hidden states nobody asks for, and for those that verify drafts.

    A step of these is captured for a number of requests and of rows of each. verified_rows: the most of one; 0: none is captured.
    follows: whether a draft model finds what it takes behind these steps. features: where, [most rows, F * C]; None: none asks.
    """

    follows = True

    def __init__(self, parts: StepParts, buffers: GraphBuffers, *, capture: Capture) -> None:
        self.parts, self.buffers = parts, buffers
        self.model, self.relay, self.ops, _, self.feed, pool, self.results = parts
        self.geometry = pool.geometry
        most = len(buffers.logits)
        self.best = torch.zeros(most, dtype=torch.int64, device=buffers.logits.device)
        self.sizes = graph_sizes(most)
        self.verified_rows = 0
        self._noted = False
        self._capture = capture
        self.captured: dict[GraphKey, CapturedStep] = {}
        self._refused: set[GraphKey] = set()
        self.features = self.feed.named.buffers.get(FEATURES, buffers.hidden)

    @classmethod
    def build(cls, parts: StepParts, buffers: GraphBuffers, *, capture: Capture) -> DecodeGraphs | None:
        """None, with the reason in the log, where a backend has no `init_graph_state`."""
        if not takes_graphs(parts.relay, len(buffers.logits), what="decoding"):
            return None
        graphs = cls(parts, buffers, capture=capture)
        graphs.capture_first()
        return graphs

    def over(self, relay: BackendRelay) -> DecodeGraphs | None:
        """Graphs of the same sizes of another backend, in the memory of these, which are given up."""
        self.captured.clear()
        return self.build(self.parts._replace(relay=relay), self.buffers, capture=self._capture)

    def waiting(self, num_guesses: NumGuesses | None = None) -> list[GraphKey]:
        """Steps without a graph that loads begin with: plain, before guesses, and with so many of each request; smallest first."""
        siblings, follows, keys = self.buffers.siblings, self.features is not None, list[GraphKey]()
        for size in self.sizes:
            for count in () if num_guesses is None else (num_guesses(size), num_guesses(size + 2)):  # two more may have made them
                length = 1 + num_verified(count, siblings)
                if count and size * length <= self.verified_rows:
                    keys += [GraphKey(size, length, follows, count if siblings else 0), GraphKey(size, 1, follows)]
            keys.append(GraphKey(size, 1, followed=False))
        return [key for key in keys if key not in self.captured and key not in self._refused]

    def capture_first(self) -> None:
        """Capture the largest graph, as the others fit into its memory, and one that verifies, if anything guesses."""
        self.capture(GraphKey(self.sizes[-1], 1, followed=False))
        self.verified_rows = self.sizes[-1]
        most_guesses = (min(self.feed.width, self.verified_rows) - 1) // (1 + self.buffers.siblings)  # of one request
        verifying = [key for key in self.waiting(lambda _: most_guesses) if key.length > 1]
        if not verifying or not self.provide(verifying[-1]):
            self.verified_rows = 0

    def provide(self, key: GraphKey) -> bool:
        """Whether there is a graph, which is captured now if it was not yet. If drafts cannot be verified in one, never."""
        if key not in self.captured and key not in self._refused:
            try:
                self.capture(key)
            except Unsupported as error:
                if key.length == 1:
                    raise
                _log.info("drafts of %d requests are verified eagerly: %s", key.size, error)
                self._refused.add(key)
        return key in self.captured

    @torch.inference_mode()
    def capture(self, key: GraphKey) -> None:
        """Capture a graph. Takes as long as two or three eager steps."""
        size, length, followed, depth = key
        buffers, siblings = self.buffers, self.buffers.siblings
        batch, packed = _padding_alone(self.feed, self.geometry, key)
        accepted = torch.zeros(size, dtype=torch.int64, device=self.feed.device) if length > 1 else None
        moved = None if accepted is None or size > buffers.starts.most_requests else torch.zeros_like(accepted)
        batch = batch if moved is None else renewed(batch, kv_lens=torch.full_like(moved, length, dtype=torch.int32))
        batch = self.relay.plan(_placed(self.feed.named, batch, followed=followed), capture=True)
        kept = buffers.hidden[: size * length] if followed and buffers.hidden is not None else None
        standing = standing_in_comb(size, length, depth, siblings, batch, self.relay) if siblings and depth else None
        found = list[HeadResults]()

        def run() -> None:
            _begin(self, batch, packed, moved)
            self._fill(batch, packed[-2])
            self.relay.ask("device_prologue", plan=batch.plan)
            hidden = self.results.hidden(self.model.forward(batch), batch)
            found.append(self._run_head(hidden))
            _keep(self, found[-1], batch, packed, out=accepted, standing=standing)
            if kept is not None:
                kept.copy_(hidden)

        self.captured[key] = CapturedStep(
            packed=packed,
            seats=packed[-1, :size],
            batch=batch,
            graph=self._capture(run),
            logits=found[-1].logits,  # of the last run
            best=found[-1].marked,
            followed=followed,
            hidden=kept,
            accepted=accepted,
            standing=standing,
            moving=None if accepted is None else captured_moving(self.parts, batch, accepted, standing, capture=self._capture),
            moved=moved,
        )
        _log.debug("captured a decoding step of %d requests of %d rows", size, length)

    def ready(self, step: StepInput) -> bool:
        """Whether there is a graph of the step's size, see `provide`. If not, it has to run eagerly."""
        return self.provide(GraphKey.of(step, serves_drafts=self.features is not None))

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """Replay the graph of the step's size, which is `ready`."""
        captured = self.captured[GraphKey.of(step, serves_drafts=self.features is not None)]
        padded = self._update(captured, step, batch)
        planned_s = time.perf_counter()
        captured.graph.replay()
        return Forwarded(
            planned_s=planned_s,
            in_graphs=True,
            logits=captured.logits,
            greedy=captured.best,
            batch=captured.batch,
            hidden=captured.hidden,
            accepted=captured.accepted,
            captured=captured,
            padded=padded,
        )

    def _run_head(self, hidden: Tensor) -> HeadResults:
        """hidden: [rows, C]. What is made of it stays until the next replay; of several ranks each keeps its columns of logits."""
        kept = self.buffers.logits[: len(hidden)]
        if isinstance(self.model, JoinedHead):
            columns = kept.copy_(self.model.columns(hidden))
            marked = self.best[: len(columns)].copy_(self.model.shared.best(columns))
            return HeadResults(marked.clamp(min=0), columns, marked)
        logits = kept.copy_(self.results.logits(self.model.logits(hidden), hidden))
        best = self.ops.greedy(logits)
        return HeadResults(best, logits, self.best[: len(best)].copy_(mark_nan(logits, best)))

    def _fill(self, batch: ForwardBatch, sources: Tensor) -> None:
        """Fill pending ids in, where the graph reads them."""
        self.feed.fill(batch.input_ids, sources, out=batch.input_ids)

    def note_too_large(self, step: StepInput) -> None:
        """Say once that a step of so many requests, in a lane, is decoded eagerly."""
        if self.sizes and not self._noted:
            num_requests = max(own.num_items for own in step.lanes or (step,))
            _log.warning("%d requests are decoded eagerly: graphs are for up to %d", num_requests, self.sizes[-1])
            self._noted = True

    def _update(self, captured: CapturedStep, step: StepInput, batch: ForwardBatch) -> ForwardBatch:
        """Copy the batch's token fields over those of the graph, and let the backend bring its plan up to date: it is padded."""
        size, num_rows = captured.batch.num_requests, len(captured.best)
        batch, beside = self.feed.named.with_inputs(batch, step.inputs), list[Tensor]()
        if captured.accepted is not None:
            beside = [later := torch.zeros(num_rows, dtype=torch.int64), num_drafts(step, size=num_rows)]
            if step.behind:
                batch, later[: batch.num_tokens] = at_the_earliest(batch, step.behind, page_size=self.geometry.page_size)
                beside[1][size : size + step.num_items] = step.behind
        padded = pad(batch, num_requests=size, num_tokens=num_rows, geometry=self.geometry)
        sources = token_sources(step, width=self.feed.width, size=num_rows)
        seats = sampled_seats(step, size=num_rows, fill=self.feed.scratch_seat)
        self.feed.overwrite(captured.packed, [*token_fields(padded), *beside, sources, seats])
        padded = _placed(self.feed.named, padded, followed=captured.followed)
        if captured.moved is not None:
            padded = renewed(padded, kv_lens=captured.batch.kv_lens)
        assert captured.batch.plan is not None, "what is captured is planned"
        self.relay.refresh(captured.batch.plan, padded)
        return padded


def _placed(named: NamedTensors, batch: ForwardBatch, *, followed: bool) -> ForwardBatch:
    """With its named tensors where they stay; without those that a draft model takes, if none follows."""
    return named.placed(batch, leaves=() if followed else (FEATURES,))


def finds_starts(graphs: DecodeGraphs | None, step: StepInput) -> bool:
    """Whether the device finds where the items of a step that verifies begin, so that the one before need not be told first."""
    if graphs is None or step.run.way is not Way.GRAPH or step.run.size > graphs.buffers.starts.most_requests:
        return False
    return graphs.ready(step)


def _begin(graphs: DecodeGraphs, batch: ForwardBatch, packed: Tensor, moved: Tensor | None) -> None:
    """Bring the rows of a captured batch to where they begin, if they do not lie there. packed, moved: see `CapturedStep`."""
    if moved is not None:
        behind, wrong = packed[-3, len(moved) : 2 * len(moved)], graphs.feed.wrong.index_select(0, packed[-1, : len(moved)])
        move_on(batch, packed[-4], behind=behind, wrong=wrong, out=moved, most_positions=graphs.buffers.starts.most_positions)


def _keep(
    graphs: DecodeGraphs, found: HeadResults, batch: ForwardBatch, packed: Tensor, *, out: Tensor | None, standing: Standing | None
) -> None:
    """For the next step, what the requests of a captured batch go on with. out: how many drafts of each are right; None: of a batch
    without drafts."""
    if found.best is None:
        return
    seats = packed[-1, : batch.num_requests]
    if out is None:
        graphs.feed.keep(found.best, seats)
        return
    num_drafts, shape = packed[-3, : len(seats)], (batch.num_requests, batch.decode_len)
    sampled, inputs, places = (each.view(shape) for each in (found.marked, batch.input_ids, batch.positions))
    if graphs.buffers.forced is not None:
        inputs = graphs.buffers.forced.tokens(inputs, sampled, places)
    parents, depth = (None, None) if standing is None else (standing.parents, standing.depth)
    path, counts = accept(sampled, inputs, parents, num_drafts, depth=depth)
    last = right = out.copy_(counts)
    if standing is not None:
        standing.path.copy_(path)
        last = path.gather(1, right[:, None]).squeeze(1)
    begins = torch.arange(0, len(found.best), batch.decode_len, device=found.best.device)
    graphs.feed.keep(found.best.index_select(0, begins + last), seats)
    graphs.feed.wrong.index_copy_(0, seats, num_drafts - out)


def _padding_alone(feed: TokenFeed, geometry: KVGeometry, key: GraphKey) -> tuple[ForwardBatch, Tensor]:
    """A batch of so many requests that nobody made, and its token fields with what is beside them, see `CapturedStep`."""
    num_rows = key.size * key.length
    batch = feed.named.with_inputs(no_requests(geometry, key.length, trees=key.depth > 0))
    batch = pad(batch, num_requests=key.size, num_tokens=num_rows, geometry=geometry)
    nobody = torch.full((num_rows,), feed.scratch_seat)
    beside = [] if key.length == 1 else [torch.zeros(num_rows, dtype=torch.int64)] * 2
    packed = torch.stack([*token_fields(batch), *beside, torch.full((num_rows,), KNOWN), nobody]).to(feed.device)
    return with_token_fields(batch, iter(packed)), packed
