"""Pages of each kind of memory over an hour of mixed use: `python docs/benchmarks/kinds_hour.py --seconds 3600 > FILE`.

Engines of tiny models with random weights on a CPU, a process for each of `SHAPES`: layers are few and narrow, but a state, or a
token of a window's layers, takes as many times the bytes of a token of FULL as in the real model (`proportions` in the report).
Who uses them is in `kinds_hour_users.py`, and what is counted in `kinds_hour_counts.py`.

With `--simulated` nothing is computed: steps take the time of `Simulated`, an hour passes in minutes, and users may be many.
With `--gpu` the models are whole, or have fewer layers (`WHOLE`), and share a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kinds_hour_counts import PAGE, Second, Watch, as_json, minutes, second_of, summary
from kinds_hour_engines import AnyEngine, Clock, Simulated, StandingClock
from kinds_hour_users import VOCABULARY, Load

from enginery.bench.workloads import shapes
from enginery.config.schema import EngineOptions
from enginery.contracts.batch import WINDOW
from enginery.engine.engine import Engine
from enginery.kv.pool import page_bytes
from enginery.kv.prefix import RadixPrefixCache
from enginery.kv.states import state_bytes
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.memory_plan import no_pages

MOST_TOKENS, MOST_REQUESTS = 16384, 32
NARROW = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 8, "vocab_size": VOCABULARY, "eos_token_id": None, "quantization_config": None,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "qwen3-next-80b-32",
        {
            "full_attention_interval": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 6, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
    ),
    "gpt-oss": (
        "gpt-oss-120b",
        {"layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}  # fmt: skip


def drive(
    engine: AnyEngine, load: Load, *, seconds: int, clock: Clock, tell: Callable[[Second], None]
) -> tuple[list[Second], Watch]:
    """So many seconds of use. tell: is given each second."""
    (cache,) = engine._scheduling.caches
    assert isinstance(cache, RadixPrefixCache)
    watch, found = Watch(cache), list[Second]()
    tokens: Counter[str] = Counter()
    while (now := clock.now_s()) < seconds:
        while len(found) < int(now):
            found.append(second_of(engine, len(found), tokens))
            watch.second = len(found)
            tell(found[-1])
        load.act(now, engine.submit, engine.abort)
        if not engine.has_work:
            clock.sleep(max(0.0, min(load.next_s, len(found) + 1) - clock.now_s()))
            continue
        for output in engine.step():
            if output.token_ids and (prompt := load.prompts.pop(output.request_id, None)) is not None:
                watch.entered(prompt, output.num_cached_tokens)
                tokens.update(prompt=len(prompt), cached=output.num_cached_tokens, requests=1)
            tokens["output"] += len(output.token_ids)
            load.told(output, clock.now_s(), engine.submit)
    return found, watch


class Run(NamedTuple):
    """One engine. rate: of users, a second on average. num_layers: of the model that is on a GPU, None for all."""

    name: str
    shape: str
    kv_gib: float
    rate: float
    expected_tokens: int = EngineOptions().expected_tokens
    on_gpu: bool = False
    num_layers: int | None = None


RUNS = (
    Run("qwen3-next", "qwen3-next", kv_gib=0.006, rate=0.2),
    Run("qwen3-next, told the mean request", "qwen3-next", kv_gib=0.006, rate=0.2, expected_tokens=2500),
    Run("gpt-oss", "gpt-oss", kv_gib=0.004, rate=0.3),
)
WHOLE = (
    Run("qwen3-next, 16 layers", "qwen3-next", kv_gib=8, rate=2.0, on_gpu=True, num_layers=16),
    Run("gpt-oss-120b", "gpt-oss", kv_gib=12, rate=2.0, on_gpu=True),
)


def write_config(run: Run, folder: Path, changes: Mapping[str, Any]) -> Path:
    """The real model's, but for `changes`, of which None removes a key."""
    config = {**shapes()[SHAPES[run.shape][0]], **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def changes_of(run: Run) -> dict[str, Any]:
    """What its model has otherwise than the real one."""
    if not run.on_gpu:
        return {**NARROW, **SHAPES[run.shape][1]}
    return {} if run.num_layers is None else {"num_hidden_layers": run.num_layers}


def options_of(run: Run, folder: Path) -> EngineOptions:
    return EngineOptions(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        device="cuda" if run.on_gpu else "cpu",
        num_threads=1,
        page_size=PAGE,
        max_model_len=MOST_TOKENS,
        max_batch_requests=2 * MOST_REQUESTS if run.on_gpu else MOST_REQUESTS,
        max_batch_tokens=8192 if run.on_gpu else 2048,
        expected_tokens=run.expected_tokens,
        kv_memory_gib=run.kv_gib,
    )


def measured(run: Run, seconds: int, progress: Path | None, *, simulated: bool = False) -> dict[str, Any]:
    """The report of one engine. progress: a file to which each second is appended."""

    def tell(second: Second) -> None:
        if progress is not None:
            with progress.open("a") as file:
                file.write(json.dumps({"run": run.name, **as_json(second)}) + "\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config(run, Path(temporary) / "here", changes_of(run))
        options, real = options_of(run, folder), write_config(run, Path(temporary) / "real", {"quantization_config": None})
        engine = Engine.build(dataclasses.replace(options, graphs=not simulated), Registry.load())
        clock = StandingClock() if simulated else Clock()
        driven = Simulated(engine, clock) if isinstance(clock, StandingClock) else engine
        load = Load(seed=1, rate=run.rate)
        found, watch = drive(driven, load, seconds=seconds, clock=clock, tell=tell)
        engine.close()
        told: dict[str, Any] = {"run": run._asdict(), "memory_plan": engine.facts.memory_plan}
        told["in_tokens_of_full"] = {"here": proportions(folder, options), "real": proportions(real, options)}
    told |= {"users": dict(load.counts), "summary": summary(found, watch), "minutes": minutes(found, watch)}
    return told


def proportions(config: Path, options: EngineOptions) -> dict[str, float]:
    """What a state, and what a token of layers with windows takes, in tokens of FULL."""
    geometry = no_pages(choose(dataclasses.replace(options, model=str(config)), Registry.load()))
    full = page_bytes(geometry)
    found = {"state": PAGE * state_bytes(geometry) / full, "window": page_bytes(geometry, WINDOW) / full}
    return {name: round(value, 2) for name, value in found.items() if value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--gpu", action="store_true", help="the models as they are, on one GPU")
    parser.add_argument("--runs", nargs="*", choices=[run.name for run in RUNS + WHOLE], help="all of the sort unless told")
    parser.add_argument("--rate", type=float, default=1.0, help="times as many users")
    parser.add_argument("--simulated", action="store_true", help="compute nothing")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--progress", type=Path, help="file to which each second is appended")
    asked = parser.parse_args()
    wanted = [run for run in (WHOLE if asked.gpu else RUNS) if asked.runs is None or run.name in asked.runs]
    runs = [run._replace(rate=asked.rate * run.rate) for run in wanted]
    measure = functools.partial(measured, seconds=asked.seconds, progress=asked.progress, simulated=asked.simulated)
    with ProcessPoolExecutor(len(runs), mp_context=get_context("spawn")) as pool:
        found = list(pool.map(measure, runs))
    report: dict[str, Any] = {"command": " ".join(sys.argv), "commit": asked.commit, "seconds": asked.seconds}
    report["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__}
    print(json.dumps({**report, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
