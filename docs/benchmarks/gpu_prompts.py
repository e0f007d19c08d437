"""Prompts of models with recurrent layers on a GPU, random weights: `python docs/benchmarks/gpu_prompts.py SHAPE > FILE`.

Milliseconds from a prompt's arrival to its first token by its length, nothing else running. By turns in one engine, in which
prompts of up to so many tokens run token by token and others in chunks (`by_token` of enginery-attn-fla).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_kinds import Prompts, first_token_ms

from enginery.bench.workloads import write_shape
from enginery.config.schema import EngineOptions
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

LENGTHS = (16, 100, 128, 200, 256, 400, 512, 2048)
BY_TOKEN = (0, 128, 256, 512)


def measured(engine: Engine, *, rounds: int) -> dict[int, dict[int, list[float]]]:
    """The first round does not count."""
    prompts = Prompts(engine.facts.vocab_size)
    backends = [each for each in gc.get_objects() if type(each).__name__ == "ChunkedAttention"]
    assert backends, "enginery-attn-fla runs no layer"
    found: dict[int, dict[int, list[float]]] = {most: {length: [] for length in LENGTHS} for most in BY_TOKEN}
    for number in range(1 + rounds):
        for most, by_length in found.items():
            for backend in backends:
                backend.options = dataclasses.replace(backend.options, by_token=most)
            for length, times in by_length.items():
                taken = first_token_ms(engine, prompts, prompts.tokens(length))
                times += [round(taken, 2)] * (number > 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = EngineOptions(
            model=str(write_shape(asked.shape, Path(folder))),
            load_format="dummy",
            dtype="bfloat16",
            device="cuda",
            max_batch_requests=256,
            memory_fraction=0.92,
            max_model_len=8208,
        )
        engine = Engine.build(options, Registry.load())
        found = measured(engine, rounds=asked.rounds)
    report: dict[str, Any] = {"command": " ".join(sys.argv), "commit": asked.commit, "shape": asked.shape}
    report |= {"device": torch.cuda.get_device_name(), "attention": engine.facts.attn_backend}
    report |= {"versions": {"python": sys.version.split()[0], "torch": torch.__version__}}
    report["medians_ms"] = {most: {length: statistics.median(ms) for length, ms in each.items()} for most, each in found.items()}
    report["ms"] = found
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
