"""Running recorded steps again, on one attention backend or on two side by side, to find where they part.

Every replica starts with empty memory, is given the steps as they were recorded and the tokens that were sampled then, and runs
them eagerly. Of drafts those stand that stood then, and what a draft model guessed is as it was. What each call of attention wrote
is compared, then the logits, request by request: the largest difference over the largest value that the other wrote for the request
in this call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch

from enginery.config.schema import EngineOptions
from enginery.contracts.batch import FULL
from enginery.contracts.step import Run, StepInput
from enginery.engine.build import BuiltParts, build_parts
from enginery.engine.recording import RecordedStep, Recording
from enginery.errors import ConfigError
from enginery.plugin.registry import Registry
from enginery.schedule.one_lane import num_pages
from enginery.speculate.acceptance import accept
from enginery.worker.drafts.trees import depths_of, parents_of
from enginery.worker.layout import begins_of, sampled_seats
from enginery.worker.page_tables import PageTables
from enginery.worker.paths.path import Launched
from enginery.worker.runner import Captured, Runner

TOLERANCES: Final = {"float32": 1e-3}  # of attention and logits, as a part of the largest value
ROUNDED: Final = 0.1  # where activations have 8 or 11 bits, whose rounding adds up over the layers


class Wrote(NamedTuple):
    """What one call of attention of one layer wrote: [T, H, value dim], device."""

    layer: int
    values: torch.Tensor


class Ran(NamedTuple):
    """A step that was run again. logits: [R, V], of the rows that are sampled. path: [n, N] int64, of the items that verify, the
    rows of the tokens that are told."""

    calls: Sequence[Wrote]
    logits: torch.Tensor
    path: torch.Tensor | None


class Difference(NamedTuple):
    """How far two replicas are apart. layer: None for logits. amount: a part of the largest value; NaN where one has NaN."""

    step: int
    layer: int | None
    request_id: str
    amount: float

    def __str__(self) -> str:
        where = "the logits" if self.layer is None else f"attention of layer {self.layer}"
        return f"step {self.step}, {where}, request {self.request_id}: {self.amount:.2g} of the largest value"


class Outcome(NamedTuple):
    """What a replay found, after so many steps and calls of attention that were compared.

    parting: the first difference beyond the tolerance; nothing after it was compared. largest: of those within; None if there are
    none.
    """

    num_steps: int
    num_calls: int
    parting: Difference | None
    largest: Difference | None


class Replica:
    """One engine's worker, without a scheduler, that runs recorded steps. name: of its attention backends."""

    def __init__(self, parts: BuiltParts) -> None:
        self.name = parts.choice.attention.name
        self.dtype = parts.choice.settings.dtype
        self._runner = Runner(parts.step, tables=PageTables(parts.step.pool.geometry), captured=Captured())
        self._calls: list[Wrote] = []
        self.socket = parts.step.socket
        self.socket.on_written = lambda call: self._calls.append(Wrote(call.layer.global_id, call.out.clone()))

    @torch.inference_mode()
    def run(self, recorded: RecordedStep) -> Ran:
        """The next step. Its tokens and guesses are kept for the steps after it, and states move on."""
        self._calls = []
        step = msgspec.structs.replace(recorded.step, run=Run(greedy=recorded.step.run.greedy))
        launched = self._runner.launch(step)
        device, feed, seats = self._runner.device, self._runner.feed, sampled_seats(step)
        told = [max(recorded.token_ids[index][-1], 0) for index in step.sampling.tolist()]
        feed.keep(torch.tensor(told, dtype=torch.int64, device=device), seats.to(device))
        if recorded.guesses:
            feed.keep_drafts(torch.tensor(recorded.guesses, dtype=torch.int64, device=device), seats.to(device))
        path = self._stand(launched, recorded.token_ids[: step.num_decode]) if step.verifies else None
        return Ran(self._calls, launched.logits, path)

    def _stand(self, launched: Launched, told: Sequence[Sequence[int]]) -> torch.Tensor:
        """Keep what stands of the items that verify, by the tokens that were told of them: the rows of these, [n, N]."""
        step, batch, device = launched.step, launched.forwarded.batch, self._runner.device
        assert batch is not None, "a step that verifies keeps its batch"
        tokens, parents = batch.input_ids[: len(told) * step.decode_len].view(len(told), -1), None
        sampled = torch.full(tokens.shape, -1, dtype=torch.int64)
        depths = depths_of(step) if step.parents else np.broadcast_to(np.arange(step.decode_len), tokens.shape)
        for row, (found, each) in enumerate(zip(told, depths.tolist(), strict=True)):
            sampled[row] = torch.tensor([found[depth] if depth < len(found) else -1 for depth in each])
        if step.parents:
            parents = torch.from_numpy(parents_of(step)).to(device)
        most = torch.from_numpy(step.columns().num_drafts[: len(told)].astype(np.int64)).to(device)
        path = accept(sampled.to(device), tokens, parents, most).path
        right = torch.tensor([len(found) - 1 for found in told], device=device)
        self._runner.keep_accepted(launched, right, path)
        return path


def replay_options(
    recording: Recording, backend: str | None, *, model: str | None = None, device: str | None = None
) -> EngineOptions:
    """What a replica is built with: as recorded, but eager, in one process, and with as many pages as the steps name.

    backend, model, device: instead of the recorded ones.
    """
    head = recording.head
    pages, num_lanes = num_pages([recorded.step for recorded in recording.steps]), head.options.dp_attention
    if FULL not in pages:
        raise ConfigError("there is no step in the file to run again")
    options = dataclasses.replace(
        head.options,
        model=model or head.facts.folder,
        device=device or head.options.device,
        dtype=head.facts.dtype,
        num_pages=pages[FULL],
        max_model_len=head.facts.max_model_len,
        max_batch_requests=num_lanes * head.max_batch_requests,
        max_batch_tokens=num_lanes * head.max_batch_tokens,
        graphs=False,
        tp=1,
        pp=1,
        pp_layers=None,
        dp_attention=1,
        ep=False,
        executor="local",
        listen=None,
        rank_key_file=None,
        overlap=False,
        wait_for_kernels=True,
        record_steps=None,
        profile_steps=0,
    )
    if backend is None:
        return options
    return dataclasses.replace(options, attention_backend=backend, prefill_attention_backend=None, decode_attention_backend=None)


def build_replica(options: EngineOptions, registry: Registry, recording: Recording) -> Replica:
    """Load the model once more, for one backend, with as many pages of each kind of memory as the steps name."""
    pages = num_pages([recorded.step for recorded in recording.steps])
    return Replica(build_parts(options, registry, pages={kind: count for kind, count in pages.items() if kind != FULL}))


def compare_replicas(recording: Recording, first: Replica, second: Replica, *, tolerance: float | None = None) -> Outcome:
    """Run the steps on both until they part. tolerance: None for that of the coarser of their dtypes."""
    allowed = tolerance if tolerance is not None else max(TOLERANCES.get(made.dtype, ROUNDED) for made in (first, second))
    return _until_they_part(recording, lambda recorded: _differences(recorded, first.run(recorded), second.run(recorded)), allowed)


def compare_tokens(recording: Recording, replica: Replica, *, tolerance: float | None = None) -> Outcome:
    """Run the steps on one backend until it would have chosen another token than was recorded, where steps are greedy.

    A token whose logit is within the tolerance of the largest could have been chosen as well.
    """
    allowed = tolerance if tolerance is not None else TOLERANCES.get(replica.dtype, ROUNDED)
    return _until_they_part(recording, lambda recorded: _from_tokens(recorded, replica.run(recorded)), allowed)


def _until_they_part(recording: Recording, differences: Callable[[RecordedStep], Iterator[Difference]], allowed: float) -> Outcome:
    num_steps, num_calls, largest = 0, 0, None
    for recorded in recording.steps:
        found = list(differences(recorded))
        num_steps += bool(found)
        for difference in found:
            if not difference.amount <= allowed:  # NaN is not
                return Outcome(num_steps, num_calls, difference, largest)
            num_calls += difference.layer is not None
            if largest is None or difference.amount > largest.amount:
                largest = difference
    return Outcome(num_steps, num_calls, None, largest)


def _from_tokens(recorded: RecordedStep, ran: Ran) -> Iterator[Difference]:
    """How far the logit of each recorded token of a greedy step is below the largest."""
    step = recorded.step
    if not step.run.greedy:
        return
    for index, first in zip(step.sampling.tolist(), begins_of(step.sampled_rows).tolist(), strict=True):
        places = [0] if ran.path is None or index >= len(ran.path) else ran.path[index].tolist()
        for token, place in zip(recorded.token_ids[index], places, strict=False):
            logits = ran.logits[first + place].float()
            if token >= 0:
                amount = float((logits.max() - logits[token]) / logits.abs().max())
                yield Difference(step.number, None, recorded.request_ids[index], amount)


def _differences(recorded: RecordedStep, one: Ran, other: Ran) -> Iterator[Difference]:
    """The largest of each call of attention in turn, then of the logits. Padding behind drafts is left out."""
    step, names = recorded.step, recorded.request_ids
    items = step.columns()
    if [call.layer for call in one.calls] != [call.layer for call in other.calls]:
        raise ConfigError(f"step {step.number} calls attention of other layers with one backend than with the other")
    rows = _ranges(begins_of(step.rows), items.num_tokens)
    for mine, theirs in zip(one.calls, other.calls, strict=True):
        yield _largest(step, mine.layer, names, _apart(mine.values, theirs.values, rows))
    sampling = step.sampling.tolist()
    if sampling:
        rows = _ranges(begins_of(step.sampled_rows), 1 + items.num_drafts[step.sampling])
        yield _largest(step, None, [names[index] for index in sampling], _apart(one.logits, other.logits, rows))


def _ranges(begins: np.ndarray, counts: np.ndarray) -> list[slice]:
    return [slice(begin, begin + count) for begin, count in zip(begins.tolist(), counts.tolist(), strict=True)]


def _largest(step: StepInput, layer: int | None, names: Sequence[str], amounts: Sequence[float]) -> Difference:
    index = int(np.argmax(amounts))  # NaN counts as largest
    return Difference(step.number, layer, names[index], amounts[index])


def _apart(mine: torch.Tensor, theirs: torch.Tensor, rows: Sequence[slice]) -> list[float]:
    """Of each request's rows, the largest difference over the largest value of `theirs`; both [T, ...]."""
    theirs = theirs.to(mine.device, torch.float32)
    error = (mine.float() - theirs).flatten(1).abs().amax(1)  # [T]
    scale = theirs.flatten(1).abs().amax(1)
    return [float(error[some].max() / scale[some].max().clamp(min=torch.finfo(torch.float32).tiny)) for some in rows]
