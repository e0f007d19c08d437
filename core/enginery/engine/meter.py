"""What is measured about steps: running totals, the plugins that observe, and the trace that was asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from enginery.contracts.engine import STEP_SIZES, EngineFacts, EngineStats, KernelState
from enginery.contracts.schedule import StepReport
from enginery.contracts.step import StepInput, StepOutput
from enginery.engine.changeover import Changeover
from enginery.engine.step_trace import StepTrace
from enginery.plugin.registry import Registry
from enginery.schedule.scheduler import Scheduler


class SteppedAt(NamedTuple):
    """When a step's scheduling began and ended, by `time.perf_counter`, and how many requests it made wait again."""

    began_s: float
    scheduled_s: float
    num_preempted: int


class StepMeter:
    """Told of every step once. changeover: None if the chosen attention backends run from the start.

    trace_file: where traces are written.
    """

    def __init__(
        self,
        registry: Registry,
        scheduler: Scheduler,
        facts: EngineFacts,
        *,
        changeover: Changeover | None,
        trace_file: Path,
    ) -> None:
        self._registry = registry
        self._scheduler = scheduler
        self._facts = facts
        self._changeover = changeover
        self._steps_by_backend: Counter[str] = Counter()
        self._trace_file = trace_file
        self._trace: StepTrace | None = None
        self.num_steps = 0
        self._num_graph_steps = 0
        self._num_failed_steps = 0
        self._failed_in_a_row = 0
        self._num_tokens = 0
        self._num_preempted = 0
        self._num_nan = 0
        self._steps_by_size = [0] * (len(STEP_SIZES) + 1)
        self._host_s = self._plan_s = self._run_s = 0.0

    def arrived(self, step: StepInput, output: StepOutput, at: SteppedAt, *, waited_from_s: float) -> None:
        """The step's tokens have just come; the host has waited for them from `waited_from_s`, by `time.perf_counter`."""
        if self._trace is not None:
            self._trace.add(step, output.times, began_s=at.began_s, scheduled_s=at.scheduled_s, waited_from_s=waited_from_s)

    def completed(self, step: StepInput, output: StepOutput, at: SteppedAt) -> None:
        """The scheduler has taken the step's tokens in."""
        times, num_tokens = output.times, step.num_tokens
        if self._registry.observers:
            self._registry.observe_step(self._report(step, output, at))
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

    def failed(self) -> int:
        """A step was given up. Returns how many were, since one completed."""
        self._num_failed_steps += 1
        self._failed_in_a_row += 1
        return self._failed_in_a_row

    def stats(self) -> EngineStats:
        """The totals since the start, and how many requests and pages there are now."""
        scheduler, pages = self._scheduler, self._scheduler.pages
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            free_pages=sum(counts.free for counts in pages.values()),
            cached_pages=sum(counts.cached for counts in pages.values()),
            pages=pages,
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
            kernels=KernelState() if self._changeover is None else self._changeover.state,
        )

    @property
    def _attn_backend(self) -> str:
        """The names of the attention backends that run now."""
        return self._facts.attn_backend if self._changeover is None else self._changeover.running

    def profile(self, num_steps: int) -> str:
        """Trace what the host does in the next steps, instead of what is being traced. Returns the file it will be in."""
        self._trace = StepTrace(num_steps, self._trace_file)
        return str(self._trace_file)

    def _report(self, step: StepInput, output: StepOutput, at: SteppedAt) -> StepReport:
        scheduler, times, num_tokens = self._scheduler, output.times, step.num_tokens
        pages = scheduler.pages
        return StepReport(
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
