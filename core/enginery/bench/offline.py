"""`engine bench offline`: whole workloads in this process, and how near they come to what the device allows."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from enginery.bench.device_limits import device_name, measure_limits
from enginery.bench.floor import DeviceLimits, floor_s
from enginery.bench.report import Report, Row, facts_details, make_report
from enginery.bench.sizes import ModelSizes, engine_sizes
from enginery.bench.workloads import Workload, checkpoint_folder
from enginery.config.schema import EngineOptions
from enginery.config.sources import registry_for
from enginery.contracts.engine import EngineFacts
from enginery.llm.llm import LLM
from enginery.worker.device import torch_device


class BenchRun(NamedTuple):
    """One pass over a workload. cached_tokens: of the prompts, those that another request had computed."""

    total_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


def with_room(options: EngineOptions, workload: Workload) -> EngineOptions:
    """For the workload's longest request and no more, unless a length is asked for."""
    longest = max(sum(lengths) for lengths in workload.lengths)
    return dataclasses.replace(options, max_model_len=options.max_model_len or longest + 1)


def free_memory() -> None:
    """Give back what a closed engine had, so that the next one plans with it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run_workload(llm: LLM, workload: Workload, *, repeats: int) -> list[BenchRun]:
    """`repeats` passes after one that is not counted. Each has prompts of its own, so that none finds another's prefix cached."""
    runs = []
    for repeat in range(repeats + 1):
        prompts, params = workload.prompts(llm.facts.vocab_size, seed=1 + repeat), workload.params()
        began = time.perf_counter()
        generations = llm.generate(prompts, params, progress=False)
        total_s = time.perf_counter() - began
        produced, cached = (
            sum(counts) for counts in zip(*((len(g.token_ids), g.num_cached_tokens) for g in generations), strict=True)
        )
        runs.append(BenchRun(total_s, sum(map(len, prompts)), produced, cached))
    return runs[1:]


def bench_offline(workloads: Sequence[Workload], options: EngineOptions, *, repeats: int) -> Report:
    """Run the workloads one after the other, each on its shape with random weights."""
    device = torch_device(options.device)
    registry = registry_for(options)
    limits: dict[str, DeviceLimits] = {}
    rows = []
    for workload in workloads:
        free_memory()
        asked = dataclasses.replace(with_room(options, workload), model=workload.shape, load_format="dummy")
        with checkpoint_folder(asked) as named:
            with LLM(**vars(named)) as llm:
                facts, runs = llm.facts, run_workload(llm, workload, repeats=repeats)
            peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
            free_memory()
            if facts.dtype not in limits:
                limits[facts.dtype] = measure_limits(device, facts.dtype)
            middle = sorted(runs)[(len(runs) - 1) // 2]
            floor = floor_and_fraction(engine_sizes(facts, registry), workload, limits[facts.dtype], total_s=middle.total_s)
            details = {"runs_s": [run.total_s for run in runs], "peak_gib": peak}
            rows.append(_row(workload, middle, facts=facts, floor=floor, details=details))
    return make_report("offline", device_name(device), rows, options=options, limits=limits.values())


def floor_and_fraction(
    sizes: ModelSizes | None, workload: Workload, limits: DeviceLimits, *, total_s: float
) -> dict[str, float | None]:
    """Of the workload with a model of these sizes; None where none could be read."""
    if sizes is None:
        return {"floor_s": None, "fraction": None}
    least = floor_s(sizes, workload, limits)
    return {"floor_s": least, "fraction": least / total_s}


def _row(
    workload: Workload, middle: BenchRun, *, facts: EngineFacts, floor: dict[str, float | None], details: Mapping[str, object]
) -> Row:
    """The median pass. details: of all of them."""
    counts = {"prompt_tokens": middle.prompt_tokens, "output_tokens": middle.output_tokens}
    return Row(
        what={"workload": workload.name, "shape": facts.model_name, "dtype": facts.dtype, **counts},
        measured={"total_s": middle.total_s},
        derived={f"{name}_per_s": count / middle.total_s for name, count in counts.items()} | floor,
        details={"summary": workload.summary, **details, "cached_tokens": middle.cached_tokens, **facts_details(facts)},
    )
