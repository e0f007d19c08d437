"""Decoding steps as CUDA graphs: one per batch size, captured when first needed or in idle moments, replayed for fewer requests.

    host      pad to a captured size, copy the token fields over those of the graph, let the backend refresh its captured plan
    device    [ fill pending ids | device_prologue | model | logits | best tokens, kept ]      one launch

A graph's token fields are one tensor, made from the axes of the batch; everything else that it reads belongs to the backend or the
model. The logits of all sizes are in one buffer. The best tokens are kept for the next step; what is sampled otherwise, from the
logits, is kept in their place. Prefills, mixed steps and larger batches run eagerly, or as piecewise graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from enginery.attention.axes import pad, token_fields
from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, STATE, WINDOW, ForwardBatch, MemoryKind, Phase, StateView, View
from enginery.contracts.model import Model
from enginery.contracts.ops import OpTable
from enginery.contracts.step import StepInput
from enginery.worker.layout import KNOWN, sampled_seats, token_sources
from enginery.worker.paths.path import Forwarded
from enginery.worker.paths.results import ModelResults
from enginery.worker.sampling import mark_nan
from enginery.worker.token_feed import TokenFeed

_log: Final = logging.getLogger(__name__)


class Replayable(Protocol):
    """A captured piece of device work."""

    def replay(self) -> None:
        """Launch the captured work again, on the current stream."""
        ...


Capture = Callable[[Callable[[], None]], Replayable]


class CudaCapture:
    """Captures into one memory pool, which all graphs share because they run one after the other.

    On one stream, because cuBLAS keeps a workspace for each.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], None]) -> Replayable:
        """`run` is called twice: the first time, not captured, kernels may compile and libraries make their plans."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            run()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            run()
        return graph


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedStep:
    """packed: [fields + 2, size] int64, device: the token fields, the sources, and the seats of what is sampled.

    batch: planned, its token fields in `packed`. logits: [size, V], best: [size] int64, the tokens of the largest ones, `NAN_TOKEN`
    where these are NaN; both valid from a replay to the next one of any size.
    """

    packed: torch.Tensor
    batch: ForwardBatch
    graph: Replayable
    logits: torch.Tensor
    best: torch.Tensor

    @property
    def seats(self) -> torch.Tensor:
        """Where the next step finds what this one samples: [size] int64, device."""
        return self.packed[-1]


def graph_sizes(max_requests: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 up to 64, 16 up to 256, 32 beyond: padding costs an eighth at most where batches are large."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_requests, 32)]
    return (*(size for size in sizes if size < max_requests), max_requests)


class DecodeGraphs:
    """Implements `ForwardPath` for decoding steps whose hidden states nobody asks for."""

    captured = True

    def __init__(
        self,
        model: Model,
        relay: BackendRelay,
        *,
        ops: OpTable,
        feed: TokenFeed,
        geometry: KVGeometry,
        capture: Capture,
        logits: torch.Tensor,
        results: ModelResults,
    ) -> None:
        """logits: [largest size, V], where all graphs write theirs."""
        self.model = model
        self.relay = relay
        self.results = results
        self.ops = ops
        self.feed = feed
        self.geometry = geometry
        self.logits = logits
        self.best = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        self.sizes = graph_sizes(len(logits))
        self._noted = False
        self._capture = capture
        self._captured: dict[int, CapturedStep] = {}

    @classmethod
    def build(
        cls,
        model: Model,
        relay: BackendRelay,
        *,
        ops: OpTable,
        feed: TokenFeed,
        geometry: KVGeometry,
        capture: Capture,
        logits: torch.Tensor,
        results: ModelResults,
    ) -> DecodeGraphs | None:
        """With the largest graph: the others fit into its memory. None, with the reason in the log, without `init_graph_state`."""
        if relay.ask("init_graph_state", max_batch_size=len(logits), max_num_tokens=len(logits)) is None:
            _log.info("decoding runs eagerly: %s has no init_graph_state", relay.backend_id)
            return None
        graphs = cls(model, relay, ops=ops, feed=feed, geometry=geometry, capture=capture, logits=logits, results=results)
        graphs.capture(graphs.sizes[-1])
        return graphs

    def over(self, relay: BackendRelay) -> DecodeGraphs | None:
        """Graphs of the same sizes of another backend, in the memory of these, which are given up."""
        self._captured.clear()
        return DecodeGraphs.build(
            self.model,
            relay,
            ops=self.ops,
            feed=self.feed,
            geometry=self.geometry,
            capture=self._capture,
            logits=self.logits,
            results=self.results,
        )

    @property
    def waiting(self) -> list[int]:
        """Sizes without a graph, the smallest first."""
        return [size for size in self.sizes if size not in self._captured]

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Capture the graph of one size. Takes as long as two or three eager steps."""
        batch = pad(
            self.feed.named.with_inputs(no_requests(self.geometry)), num_requests=size, num_tokens=size, geometry=self.geometry
        )
        nobody = torch.full((size,), self.feed.scratch_seat)
        packed = torch.stack([*token_fields(batch), torch.full((size,), KNOWN), nobody]).to(self.feed.device)
        batch = self.relay.plan(self.feed.named.placed(self.feed.unpack(batch, packed)), capture=True)

        def run() -> None:
            self.feed.fill(batch.input_ids, packed[-2], out=batch.input_ids)
            self.relay.ask("device_prologue", plan=batch.plan)
            hidden = self.results.hidden(self.model.forward(batch), batch)
            logits = self.logits[:size].copy_(self.results.logits(self.model.logits(hidden), hidden))
            best = self.ops.greedy(logits)
            self.feed.keep(best, packed[-1])
            self.best[:size].copy_(mark_nan(logits, best))

        graph = self._capture(run)
        self._captured[size] = CapturedStep(
            packed=packed, batch=batch, graph=graph, logits=self.logits[:size], best=self.best[:size]
        )
        _log.debug("captured a decoding step of %d requests", size)

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """Replay the graph of the step's size, which is captured first if it is not yet."""
        if step.run.size not in self._captured:
            self.capture(step.run.size)
        captured = self._captured[step.run.size]
        self._update(captured, step, batch)
        planned_s = time.perf_counter()
        captured.graph.replay()
        return Forwarded(logits=captured.logits, planned_s=planned_s, greedy=captured.best, seats=captured.seats)

    def note_too_large(self, num_requests: int) -> None:
        """Say once that so many are decoded eagerly."""
        if not self._noted:
            _log.warning("%d requests are decoded eagerly: graphs are for up to %d", num_requests, self.sizes[-1])
            self._noted = True

    def _update(self, captured: CapturedStep, step: StepInput, batch: ForwardBatch) -> None:
        """Copy the batch's token fields over those of the graph, and let the backend bring its plan up to date."""
        size = len(captured.best)
        padded = pad(self.feed.named.with_inputs(batch, step.inputs), num_requests=size, num_tokens=size, geometry=self.geometry)
        sources, seats = token_sources(step, size=size), sampled_seats(step, size=size, fill=self.feed.scratch_seat)
        self.feed.overwrite(captured.packed, torch.stack([*token_fields(padded), sources, seats]))
        padded = self.feed.named.placed(padded)
        assert captured.batch.plan is not None, "what is captured is planned"
        self.relay.refresh(captured.batch.plan, padded)


def no_requests(geometry: KVGeometry) -> ForwardBatch:
    """A decoding batch to be padded, on the host, with a view of each kind of memory."""
    tokens, requests = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    nothing = torch.empty(0, 1, dtype=torch.int32)
    views: dict[MemoryKind, View | StateView] = {FULL: View(slots=tokens, page_table_cpu=nothing)}
    if WINDOW in geometry.pages:
        views[WINDOW] = View(slots=tokens, page_table_cpu=nothing, starts_cpu=requests)
    views[STATE] = StateView(reads_cpu=requests, writes_cpu=requests)
    return ForwardBatch(
        phase=Phase.DECODE,
        input_ids=tokens,
        positions=tokens,
        q_lens_cpu=requests,
        kv_lens_cpu=requests,
        num_logits_cpu=requests,
        seats_cpu=requests,
        views=views,
    )
