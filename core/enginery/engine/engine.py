"""The engine: requests in, steps, outputs out. One thread drives it; processes and HTTP are `enginery.serve`'s affair."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import torch

from enginery.config.schema import EngineOptions
from enginery.contracts.engine import BuildProgress, ReportProgress, report_to_nobody
from enginery.contracts.parallel import Launch
from enginery.contracts.request import GenerationRequest, RequestOutput, check_token_ids
from enginery.contracts.step import StepInput
from enginery.engine.build import ALONE, BuiltParts, Phases, build_parts, build_runner, kv_events_of
from enginery.engine.changeover import Changeover
from enginery.engine.grammar_queue import Compilers, GrammarQueue, Vocabulary
from enginery.engine.meter import StepMeter, SteppedAt
from enginery.engine.ranks.ranks import NO_RANKS, Ranks, begun_ranks
from enginery.engine.recording import recorder_of
from enginery.engine.sampling_input import GrammarFailures, prepare_sampling, reads_pending
from enginery.engine.scheduling import scheduling_of
from enginery.errors import EngineDied, Overloaded, RequestError
from enginery.plugin.boundary import exits_as_failures
from enginery.plugin.registry import Registry, raised_in
from enginery.schedule.ahead import Ahead
from enginery.schedule.lanes import AnyScheduler
from enginery.schedule.request import Request
from enginery.speculate.drafting import Drafting
from enginery.speculate.length import HOST_LENGTHS, LENGTHS, DraftLength
from enginery.speculate.made_drafts import Made, MadeDrafts
from enginery.worker.choice import Checkpoint
from enginery.worker.paths.path import Launched
from enginery.worker.paths.running_step import Guesses, RunningStep

MAX_FAILED_STEPS: Final = 3


class _Sent(NamedTuple):
    """A step that other ranks may have begun, and this one has not."""

    step: StepInput
    requests: Sequence[Request]
    at: SteppedAt


class _InFlight(NamedTuple):
    """A step whose tokens have not come."""

    step: StepInput
    requests: Sequence[Request]
    running: RunningStep
    failures: GrammarFailures
    at: SteppedAt


class _Failure(NamedTuple):
    """What a step raised, and the requests that were given up for it."""

    error: BaseException | None
    request_ids: list[str]


class Engine:
    """Built once, then `submit`, `abort` and `step` until there is no work."""

    def __init__(self, parts: BuiltParts, registry: Registry, asked: EngineOptions, *, ranks: Ranks = NO_RANKS) -> None:
        """ranks: the others."""
        choice = parts.choice
        settings, eos_token_ids = choice.settings, choice.checkpoint.eos_token_ids
        self.facts = parts.facts()
        self._seeds = random.Random(asked.seed + asked.dp_rank)
        self._kv_events = kv_events_of(asked, parts)
        self._made = MadeDrafts(choice.draft_siblings)
        self._drafting = _drafting_of(asked, parts, registry, self._made)
        alone = self._drafting if asked.num_ranks == 1 else None  # other ranks would not take part in captures in idle moments
        self._num_guesses = (lambda _: 0) if alone is None else alone.lengths.found
        self._scheduling = scheduling_of(asked, parts, registry, watchers=self._kv_events, drafting=self._drafting)
        self._scheduler = self._scheduling.scheduler
        folder = choice.checkpoint.tokenizer_folder
        vocabulary = Vocabulary(folder=folder, vocab_size=choice.facts.vocab_size, eos_token_ids=eos_token_ids)
        self._compilers = Compilers(registry, vocabulary)
        self._grammars = GrammarQueue(self._compilers)
        self._overlap, self._ahead = int(settings.overlap), asked.pp - 1
        self._changeover = parts.changeover
        self._decisions, self._registry, self._eos_token_ids = choice.decisions, registry, eos_token_ids
        self.meter = StepMeter(
            registry,
            self._scheduler,
            self.facts,
            changeover=parts.changeover,
            trace_file=Path(asked.profile_file),
            loads=parts.loads,
            drafting=self._drafting,
        )
        if asked.profile_steps:
            self.meter.profile(asked.profile_steps)
        self._recorder = recorder_of(
            asked, self.facts, max_batch_requests=settings.max_batch_requests, max_batch_tokens=settings.max_batch_tokens
        )
        self._failure = _Failure(None, [])
        self._told: list[RequestOutput] = []
        self._sent: deque[_Sent] = deque()
        self._in_flight: deque[_InFlight] = deque()
        self._runner, self._ranks = build_runner(parts), ranks

    @classmethod
    def build(
        cls,
        asked: EngineOptions,
        registry: Registry,
        report: ReportProgress = report_to_nobody,
        *,
        forced_rates: Sequence[float] = (),
        launch: Launch | None = None,
        found: Checkpoint | None = None,
        grammars: bool = False,
    ) -> Engine:
        """Load the checkpoint and bind everything. Raises `EnginError` before anything is served.

        forced_rates: for benchmarks, how often the guess at each place is right, whatever it is; see `ForcedAcceptance`. launch:
        what starts the processes of other ranks; None: what `--executor` names. found: what `find_checkpoint` gave before.
        grammars: load what compiles them, which takes seconds for a large vocabulary; else the first request for one does.
        """
        if asked.num_ranks > 1:
            report(BuildProgress(phase="ranks"))
        with begun_ranks(asked, registry, launch) as others:
            own, place = (asked, ALONE) if others is None else (others.options, others.place)
            parts = build_parts(own, registry, report, place=place, found=found, forced_rates=forced_rates)
        engine = cls(parts, registry, asked, ranks=others or NO_RANKS)
        if grammars:
            with (phases := Phases(report))("grammars"):
                engine._compilers.load()
            engine.facts = dataclasses.replace(engine.facts, phases_s={**engine.facts.phases_s, **phases.seconds})
        return engine

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(self, request: GenerationRequest) -> None:
        """As `EngineLike` says; one without a seed gets one, by which its tokens are drawn."""
        params, vocab_size = request.params, self.facts.vocab_size
        check_token_ids("logit_bias", params.logit_bias, vocab_size=vocab_size)
        check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size=vocab_size)
        if params.seed is None:
            seeded = dataclasses.replace(params, seed=self._seeds.getrandbits(63))
            request = dataclasses.replace(request, params=seeded)
        grammar = params.grammar
        if grammar is None:
            self._scheduler.submit(request)
        else:
            self._grammars.check(grammar)
            self._scheduler.submit(request, held=True)
            self._grammars.begin(request.request_id, grammar, request.client)

    def abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)
        self._grammars.drop(request_id)

    def step(self) -> list[RequestOutput]:
        """Launch a step, and return what completed steps added.

        With overlap, the step launched now runs on the device while the one before is published: its results come one call later.
        Empty when there is nothing to do, when only prompts' chunks ran, or when the first results are yet to come.
        """
        outputs = _release_compiled(self._grammars, self._scheduler, idle=not self._in_flight)
        self._told = outputs  # one list: should a launch fail, `recover` has what came before
        step, began_s = self._next_step(outputs)
        if step.items:
            at = SteppedAt(began_s, time.perf_counter(), len(self._scheduler.preempted))
            self._sent.append(_Sent(step, self._scheduler.requests, at))
            with self._naming(step):
                self._ranks.send(step)
        if len(self._sent) > (self._ahead if step.items else 0):
            sent, requests, at = self._sent[0]
            with self._naming(sent):
                if self._in_flight and reads_pending(sent, requests):
                    outputs += self._publish_first()
                self._in_flight.append(self._sample(self._runner.launch(sent), requests, at))
                self._sent.popleft()
        if len(self._in_flight) > (_most_unread(self._in_flight, self._overlap, stages=self._ahead) if step.items else 0):
            outputs += self._publish_first()
        if not self._scheduler.has_work:
            self._scheduler.check_idle()
        for lane in self._kv_events:
            lane.publish()
        return outputs

    def recover(self, error: BaseException) -> list[RequestOutput]:
        """After `step` raised `error`: what it would have returned, and what the requests that it gave up are told.

        Raises it again where nothing can go on: outside of a step's computation, when the device is lost, where there are other
        ranks, and when `MAX_FAILED_STEPS` were given up one after the other for anything but memory.
        """
        failure, self._failure = self._failure, _Failure(None, [])
        if failure.error is not error or self._ranks is not NO_RANKS or isinstance(error, torch.AcceleratorError):
            raise error
        if self.meter.failed() >= MAX_FAILED_STEPS and not isinstance(error, torch.OutOfMemoryError):
            raise error
        parts = ", ".join(f"{made.value} of {made.source}" for made in self._decisions if made.source and made.setting != "ops")
        failed = f"failed{raised_in(error, self._registry)} with {type(error).__name__}: {error}"
        message = f"the step that the request was in {failed}; it ran {parts}"
        return [*self._told, *(RequestOutput(request_id=request_id, error=message) for request_id in failure.request_ids)]

    def flush_prefix_cache(self) -> int:
        freed, is_empty = self._scheduling.flush()
        if is_empty:
            for lane in self._kv_events:
                lane.cleared()
        return freed

    def prepare(self) -> bool:
        """Change over to better backends, capture one more graph, or compile the usual grammar, whichever is first to be done."""
        self._ranks.check()
        for lane in self._kv_events:
            lane.publish()
        if changeover := _ready(self._changeover):
            changeover.change(self._runner)
            return True
        if not (is_more := self._runner.prepare(self._num_guesses)):
            self._grammars.prepare()
        return is_more

    def close(self) -> None:
        """End what still compiles for this engine, and its other ranks."""
        self._ranks.end()
        for lane in self._kv_events:
            lane.close()
        if self._changeover is not None:
            self._changeover.stop()

    def _next_step(self, outputs: list[RequestOutput]) -> tuple[StepInput, float]:
        """What runs next, and when its scheduling began, as if nothing had been waited for.

        Of steps in flight that guess the tokens are there then; they are added to `outputs`, unless it was scheduled ahead.
        """
        changeover, ahead, began_s = _ready(self._changeover), self._scheduling.ahead, time.perf_counter()
        waits = changeover is not None
        if not waits and ahead is not None and ahead.waits():
            waits, step = True, ahead.begin(self._runner.sizes) if self._overlap else None
            if step is not None:
                return self._ahead_of_tokens(ahead, step, began_s)
        while self._in_flight and waits:
            outputs += self._publish_first()
        if changeover is not None:
            changeover.change(self._runner)
        began_s = time.perf_counter()
        return self._scheduler.next_step(self._runner.sizes), began_s

    def _ahead_of_tokens(self, ahead: Ahead, step: StepInput, began_s: float) -> tuple[StepInput, float]:
        """The step that was scheduled ahead: as it is, where the device finds where it begins, else settled."""
        graphs = self._runner.graphs
        if ahead.follows and graphs is not None and graphs.steps.finds_start(step) and graphs.ready(step):
            return step, began_s
        flight = self._in_flight[0]
        self._sent.append(_Sent(step, self._scheduler.requests, flight.at))  # to be given up too, should it fail
        with self._naming(flight.step):
            output = self._ranks.wait(flight.running)
            step = ahead.settle(output, is_launched=False)
        self._sent.clear()
        return step, began_s + output.times.arrived_s - output.times.waited_from_s

    def _sample(self, launched: Launched, requests: Sequence[Request], at: SteppedAt) -> _InFlight:
        """Have the tokens chosen of a step whose forward is on its way."""
        step, vocab_size = launched.step, self.facts.vocab_size
        _note_first_turns(requests[step.num_decode :])
        sampling, failures = prepare_sampling(step, requests, self._eos_token_ids, vocab_size=vocab_size)
        running = self._runner.sample(launched, sampling, failures.cuts)
        self._ranks.share(running)
        return _InFlight(step, requests, running, failures, at)

    def _publish_first(self) -> list[RequestOutput]:
        """Wait for the step that was launched first of those in flight, and take its tokens in."""
        step, requests, running, (refused, cuts), at = self._in_flight[0]
        with self._naming(step):
            output = self._ranks.wait(running)
        self._in_flight.popleft()
        ahead, left = self._scheduling.ahead, self._in_flight
        if ahead is not None and left and left[0].step is ahead.unsettled:  # it was launched before this one was told
            left[0] = left[0]._replace(step=ahead.settle(output, is_launched=True))
        self._ranks.landed(step)
        self.meter.arrived(step, output, at)
        if self._recorder is not None:
            self._recorder.add(step, requests, output, running.guesses)
        if self._drafting is not None:
            self._drafting.stop(requests[index] for index in cuts)
        outputs = self._scheduler.complete(step, output, refused)
        self._made.keep(None if running.guesses is None else _made_of(running.guesses, running.sampling, requests))
        if self._drafting is not None:
            self._drafting.published(step, requests, outputs)
        self.meter.completed(step, output, at)
        if step.verifies:
            self.meter.verified(outputs)
        return outputs

    @contextmanager
    def _naming(self, step: StepInput) -> Iterator[None]:
        """What fails inside is a bug of a plugin or of ours, and is raised with a note that says whose code ran; Ctrl-C has none.

        The requests of every step in flight are given up, interrupted ones too, so that the memory stays whole for a caller that
        goes on.
        """
        try:
            with exits_as_failures():
                yield
        except BaseException as error:
            steps = list(dict.fromkeys([*(lost.step for lost in self._in_flight), *(lost.step for lost in self._sent)]))
            self._in_flight.clear()
            self._sent.clear()
            given_up = self._failure.request_ids if self._failure.error is error else []
            given_up += [request.request_id for lost in steps for request in self._scheduler.fail(lost)]
            self._runner.tables.next_number = self._scheduler.next_number  # what has not come is given up
            self._failure = _Failure(error, given_up)
            used = "; ".join(f"{setting} {value} ({reason})" for setting, value, reason in self.facts.decisions)
            during = f"in step {self.meter.num_steps} with {step.num_items} requests and {step.num_tokens} tokens, running {used}"
            if isinstance(error, Exception) and not isinstance(error, EngineDied):  # raised again for each step that cannot run
                error.add_note(_place(raised_in(error, self._registry), during))
            self._ranks.failed(error)
            raise


def _place(where: str, during: str) -> str:
    return f"raised{where}\n{during}" if where else during


def _release_compiled(grammars: GrammarQueue, scheduler: AnyScheduler, *, idle: bool) -> list[RequestOutput]:
    """Let the requests run whose grammars are there, and refuse those whose are not to be had. idle: nothing is in flight."""
    answers = []
    num_others = scheduler.num_running + scheduler.num_waiting - grammars.num_waiting
    for request_id, found in grammars.settled(idle=idle and not num_others):
        if isinstance(found, RequestError):
            scheduler.abort(request_id)
            is_late = isinstance(found, Overloaded)
            answers.append(
                RequestOutput(request_id=request_id, error=str(found), param=found.param, is_answer=True, is_overload=is_late)
            )
        else:
            scheduler.release(request_id, found)
            answers.append(RequestOutput(request_id=request_id, is_answer=True))
    return answers


def _most_unread(in_flight: Sequence[_InFlight], overlap: int, *, stages: int) -> int:
    """How many launched steps are not waited for before the next one. stages: before the last.

    Between stages one more, where the first samples nothing: they would have nothing to run from its end until the host has made
    another step and sent it.
    """
    return overlap + bool(stages and in_flight and not len(in_flight[0].step.sampling))


def _drafting_of(asked: EngineOptions, parts: BuiltParts, registry: Registry, made: MadeDrafts) -> Drafting | None:
    """Who is asked for guesses: a drafter of the host, or for what a draft model has made."""
    offer, most, vocab_size = parts.choice.drafter, parts.choice.draft_length, parts.choice.facts.vocab_size
    if offer is None:
        return None
    fixed = None if asked.draft_length == "auto" else most
    settings = parts.choice.settings
    most_rows = min(settings.max_batch_requests, settings.max_batch_tokens)
    siblings, device = parts.choice.draft_siblings, parts.choice.device.type
    lengths = HOST_LENGTHS if parts.draft_model is None else LENGTHS
    length = DraftLength(most, fixed=fixed, device=device, most_rows=most_rows, siblings=siblings, lengths=lengths)
    if parts.draft_model is None:
        return Drafting.of_host(offer, registry, length=length, vocab_size=vocab_size)
    return Drafting(made, offer, length=length, vocab_size=vocab_size, on_device=not parts.draft_model.knows_lengths)


def _made_of(guesses: Guesses, sampling: Sequence[int], requests: Sequence[Request]) -> Made:
    """What follows each request that was sampled. sampling: their items."""
    sampled = (requests[index] for index in sampling)
    places = {request.request_id: (len(request.token_ids), place) for place, request in enumerate(sampled)}
    return Made(places, guesses.tokens.shape[1], guesses.of, is_read=guesses.ready is None)


def _ready(changeover: Changeover | None) -> Changeover | None:
    """The changeover, if its backends are built and can be changed to now."""
    return changeover if changeover is not None and changeover.is_ready else None


def _note_first_turns(requests: Sequence[Request]) -> None:
    """How long each request had waited when its first chunk was scheduled."""
    now_s = time.monotonic()
    for request in requests:
        if request.queued_s is None:
            request.queued_s = max(now_s - request.arrival_s, 0.0)
