"""Enginery beside transformers on the same machine in the same run: `python docs/benchmarks/cpu_peers.py --output FILE`.

The 125M Llama with random weights, 128 tokens in, 128 out, greedy. The engines take turns, so that a machine whose speed drifts
treats them alike; of each, the best and the median of all rounds are kept.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

import enginery
from enginery import LLM, SamplingParams
from enginery.bench.workloads import write_shape

INPUT, OUTPUT = 128, 128
PREFILL = 2048


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 30000, (count, length), generator=generator).tolist()


def enginery_runner(folder: Path, dtype: str) -> Callable[[list[list[int]], int], int]:
    llm = LLM(str(folder), load_format="dummy", dtype=dtype)

    def run(batch: list[list[int]], max_tokens: int) -> int:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return sum(len(answer.token_ids) for answer in llm.generate(batch, params, progress=False))

    return run


def transformers_runners(folder: Path, dtype: str) -> dict[str, Callable[[list[list[int]], int], int]]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval().to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, do_sample=False)

    def generate(batch: list[list[int]], max_tokens: int) -> int:
        ids = torch.tensor(batch)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, min_new_tokens=max_tokens)
        return (out.shape[1] - ids.shape[1]) * len(batch)

    def continuous(batch: list[list[int]], max_tokens: int) -> int:
        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, eos_token_id=-1)
        paging = ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=2048, block_size=32)
        outputs = model.generate_batch(batch, generation_config=config, continuous_batching_config=paging, progress_bar=False)
        return sum(len(output.generated_tokens) for output in outputs.values())

    return {"transformers generate": generate, "transformers continuous batching": continuous}


def measure(dtype: str, rounds: int) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        shape = write_shape("llama-125m", Path(folder))
        runners = {"enginery": enginery_runner(shape, dtype), **transformers_runners(shape, dtype)}
        loads = {"1 stream": (1, INPUT, OUTPUT), "16 streams": (16, INPUT, OUTPUT), "prefill 2048": (1, PREFILL, 1)}
        rows = []
        for load, (count, length, max_tokens) in loads.items():
            seconds: dict[str, list[float]] = {name: [] for name in runners}
            for turn in range(rounds + 1):
                for name, run in runners.items():
                    batch = prompts(count, length, seed=turn)
                    began = time.perf_counter()
                    assert run(batch, max_tokens) == count * max_tokens
                    if turn:  # the first one warms up
                        seconds[name].append(time.perf_counter() - began)
            tokens = count * (max_tokens if max_tokens > 1 else length)
            for name, taken in seconds.items():
                row = {
                    "load": load,
                    "dtype": dtype,
                    "engine": name,
                    "best_tokens_per_s": round(tokens / min(taken), 1),
                    "median_tokens_per_s": round(tokens / statistics.median(taken), 1),
                    "seconds": [round(one, 3) for one in taken],
                }
                rows.append(row)
                print(*(str(value).ljust(34) for value in list(row.values())[:5]), flush=True)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = [row for dtype in asked.dtypes for row in measure(dtype, asked.rounds)]
    if asked.output:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        about = {
            "command": f"python docs/benchmarks/cpu_peers.py --rounds {asked.rounds}",
            "commit": commit,
            "device": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {
                "enginery": enginery.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "rows": rows,
        }
        asked.output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
