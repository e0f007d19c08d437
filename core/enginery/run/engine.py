"""The engine: requests in, steps, outputs out. One thread drives it; processes and HTTP are `enginery.serve`'s affair."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enginery.config.schema import EngineOptions, ScheduleSettings
from enginery.contracts.engine import EngineFacts
from enginery.contracts.request import GenerationRequest, RequestOutput, TokenLogprob, check_token_ids
from enginery.contracts.schedule import StepReport
from enginery.memory.pages import PageAllocator
from enginery.memory.prefix import NoPrefixCache, RadixPrefixCache
from enginery.plugin.registry import Registry
from enginery.run.build import BuiltParts, build_parts
from enginery.run.runner import LaunchedStep, Runner, StepResult
from enginery.run.sampling import reads_tokens
from enginery.run.step_trace import StepTrace
from enginery.schedule.scheduler import Scheduler
from enginery.schedule.step import ScheduledStep


class Engine:
    """Built once, then `submit`, `abort` and `step` until there is no work."""

    def __init__(self, parts: BuiltParts, registry: Registry, asked: EngineOptions) -> None:
        choice, memory = parts.choice, parts.memory
        settings = choice.settings
        eos_token_ids = choice.checkpoint.eos_token_ids
        self.facts = _facts(parts)
        self._registry = registry
        self._seeds = random.Random(asked.seed)
        self._num_steps = 0
        self._prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}
        allocator = PageAllocator(memory.num_pages)
        cache = RadixPrefixCache(memory.page_size, allocator) if settings.prefix_cache else NoPrefixCache()
        self._scheduler = Scheduler(
            ScheduleSettings(
                page_size=asked.page_size,
                num_pages=memory.num_pages,
                max_model_len=settings.max_model_len,
                max_batch_tokens=settings.max_batch_tokens,
                max_batch_requests=settings.max_batch_requests,
                max_queued_requests=asked.max_queued_requests,
                prefix_cache=settings.prefix_cache,
            ),
            registry.schedule_policy(asked.schedule_policy).spec,
            cache=cache,
            allocator=allocator,
            eos_token_ids=eos_token_ids,
        )
        self._overlap = int(settings.overlap)
        self._trace = StepTrace(asked.profile_steps, Path(asked.profile_file)) if asked.profile_steps else None
        self._in_flight: deque[LaunchedStep] = deque()
        self._runner = Runner(
            parts.model,
            parts.relay,
            ops=parts.ops,
            page_size=asked.page_size,
            feed=parts.feed,
            graphs=parts.graphs,
            eos_token_ids=eos_token_ids,
        )

    @classmethod
    def build(cls, asked: EngineOptions, registry: Registry) -> Engine:
        """Load the checkpoint and bind everything. Raises `EnginError` before anything is served."""
        return cls(build_parts(asked, registry), registry, asked)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return self._scheduler.has_work

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises `RequestError` for one that can never be served, `QueueFull` for one too many."""
        self._check_token_ids(request)
        if request.params.seed is None:
            seeded = dataclasses.replace(request.params, seed=self._seeds.getrandbits(63))
            request = dataclasses.replace(request, params=seeded)
        self._scheduler.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request at whatever stage it is; unknown and finished ones are ignored. Nothing more comes of it."""
        self._scheduler.abort(request_id)
        self._prompt_logprobs.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        """Launch a step, and return what completed steps added.

        With overlap, the step launched now runs on the device while the one before is published: its results come one call later.
        Empty when there is nothing to do, when only prompts' chunks ran, or when the first results are yet to come.
        """
        outputs: list[RequestOutput] = []
        began = time.perf_counter()
        step = self._scheduler.next_step()
        if step.items:
            if any(item.input_pending and reads_tokens(item.request.asked.params) for item in step.items):
                outputs += self._publish_first()
            self._in_flight.append(self._launch(step, began_s=began))
        if len(self._in_flight) > (self._overlap if step.items else 0):
            outputs += self._publish_first()
        if not self._scheduler.has_work:
            self._scheduler.check_idle()
        return outputs

    def prepare(self) -> bool:
        """Use a moment without work: capture one more decoding step. Says whether there was something to do."""
        graphs = self._runner.graphs
        if graphs is None or not (waiting := graphs.waiting):
            return False
        graphs.capture(waiting[0])
        return True

    def _launch(self, step: ScheduledStep, *, began_s: float) -> LaunchedStep:
        with self._naming(step):
            return self._runner.launch(step, began_s=began_s)

    def _publish_first(self) -> list[RequestOutput]:
        """Wait for the step that was launched first of those in flight, and take its tokens in."""
        launched, waited_from = self._in_flight[0], time.perf_counter()
        with self._naming(launched.step):
            result = launched.wait()
        self._in_flight.popleft()
        if self._trace is not None:
            self._trace.add(launched, waited_from_s=waited_from)
        outputs = self._publish(launched.step, result)
        if self._registry.observers:
            schedule_s = launched.times.scheduled_s - launched.times.began_s
            self._registry.observe_step(self._report(launched.step, result, schedule_s=schedule_s))
        self._num_steps += 1
        return outputs

    @contextmanager
    def _naming(self, step: ScheduledStep) -> Iterator[None]:
        """What fails inside is a bug of a plugin or of ours, and is raised with a note that says whose code ran.

        The requests of every step in flight are given up, interrupted ones too, so that the memory stays whole for a caller that
        goes on.
        """
        try:
            yield
        except BaseException as error:
            failed = [launched.step for launched in self._in_flight]
            self._in_flight.clear()
            for given_up in failed if step in failed else [*failed, step]:
                self._scheduler.fail(given_up)
            used = "; ".join(f"{setting} {value} {reason}" for setting, value, reason in self.facts.decisions)
            error.add_note(
                f"in step {self._num_steps} with {len(step.items)} requests and {step.num_tokens} tokens, running {used}"
            )
            raise

    def _check_token_ids(self, request: GenerationRequest) -> None:
        check_token_ids("prompt", request.prompt_token_ids, vocab_size=self.facts.vocab_size)
        check_token_ids("logit_bias", request.params.logit_bias, vocab_size=self.facts.vocab_size)
        check_token_ids("stop_token_ids", request.params.stop_token_ids, vocab_size=self.facts.vocab_size)

    def _publish(self, step: ScheduledStep, result: StepResult) -> list[RequestOutput]:
        for item, reported in zip(step.items, result.prompt_logprobs, strict=True):
            if item.request.wants_prompt_logits:
                collected = [None] if item.start == 0 else self._prompt_logprobs[item.request.request_id]
                self._prompt_logprobs[item.request.request_id] = [*collected, *reported]
        logprobs = {item.request.request_id: logprob for item, logprob in zip(step.items, result.logprobs, strict=True)}
        outputs = []
        for update in self._scheduler.complete(step, result.token_ids):
            request = update.request
            if update.token_id is None and update.finish_reason is None:
                continue
            logprob = logprobs[request.request_id]
            prompt = self._prompt_logprobs.pop(request.request_id, None)
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    token_ids=() if update.token_id is None else (update.token_id,),
                    logprobs=None if logprob is None else (logprob,),
                    prompt_logprobs=None if prompt is None else tuple(prompt),
                    finish_reason=update.finish_reason,
                    stop_token_id=update.stop_token_id,
                    num_cached_tokens=request.num_cached_tokens,
                )
            )
        return outputs

    def _report(self, step: ScheduledStep, result: StepResult, *, schedule_s: float) -> StepReport:
        scheduler = self._scheduler
        return StepReport(
            step=self._num_steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_tokens=sum(item.num_tokens for item in step.items),
            num_prefill_tokens=step.num_prefill_tokens,
            num_preempted=len(step.preempted),
            free_pages=scheduler.free_pages,
            cached_pages=scheduler.cached_pages,
            total_pages=self.facts.num_pages,
            attn_backend=self.facts.attn_backend,
            captured=result.captured,
            schedule_s=schedule_s,
            plan_s=result.plan_s,
            run_s=result.run_s,
        )


def _facts(parts: BuiltParts) -> EngineFacts:
    choice, memory = parts.choice, parts.memory
    return EngineFacts(
        model_name=choice.checkpoint.name,
        folder=str(choice.checkpoint.folder),
        note=choice.checkpoint.note,
        max_model_len=choice.settings.max_model_len,
        vocab_size=choice.facts.vocab_size,
        dtype=choice.settings.dtype,
        attn_backend=choice.attention.name,
        num_pages=memory.num_pages,
        page_size=memory.page_size,
        eos_token_ids=tuple(sorted(choice.checkpoint.eos_token_ids)),
        decisions=tuple((decision.setting, decision.value, decision.reason) for decision in choice.decisions),
        memory_plan=str(memory),
        phases_s=dict(parts.phases_s),
    )
