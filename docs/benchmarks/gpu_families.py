"""Each family in its real size, random weights, beside its floors: `python docs/benchmarks/gpu_families.py SHAPE.. > FILE`.

A line of JSON for each shape of `gpu-families-shapes.json`; some have fewer layers than the model, so that they fit. Requests of
512 tokens in and 128 out, at 1, 32 and 256 streams, prompts first; the second pass counts. Of a step: the median of a pass's later
half, and what is left of the pass is the prompts'. Floors are those of `engine bench offline`. Where a step or the prompts reach
less than --look of it, the kernels that took longest are shown too, of one more pass.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from gpu_profile import Profiled

from enginery import LLM
from enginery.bench.floor import DeviceLimits, floor_s
from enginery.bench.sizes import ModelSizes, engine_sizes
from enginery.bench.workloads import equal_requests
from enginery.plugin.registry import Registry

SHAPES = json.loads(Path(__file__).with_name("gpu-families-shapes.json").read_text())
H200 = DeviceLimits(copy_bytes_per_s=4.26e12, read_bytes_per_s=4.47e12, product_flop_per_s=792e12, dtype="bfloat16")
PROMPT, ANSWER, STREAMS = 512, 128, (1, 32, 256)


def load(llm: LLM, sizes: ModelSizes, streams: int, *, look: float) -> dict[str, Any]:
    workload, step = equal_requests(streams, input_len=PROMPT, output_len=ANSWER), llm._engine.step

    def one_pass(seed: int, first: int, count: int) -> tuple[Profiled, float]:
        llm._engine.step = profiled = Profiled(step, first, count)
        began = time.perf_counter()
        llm.generate(workload.prompts(llm.facts.vocab_size, seed=seed), workload.params(), progress=False)
        llm._engine.step = step
        return profiled, time.perf_counter() - began

    one_pass(1, 1 << 60, 1)
    timed, total_s = one_pass(2, 1 << 60, 1)
    gaps = [after - before for before, after in zip(timed.times, timed.times[1:], strict=False)]
    step_s = statistics.median(gaps[-ANSWER // 2 :])
    prompts_s = total_s - (ANSWER - 1) * step_s
    all_floor, prompts_floor = (
        floor_s(sizes, equal_requests(streams, input_len=PROMPT, output_len=count), H200) for count in (ANSWER, 1)
    )
    steps_fraction = (all_floor - prompts_floor) / (ANSWER - 1) / step_s
    report: dict[str, Any] = {
        "streams": streams,
        "output_tokens_per_s": round(streams * ANSWER / total_s, 1),
        "fraction": round(all_floor / total_s, 3),
        "step_ms": round(1e3 * step_s, 3),
        "step_fraction": round(steps_fraction, 3),
        "prompts_ms": round(1e3 * prompts_s, 1),
        "prompts_fraction": round(prompts_floor / prompts_s, 3),
    }
    if steps_fraction < look:
        report["steps"] = one_pass(3, len(gaps) - ANSWER // 2, 4)[0].report()
    if streams > 1 and report["prompts_fraction"] < look:
        report["prompts"] = one_pass(4, 1, 1)[0].report()
    return report


def family(name: str, *, look: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
        began = time.perf_counter()
        options = {"dtype": "bfloat16", "load_format": "dummy", "max_model_len": PROMPT + ANSWER + 1, "attention_backend": "triton"}
        with LLM(folder, **options) as llm:
            start_s = time.perf_counter() - began
            sizes = engine_sizes(llm.facts, Registry.load())
            if sizes is None:
                raise RuntimeError(f"no sizes of {name}")
            loads = [load(llm, sizes, streams, look=look) for streams in STREAMS]
            return {"shape": name, "start_s": round(start_s, 1), "decisions": llm.facts.decisions, "loads": loads}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--look", type=float, default=0.6)
    asked = parser.parse_args()
    for name in asked.shapes:
        try:
            print(json.dumps(family(name, look=asked.look)), flush=True)
        except Exception:
            print(json.dumps({"shape": name, "error": traceback.format_exc()[-2500:]}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
