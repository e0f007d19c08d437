"""The engine's process with a real engine whose computation fails on demand: by the seed of a request."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

import torch

from enginery.config.schema import EngineOptions
from enginery.contracts.engine import ReportProgress
from enginery.contracts.step import Item, SamplingInput, StepInput
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.schedule.request import Request
from enginery.schedule.scheduler import Scheduler
from enginery.serve.engine.process import run
from enginery.worker.paths.path import Launched
from enginery.worker.paths.running_step import RunningStep
from enginery.worker.runner import NO_CUTS, Runner
from enginery.worker.sampling import mark_nan
from enginery_grammar_llguidance import compiler

OUT_OF_MEMORY, NAN, RAISES, WRONG_SHAPE, WEDGE, BROKEN = range(70_001, 70_007)
WEDGE_S = 4.0
AFTER = 3  # tokens of the output
STEP_S = float(os.environ.get("CHAOS_STEP_S", "0"))  # what a step takes at the least


class FaultyRunner(Runner):
    """Fails in the step that makes the fourth token of a request with one of the seeds; with BROKEN, in the first."""

    scheduler: Scheduler

    def launch(self, step: StepInput) -> Launched:
        time.sleep(STEP_S)
        sampling = self._sampling(step)
        due = {request.asked.params.seed for request, item in sampling if _is_due(request, item)}
        if any(request.asked.params.seed == BROKEN for request, _ in sampling):
            raise KeyError("no such layer")
        if OUT_OF_MEMORY in due:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.14 TiB")
        if RAISES in due:
            raise ValueError("q.shape[0] (8218) != qo_indptr[-1] (800)")
        if WEDGE in due:
            time.sleep(WEDGE_S)
        return super().launch(step)

    @torch.inference_mode()
    def sample(self, launched: Launched, sampling: SamplingInput | None, cuts: Mapping[int, int] = NO_CUTS) -> RunningStep:
        rows = self._sampling(launched.step)
        seeds = [request.asked.params.seed if _is_due(request, item) else 0 for request, item in rows]
        if WRONG_SHAPE in seeds:
            launched = launched._replace(logits=launched.logits[:, None, None])
        else:
            launched.logits[[seed == NAN for seed in seeds]] = float("nan")
            if launched.forwarded.greedy is not None:  # a recorded step has looked already
                best = launched.forwarded.greedy[: len(launched.logits)]
                best.copy_(mark_nan(launched.logits, best))
        return super().sample(launched, sampling, cuts)

    def _sampling(self, step: StepInput) -> list[tuple[Request, Item]]:
        return [(request, item) for request, item in zip(self.scheduler.requests, step.each(), strict=True) if item.samples]


def _is_due(request: Request, item: Item) -> bool:
    return item.start + item.num_tokens - request.num_prompt_tokens == AFTER


compiler.TRIAL_S = float(os.environ.get("CHAOS_TRIAL_S", compiler.TRIAL_S))  # what an evil grammar takes at the most


def build(options: EngineOptions, registry: Registry, report: ReportProgress) -> Engine:
    engine = Engine.build(options, registry, report)
    engine._runner.__class__ = FaultyRunner
    engine._runner.scheduler = engine._scheduler
    return engine


Build = Callable[[EngineOptions, Registry, ReportProgress], Engine]

if __name__ == "__main__":
    sys.exit(run(build))
