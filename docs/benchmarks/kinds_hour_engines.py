"""What `kinds_hour.py` drives: an engine by the time of day, or one that computes nothing by a clock that its steps move."""

from __future__ import annotations

import dataclasses
import random
import time

from kinds_hour_users import VOCABULARY

from enginery.contracts.engine import EngineStats
from enginery.contracts.request import RequestOutput
from enginery.contracts.step import StepOutput, StepTimes
from enginery.engine.engine import Engine


class Clock:
    """Seconds since the start."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._began

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class StandingClock(Clock):
    """One that only `sleep` moves."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


class Simulated:
    """An engine that schedules and computes nothing. step_s, prompt_s, decode_s: of each step, and of each row of either sort."""

    step_s, prompt_s, decode_s = 0.005, 0.0004, 0.001  # about what the hybrid takes on one busy core of this page's machine

    def __init__(self, engine: Engine, clock: StandingClock) -> None:
        self._engine, self._clock, self._draw, self._num_preempted = engine, clock, random.Random(2), 0
        self._scheduling, self._scheduler = engine._scheduling, engine._scheduler
        self.submit, self.abort, self.meter = engine.submit, engine.abort, self

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> EngineStats:
        return dataclasses.replace(self._engine.meter.stats(), num_preempted=self._num_preempted)

    def step(self) -> list[RequestOutput]:
        step = self._scheduler.next_step()
        self._num_preempted += len(self._scheduler.preempted)
        if not step.items:
            return []
        items = step.columns()
        num_prompt = int(items.num_tokens[step.num_decode :].sum())
        self._clock.sleep(self.step_s + num_prompt * self.prompt_s + step.num_decode * self.decode_s)
        tokens = [(self._draw.randrange(10, VOCABULARY),) if samples else () for samples in items.samples.tolist()]
        told = StepOutput(
            number=step.number,
            token_ids=tokens,
            logprobs={},
            prompt_logprobs={},
            embeddings={},
            failed={},
            captured=False,
            times=StepTimes(0.0, 0.0, 0.0, 0.0),
        )
        return self._scheduler.complete(step, told)


AnyEngine = Engine | Simulated
