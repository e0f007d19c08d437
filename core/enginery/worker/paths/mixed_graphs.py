"""Prefills and mixed steps of few tokens as CUDA graphs: whole ones, or pieces between attention calls, which run eagerly.

    graph      embed .. qkv, rotary, KV write    output projection, MLP .. the next layer's KV write    ..
    eager                                    attend                                                  attend

Launching such a step eagerly takes the host longer than the step takes the device. What its rows go through does not depend on
whose they are, so it is captured for a few numbers of rows, and fewer are padded. Attention's plans differ from step to step. A
backend with `init_mixed_graph_state` makes one that serves all steps of so many rows, and is captured too: one graph a step. Else,
and for the batches that it has no room for, attention is called for the batch as it is, between the graphs. A model calls backends
through a `LayerSocket`, where one graph ends and the next begins.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Final, NamedTuple

import torch

from enginery.attention.axes import pad, renewed, token_fields, with_token_fields
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.step import StepInput
from enginery.errors import Unsupported
from enginery.worker.drafts.trees import write_masks
from enginery.worker.layout import KNOWN, no_requests, token_sources
from enginery.worker.paths.captured_step import Capture, NumGuesses
from enginery.worker.paths.path import Forwarded, hidden_states, rows_with_logits
from enginery.worker.paths.piecewise_capture import GraphPieces, PiecewiseCapture
from enginery.worker.paths.results import StepParts

_log: Final = logging.getLogger(__name__)
_LOADS: Final = (1, 4, 16, 64)  # requests, each of which begins with as many guesses as pay for so many
MOST_KEYS: Final = 8192  # of a prompt; attention of more takes the device longer than its launches take the host
MOST_ABSORBED: Final = 2048  # likewise of layers with latents


class MixedKey(NamedTuple):
    """Of what is captured: rows, and whether attention is, with how many rows of each request that decodes."""

    size: int
    whole: bool
    length: int = 1


class _Captured(NamedTuple):
    """packed: token fields and sources, [fields + 1, size] int64, device. batch: without requests; planned if that is captured."""

    packed: torch.Tensor
    pieces: GraphPieces
    batch: ForwardBatch


class MixedGraphs:
    """Implements `ForwardPath` for prefills and mixed steps. Captures a size when it is first needed, or in idle moments."""

    def __init__(
        self,
        parts: StepParts,
        hidden: torch.Tensor,
        *,
        capture: PiecewiseCapture,
        whole: Capture | None = None,
        most_requests: int = 0,
        in_pieces_too: bool = False,
    ) -> None:
        """Captures the largest size: the others fit into its memory. hidden: [largest size, C], where all graphs write theirs.
        whole: captures steps with their attention, of up to so many requests, where backends can be. in_pieces_too: some steps run
        in pieces anyway: they verify guesses that branch, or prompts are long."""
        self._parts, self.model, self.socket, self.feed, self.results = parts, parts.model, parts.socket, parts.feed, parts.results
        self.geometry, self.hidden, self._most_keys = parts.pool.geometry, hidden, most_keys(parts.pool.geometry)
        self.sizes, self._capture_pieces, self._most_requests = piece_sizes(len(hidden)), capture, most_requests
        self._whole, self._in_pieces_too = whole, in_pieces_too
        self._captured: dict[MixedKey, _Captured] = {}
        self._refused: set[int] = set()  # numbers of rows of a request that decodes
        self._too_large: set[MixedKey] = set()  # there was no memory for these when they were needed
        self.backend_changed()

    def backend_changed(self) -> None:
        """Capture the largest size as the backend can be. Of one before, only pieces stay: they have nothing of it."""
        most_rows = len(self.hidden)
        done = self._whole and self._parts.relay.ask(
            "init_mixed_graph_state", max_batch_size=self._most_requests, max_num_tokens=most_rows
        )
        self._capture_whole = self._whole if done else None
        self._kinds = (False,) if not done else (True, False) if self._in_pieces_too else (True,)
        self._captured = {key: captured for key, captured in self._captured.items() if not key.whole}
        self._refused.clear()
        self._too_large.clear()
        self.provide(MixedKey(self.sizes[-1], self._kinds[0]))

    def waiting(self, num_guesses: NumGuesses | None = None) -> list[MixedKey]:
        """What loads begin with that is not captured, the smallest first. num_guesses: of requests that verify in a chain."""
        guesses = [0] if num_guesses is None else sorted({0, *map(num_guesses, _LOADS)})
        lengths = {True: [1 + count for count in guesses if 1 + count not in self._refused], False: [1]}
        keys = [MixedKey(size, whole, length) for whole in self._kinds for length in lengths[whole] for size in self.sizes]
        return [key for key in keys if key not in self._captured and key not in self._too_large]

    def prepare(self, num_guesses: NumGuesses, *, siblings: int) -> bool:
        """Capture one more of these; False: all are there. siblings: beside each guess; steps that verify those run in pieces."""
        for key in self.waiting(None if siblings else num_guesses):
            with contextlib.suppress(Unsupported):
                return self.provide(key) is not None
        return False

    @torch.inference_mode()
    def provide(self, key: MixedKey) -> _Captured:
        """What is captured, now if it was not yet, for as long as two or three eager steps. Raises `Unsupported` if backends do."""
        if key in self._captured:
            return self._captured[key]
        batch = self.feed.named.with_inputs(no_requests(self.geometry, key.length))
        batch = pad(batch, num_requests=0, num_tokens=key.size, geometry=self.geometry)
        packed = torch.stack([*token_fields(batch), torch.full((key.size,), KNOWN)]).to(self.feed.device)
        batch = self.feed.named.placed(with_token_fields(batch, iter(packed)))
        if key.whole:
            try:
                batch = self._parts.relay.plan(renewed(batch, phase=Phase.MIXED), capture=True)
            except Unsupported:
                self._refused.add(key.length)
                raise

        def run() -> None:
            self.feed.fill(batch.input_ids, packed[-1], out=batch.input_ids)
            if key.whole:
                self._parts.relay.ask("device_prologue", plan=batch.plan)
            self.hidden[: key.size].copy_(self.results.hidden(self.model.forward(batch), batch))

        if key.whole and self._capture_whole is not None:
            pieces = GraphPieces([self._capture_whole(run)], [])
        else:
            pieces = self._capture_pieces(run, self.socket)
        _log.debug("captured a step of %d tokens in %d pieces", key.size, len(pieces.graphs))
        return self._captured.setdefault(key, _Captured(packed, pieces, batch))

    def forward(self, step: StepInput, batch: ForwardBatch) -> Forwarded:
        """Replay what the step's size has: one graph, or pieces around attention; they are captured first if they are not yet.

        Raises `Unsupported` for a size that there was no memory for: all of its steps have to run eagerly.
        """
        if self._capture_whole is not None and self._may_be_whole(step, batch):
            try:
                return self._replay(self._needed(MixedKey(step.run.size, True, step.decode_len)), step, batch)
            except Unsupported as error:
                _log.debug("attention runs between graphs: %s", error)
        return self._replay(self._needed(MixedKey(step.run.size, whole=False)), step, batch)

    def _needed(self, key: MixedKey) -> _Captured:
        """As `provide`. What there is no memory for is tried once."""
        if key in self._too_large:
            raise Unsupported(f"there was no memory to capture steps of {key.size} tokens")
        try:
            return self.provide(key)
        except torch.OutOfMemoryError as error:
            if self._parts.joined is not None:  # others have captured it
                raise
            how = "with their attention between graphs" if key.whole else "eagerly"
            _log.warning("steps of %d tokens run %s from now on: %s", key.size, how, error)
            self._too_large.add(key)
            raise Unsupported(str(error)) from error

    def _may_be_whole(self, step: StepInput, batch: ForwardBatch) -> bool:
        prompts = batch.kv_lens_cpu.numpy()[step.num_decode :]
        in_chains = not step.parents and step.decode_len not in self._refused
        return in_chains and batch.num_requests <= self._most_requests and int(prompts.max(initial=0)) <= self._most_keys

    def _replay(self, captured: _Captured, step: StepInput, batch: ForwardBatch) -> Forwarded:
        relay, (first, *others), plan = self._parts.relay, captured.pieces.graphs, captured.batch.plan
        batch, padded = self._upload(step, batch, captured.packed)
        if plan is not None:
            relay.refresh(plan, renewed(padded, phase=Phase.MIXED))
        else:
            batch = relay.plan(batch)
            write_masks(step, batch, relay)
        planned_s = time.perf_counter()
        rows = rows_with_logits(batch, self.feed.device)
        first.replay()
        for call, graph in zip(captured.pieces.calls, others, strict=True):
            self.socket.run(call, batch)
            graph.replay()
        hidden = self.hidden[: batch.num_tokens]
        forwarded = hidden_states(step, batch, hidden, rows=rows, planned_s=planned_s)
        return forwarded._replace(in_graphs=True, batch=batch, hidden=hidden)

    def _upload(self, step: StepInput, batch: ForwardBatch, packed: torch.Tensor) -> tuple[ForwardBatch, ForwardBatch]:
        """Copy the batch's token fields to the graphs, which fill in pending ids. Returns it with its fields there, and padded."""
        size, count = packed.shape[1], batch.num_tokens
        batch = self.feed.named.with_inputs(batch, step.inputs)
        padded = pad(batch, num_requests=batch.num_requests, num_tokens=size, geometry=self.geometry)
        self.feed.overwrite(packed, [*token_fields(padded), token_sources(step, width=self.feed.width, size=size)])
        padded = self.feed.named.placed(padded)  # copies the inputs to where the graphs read them
        return with_token_fields(batch, iter(packed[:, :count])), padded


def most_keys(geometry: KVGeometry) -> int:
    """Of a prompt in a step that is captured with its attention."""
    return MOST_ABSORBED if any(layer.latent is not None for layer in geometry.layers) else MOST_KEYS


def piece_sizes(max_tokens: int) -> tuple[int, ...]:
    """Multiples of 128, by which products are tiled, of 64 where that is faster than the next of them (H200); and the largest."""
    faster = (64, 192, 320, 576)
    return (*(size for size in sorted((*faster, *range(128, max_tokens, 128))) if size < max_tokens), max_tokens)
