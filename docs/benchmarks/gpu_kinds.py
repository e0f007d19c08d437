"""Models with several kinds of memory on a GPU, random weights: `python docs/benchmarks/gpu_kinds.py SHAPE [--windows] > FILE`.

- `throughput`: passes of 512 tokens in and 256 out, at --streams, prompts first.
- `first_token`: milliseconds from a prompt's arrival to its first token, of 8,192 tokens that are new, of the same again, and of
  one page of tokens. Nothing else runs.
- With --windows, `held`: how many requests of 32,768 tokens decode at once in --kv-gib of memory, and the same if the layers with
  windows kept all tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from enginery.bench.latency import one_pass, pass_s
from enginery.bench.offline import free_memory
from enginery.bench.workloads import find_workload, write_shape
from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

LONG, VERY_LONG, ANSWER, PAGE = 8192, 32768, 512, 16


class Prompts:
    """Requests with random prompts, which are greedy and end by their limit alone."""

    def __init__(self, vocab_size: int) -> None:
        self.draw, self.vocab_size, self.count = random.Random(0), vocab_size, 0

    def tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self.draw.randrange(10, self.vocab_size) for _ in range(length))

    def request(self, tokens: tuple[int, ...], *, max_tokens: int) -> GenerationRequest:
        self.count += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return GenerationRequest(request_id=f"r{self.count}", prompt_token_ids=tokens, params=params)


def first_token_ms(engine: Engine, prompts: Prompts, tokens: tuple[int, ...]) -> float:
    began = time.perf_counter()
    engine.submit(prompts.request(tokens, max_tokens=1))
    while engine.has_work:
        engine.step()
    return 1e3 * (time.perf_counter() - began)


def first_tokens(engine: Engine, *, rounds: int) -> dict[str, Any]:
    """The first round does not count."""
    prompts = Prompts(engine.facts.vocab_size)
    found: dict[str, list[float]] = {"new": [], "again": [], "one_page": []}
    for _ in range(1 + rounds):
        tokens = prompts.tokens(LONG)
        for name, asked in (("new", tokens), ("again", tokens), ("one_page", prompts.tokens(PAGE))):
            found[name].append(first_token_ms(engine, prompts, asked))
    medians = {name: statistics.median(times[1:]) for name, times in found.items()}
    return {"medians": medians, "again_by_one_page": medians["again"] / medians["one_page"], "ms": found}


def most_held(engine: Engine) -> int:
    """Requests of `VERY_LONG` that run at once when all of them decode, and none begins in 16 steps."""
    prompts, told, held, idle_steps = Prompts(engine.facts.vocab_size), set[str](), 0, 0
    for _ in range(2 + engine.facts.num_pages * PAGE // VERY_LONG):
        engine.submit(prompts.request(prompts.tokens(VERY_LONG - ANSWER), max_tokens=ANSWER - 1))
    while idle_steps < 16:
        begun = len(told)
        told |= {output.request_id for output in engine.step() if output.token_ids}
        held, idle_steps = max(held, engine._scheduler.num_running), idle_steps + 1 if len(told) == begun else 0
    for number in range(prompts.count):
        engine.abort(f"r{1 + number}")
    while engine.has_work:
        engine.step()
    return held


def throughput(engine: Engine, shape: str, streams: int, *, passes: int) -> dict[str, Any]:
    """The median of so many passes, after one that does not count."""
    seeds = range(10 * streams, 10 * streams + 1 + passes)  # a prompt that came before is in the prefix cache
    workload = find_workload(f"{shape}:{streams}")
    seconds = [pass_s(one_pass(engine, workload, seed=seed)) for seed in seeds]
    output_tokens = sum(output for _, output in workload.lengths)
    return {"streams": streams, "output_tokens_per_s": output_tokens / statistics.median(seconds[1:]), "seconds": seconds}


def held(options: EngineOptions) -> dict[str, Any]:
    """With windows, and with all layers' tokens kept. Writes the model's config.json anew."""
    config, found = Path(str(options.model)) / "config.json", {}
    windows = json.loads(config.read_text())
    for name, layers in (("windows", windows["layer_types"]), ("all", ["full_attention"] * windows["num_hidden_layers"])):
        free_memory()
        config.write_text(json.dumps({**windows, "layer_types": layers}))
        engine = Engine.build(options, Registry.load())
        found[name] = {"requests": most_held(engine), "memory_plan": engine.facts.memory_plan}
        engine.close()
        del engine  # its memory, before the next one is built
    return found


def measured(asked: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Any]]:
    """Each part of the report, when it is there."""
    options = EngineOptions(
        model=str(write_shape(asked.shape, folder)),
        load_format="dummy",
        dtype="bfloat16",
        device=asked.device,
        max_batch_requests=256,
        memory_fraction=0.92,
        prefill_fraction=1.0,  # as `LLM` has it
    )
    began = time.perf_counter()
    engine = Engine.build(dataclasses.replace(options, max_model_len=LONG + PAGE), Registry.load())
    yield "build_s", time.perf_counter() - began
    yield "attention", engine.facts.attn_backend
    yield "memory_plan", engine.facts.memory_plan
    yield "first_token", first_tokens(engine, rounds=asked.rounds)
    yield "throughput", [throughput(engine, asked.shape, streams, passes=asked.passes) for streams in asked.streams]
    engine.close()
    del engine
    if asked.windows:
        lengths = {"max_model_len": VERY_LONG, "expected_tokens": VERY_LONG, "kv_memory_gib": asked.kv_gib}
        yield "held", held(dataclasses.replace(options, **lengths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, nargs="*", default=[])
    parser.add_argument("--passes", type=int, default=3, help="of --streams, whose median counts")
    parser.add_argument("--rounds", type=int, default=5, help="of first tokens")
    parser.add_argument("--windows", action="store_true")
    parser.add_argument("--kv-gib", type=float, default=16)
    asked = parser.parse_args()
    report: dict[str, Any] = {"command": " ".join(sys.argv), "commit": asked.commit, "shape": asked.shape}
    report["device"] = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    report["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        for name, found in measured(asked, Path(folder)):
            report[name] = found
            print(json.dumps({name: found}), file=sys.stderr, flush=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
