"""Runs a workload in this process and reports what it took."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from enginery.run.llm import LLM
from enginery.run.workloads import Workload, write_shape


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """One pass over a workload. Times in seconds, rates in tokens per second."""

    total_s: float
    prompt_tokens: int
    output_tokens: int

    @property
    def output_rate(self) -> float:
        """Generated tokens over all of the time, prompts included."""
        return self.output_tokens / self.total_s

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens over all of the time."""
        return self.prompt_tokens / self.total_s


@contextmanager
def serving(workload: Workload, **options: Any) -> Iterator[LLM]:
    """A model of the workload's shape with random weights and room for its longest request. options: of `LLM`."""
    longest = max(sum(lengths) for lengths in workload.lengths)
    with tempfile.TemporaryDirectory() as folder:
        shape = write_shape(workload.shape, Path(folder))
        with LLM(str(shape), served_model_name=workload.shape, load_format="dummy", max_model_len=longest + 1, **options) as llm:
            yield llm


def run_workload(llm: LLM, workload: Workload, *, repeats: int) -> list[BenchRun]:
    """`repeats` passes after one that is not counted. Each has prompts of its own, so that none finds another's prefix cached."""
    runs = []
    for repeat in range(repeats + 1):
        prompts, params = workload.prompts(llm.facts.vocab_size, seed=1 + repeat), workload.params()
        began = time.perf_counter()
        generations = llm.generate(prompts, params, progress=False)
        total_s = time.perf_counter() - began
        output_tokens = sum(len(generation.token_ids) for generation in generations)
        runs.append(BenchRun(total_s=total_s, prompt_tokens=sum(map(len, prompts)), output_tokens=output_tokens))
    return runs[1:]


def report(llm: LLM, workload: Workload, runs: list[BenchRun]) -> Mapping[str, Any]:
    """What `--json` prints: the median and every run, with what is needed to repeat it."""
    middle = statistics.median_low(run.total_s for run in runs)
    chosen = next(run for run in runs if run.total_s == middle)
    return {
        "workload": workload.name,
        "summary": workload.summary,
        "shape": workload.shape,
        "total_s": chosen.total_s,
        "output_tokens_per_s": chosen.output_rate,
        "prompt_tokens_per_s": chosen.prompt_rate,
        "prompt_tokens": chosen.prompt_tokens,
        "output_tokens": chosen.output_tokens,
        "runs_s": [run.total_s for run in runs],
        "dtype": llm.facts.dtype,
        "attention": llm.facts.attn_backend,
        "decisions": [list(decision) for decision in llm.facts.decisions],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads",
        "versions": {name: importlib.metadata.version(name) for name in ("enginery", "torch")}
        | {"python": platform.python_version()},
    }
