"""What is measured about steps: running totals, the plugins that observe, and the trace that was asked for."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from enginery.contracts.engine import STEP_SIZES, DraftCounts, EngineFacts, EngineStats, ExpertCounts, KernelState
from enginery.contracts.request import RequestOutput
from enginery.contracts.schedule import StepReport
from enginery.contracts.step import StepInput, StepOutput, StepTimes
from enginery.engine.changeover import Changeover
from enginery.nn.expert_loads import ExpertLoads
from enginery.plugin.registry import Registry
from enginery.schedule.lanes import AnyScheduler
from enginery.speculate.drafting import Drafting

log = logging.getLogger(__name__)

_PARTS: Final = ("schedule", "build", "plan", "launch")  # of a step on the host
_ENOUGH_VERIFICATIONS: Final = 256
_USEFUL: Final = 1.1  # tokens a verification; a draft model that lacks weights, or was made for another target, is near 1


class SteppedAt(NamedTuple):
    """When a step's scheduling began and ended, by `time.perf_counter`, and how many requests it made wait again."""

    began_s: float
    scheduled_s: float
    num_preempted: int


class StepTrace:
    """Collects `num_steps` steps, then writes them to `path`, once: for chrome://tracing or ui.perfetto.dev.

    Each event is JSON when it is kept: that of thousands at once would hold up the step that comes last.
    """

    def __init__(self, num_steps: int, path: Path) -> None:
        self.path = path
        self._missing = num_steps
        self._events: list[bytes] = []

    def add(self, step: StepInput, times: StepTimes, *, began_s: float, scheduled_s: float) -> None:
        if not self._missing:
            return
        edges = [began_s, scheduled_s, times.laid_out_s, times.planned_s, times.launched_s]
        said = {"requests": step.num_items, "tokens": step.num_tokens, "decoding": step.num_decode}
        spans = [*zip(_PARTS, edges[:-1], edges[1:], strict=True), ("wait", times.waited_from_s, times.arrived_s)]
        for name, start_s, end_s in spans:
            in_us = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
            event = {"name": name, "ph": "X", "pid": 0, "tid": 0, "args": said, **in_us}
            self._events.append(msgspec.json.encode(event))
        self._missing -= 1
        if not self._missing:
            try:
                self.path.write_bytes(b'{"displayTimeUnit":"ms","traceEvents":[' + b",".join(self._events) + b"]}")
                log.warning("the trace of %d steps is in %s", len(self._events) // (len(_PARTS) + 1), self.path)
            except OSError as error:
                log.warning("there is no trace, as %s cannot be written: %s", self.path, error.strerror)
            self._events.clear()


class StepMeter:
    """Told of every step once. changeover: None if the chosen attention backends run from the start.

    trace_file: where traces are written. loads: of experts, where ranks have some each.
    """

    def __init__(
        self,
        registry: Registry,
        scheduler: AnyScheduler,
        facts: EngineFacts,
        *,
        changeover: Changeover | None,
        trace_file: Path,
        loads: ExpertLoads | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self._registry, self._scheduler, self._facts, self._drafting = registry, scheduler, facts, drafting
        self._changeover, self._trace_file, self._loads = changeover, trace_file, loads
        self._trace: StepTrace | None = None
        self._steps_by_backend: Counter[str] = Counter()
        self.num_steps = self._num_graph_steps = self._num_failed_steps = self._failed_in_a_row = 0
        self._num_tokens = self._num_preempted = self._num_nan = 0
        self._verifications = self._told = self._drafted = 0
        self._has_warned = False
        self._by_accepted: Counter[int] = Counter()  # verifications
        self._steps_by_size = [0] * (len(STEP_SIZES) + 1)
        self._host_s = self._plan_s = self._run_s = 0.0

    def arrived(self, step: StepInput, output: StepOutput, at: SteppedAt) -> None:
        """The step's tokens have come."""
        if self._trace is not None:
            self._trace.add(step, output.times, began_s=at.began_s, scheduled_s=at.scheduled_s)

    def completed(self, step: StepInput, output: StepOutput, at: SteppedAt) -> None:
        """The scheduler has taken the step's tokens in."""
        times, num_tokens = output.times, step.num_tokens
        if self._registry.observers:
            scheduler, pages = self._scheduler, self._scheduler.pages
            report = StepReport(
                step=self.num_steps,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_tokens=num_tokens,
                num_prefill_tokens=num_tokens - int(step.columns().num_tokens[: step.num_decode].sum()),
                num_preempted=at.num_preempted,
                free_pages=sum(counts.free for counts in pages.values()),
                cached_pages=sum(counts.cached for counts in pages.values()),
                total_pages=sum(counts.total for counts in pages.values()),
                pages=pages,
                attn_backend=self._attn_backend,
                captured=output.captured,
                schedule_s=at.scheduled_s - at.began_s,
                plan_s=times.planned_s - at.scheduled_s,
                run_s=times.arrived_s - times.planned_s,
            )
            self._registry.observers.report(report)
        self.num_steps += 1
        self._failed_in_a_row = 0
        self._steps_by_backend[self._attn_backend] += 1
        self._num_graph_steps += output.captured
        self._num_tokens += num_tokens
        self._num_preempted += at.num_preempted
        self._num_nan += len(output.failed)
        self._steps_by_size[bisect_left(STEP_SIZES, num_tokens)] += 1
        self._host_s += times.launched_s - at.began_s
        self._plan_s += times.planned_s - at.scheduled_s
        self._run_s += times.arrived_s - times.planned_s

    def verified(self, outputs: Sequence[RequestOutput]) -> None:
        """What a step that verified drafts has told."""
        drafted = [output for output in outputs if output.num_drafted]
        self._verifications += len(drafted)
        self._told += sum(len(output.token_ids) for output in drafted)
        self._drafted += sum(output.num_drafted for output in drafted)
        self._by_accepted.update(output.num_accepted for output in drafted)
        if self._verifications >= _ENOUGH_VERIFICATIONS and not self._has_warned and self._told < _USEFUL * self._verifications:
            self._has_warned, told, most = True, self._told / self._verifications, 1 + self._drafted / self._verifications
            log.warning(
                "guesses are seldom right: a verification told %.2f tokens on average, of at most %.1f, in the first %d; was the "
                "draft model made for this model? --drafter off does without",
                *(told, most, self._verifications),
            )

    def failed(self) -> int:
        """A step was given up. Returns how many were, since one completed."""
        self._num_failed_steps += 1
        self._failed_in_a_row += 1
        return self._failed_in_a_row

    def stats(self) -> EngineStats:
        """The totals since the start, and how many requests and pages there are now."""
        scheduler, pages, told = self._scheduler, self._scheduler.pages, self._by_accepted
        by_position = tuple(sum(told[count] for count in told if count > place) for place in range(max(told, default=0)))
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            free_pages=sum(counts.free for counts in pages.values()),
            cached_pages=sum(counts.cached for counts in pages.values()),
            pages=pages,
            lanes=scheduler.lanes,
            experts=ExpertCounts() if self._loads is None else self._loads.read(),
            num_steps=self.num_steps,
            num_graph_steps=self._num_graph_steps,
            num_failed_steps=self._num_failed_steps,
            num_tokens=self._num_tokens,
            num_preempted=self._num_preempted,
            num_nan=self._num_nan,
            steps_by_size=tuple(self._steps_by_size),
            host_s=self._host_s,
            plan_s=self._plan_s,
            run_s=self._run_s,
            attn_backend=self._attn_backend,
            steps_by_backend=dict(self._steps_by_backend),
            drafts=DraftCounts(
                verifications=self._verifications,
                told=self._told,
                drafted=self._drafted,
                accepted=sum(by_position),
                by_position=by_position,
                failure="" if self._drafting is None else self._drafting.failure,
            ),
            kernels=KernelState() if self._changeover is None else self._changeover.state,
        )

    @property
    def _attn_backend(self) -> str:
        return self._facts.attn_backend if self._changeover is None else self._changeover.running

    def profile(self, num_steps: int) -> str:
        """Trace what the host does in the next steps, instead of what is being traced. Returns the file it will be in."""
        self._trace = StepTrace(num_steps, self._trace_file)
        return str(self._trace_file)
