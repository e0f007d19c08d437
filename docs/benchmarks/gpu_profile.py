"""Where a step's time goes: the device's kernels over some steps of a workload of `engine bench offline`, by torch's profiler.

python docs/benchmarks/gpu_profile.py W7 --steps 4:6 60:10 --output docs/benchmarks/gpu-profile-w7.json

Steps are counted from the start of a pass. The profiler slows the host down, so `wall_ms_a_step` is of the same steps in another
pass, without it. `us_a_step` is what kernels took from start to end; one that is launched ahead of its turn starts while the one
before it runs, so `us_after_others` counts from the end of whatever ended last before it did. The latter add up to the step.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from enginery import LLM
from enginery.bench.offline import checkpoint_folder, with_room
from enginery.bench.report import make_report
from enginery.bench.workloads import find_workload
from enginery.config.schema import EngineOptions

HAS_DEVICE = torch.cuda.is_available()
KERNELS = 26  # that took longest


class Profiled:
    """In place of an engine's `step`: profiles `count` steps from `first` on. times: when each began."""

    def __init__(self, step: Callable[[], Any], first: int, count: int) -> None:
        self.step, self.first, self.count = step, first, count
        self.times: list[float] = []
        self.profile = profile(activities=[ProfilerActivity.CUDA if HAS_DEVICE else ProfilerActivity.CPU])

    def __call__(self) -> Any:
        if len(self.times) == self.first:
            self.profile.__enter__()
        elif len(self.times) == self.first + self.count:
            if HAS_DEVICE:
                torch.cuda.synchronize()
            self.profile.__exit__(None, None, None)
        self.times.append(time.perf_counter())
        return self.step()

    def report(self) -> dict[str, Any]:
        spent: dict[str, list[float]] = collections.defaultdict(list)
        after_others: dict[str, float] = collections.Counter()
        events = [e for e in self.profile.events() or () if not HAS_DEVICE or e.device_type == torch.autograd.DeviceType.CUDA]
        ended = None
        for event in sorted(events, key=lambda event: event.time_range.end):
            spent[event.name].append(event.time_range.end - event.time_range.start)
            after_others[event.name] += event.time_range.end - (event.time_range.start if ended is None else ended)
            ended = event.time_range.end
        longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:KERNELS]
        return {
            "steps": f"{self.first}:{self.count}",
            "busy_ms_a_step": sum(map(sum, spent.values())) / self.count / 1e3,
            "kernels_a_step": sum(map(len, spent.values())) / self.count,
            "kernels": [
                {
                    "name": name[:160],
                    "us_a_step": sum(each) / self.count,
                    "us_after_others": after_others[name] / self.count,
                    "calls_a_step": len(each) / self.count,
                }
                for name, each in longest
            ],
        }


def main() -> None:
    """Prints a table for each window of steps; the report goes to --output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("--steps", nargs="+", default=["4:6", "60:10"], metavar="FIRST:COUNT")
    parser.add_argument("--tp", type=int, default=1, help="ranks, of which the first is profiled")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    workload = find_workload(asked.workload)
    asked_options = EngineOptions(dtype="bfloat16", tp=asked.tp)
    options = dataclasses.replace(with_room(asked_options, workload), model=workload.shape, load_format="dummy")
    windows = []
    with checkpoint_folder(options) as named, LLM(**vars(named)) as llm:
        step = llm._engine.step

        def run(seed: int) -> None:
            llm.generate(workload.prompts(llm.facts.vocab_size, seed=seed), workload.params(), progress=False)

        run(1)
        for seed, window in enumerate(asked.steps, start=2):
            first, count = map(int, window.split(":"))
            llm._engine.step = profiled = Profiled(step, first, count)
            run(seed)
            windows.append(profiled.report())
        llm._engine.step = timed = Profiled(step, 1 << 60, 1)
        run(len(windows) + 2)
    for window in windows:
        first, count = map(int, window["steps"].split(":"))
        window["wall_ms_a_step"] = (timed.times[first + count] - timed.times[first]) / count * 1e3
        print("{steps}: {wall_ms_a_step:.2f} ms a step, kernels {busy_ms_a_step:.2f}".format(**window))
        for kernel in window["kernels"]:
            print("{us_a_step:10.1f} us {us_after_others:10.1f} after others {calls_a_step:6.1f} x  {name:.100}".format(**kernel))
    if asked.output:
        device = torch.cuda.get_device_name() if HAS_DEVICE else "CPU"
        report = {**make_report("profile", device, [], options=options), "workload": workload.name, "windows": windows}
        asked.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
