"""A model on a CPU with and without its compiled attention: `python docs/benchmarks/cpu_decoding.py --commit C > FILE`.

A 125M Llama with random weights, greedy, in two engines in one process that take turns. Tokens a second are of decoding alone: of
127 tokens in what 128 take beyond what one takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from enginery import LLM, SamplingParams
from enginery.bench.workloads import write_shape

LOADS = [(1, 128), (16, 128), (1, 2048), (4, 2048)]  # streams, tokens of each prompt
OUTPUT = 128
ENGINES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "torch": {"decode_attention_backend": "torch", "prefill_attention_backend": "torch"},
}


def seconds(llm: LLM, streams: int, length: int, *, output: int, seed: int) -> float:
    """Of one pass with prompts of its own."""
    stream = torch.Generator().manual_seed(seed)
    prompts = torch.randint(10, 30000, (streams, length), generator=stream).tolist()
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - start


def measured(dtype: str, *, rounds: int) -> list[dict[str, Any]]:
    """A row for each load."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape("llama-125m", Path(folder))
        made = {name: LLM(str(path), load_format="dummy", dtype=dtype, num_pages=1024, **asked) for name, asked in ENGINES.items()}
        found = []
        for streams, length in LOADS:
            rates: dict[str, list[float]] = {name: [] for name in made}
            for turn in range(rounds + 1):
                for name, llm in made.items():
                    prompt = seconds(llm, streams, length, output=1, seed=2 * turn)
                    whole = seconds(llm, streams, length, output=OUTPUT, seed=2 * turn + 1)
                    rates[name].append(streams * (OUTPUT - 1) / (whole - prompt))
            per_s = {name: statistics.median(each[1:]) for name, each in rates.items()}
            row = {"dtype": dtype, "streams": streams, "prompt": length, "tokens_per_s": per_s, "rounds": rates}
            found.append(row)
            print(dtype, streams, length, {name: round(rate, 1) for name, rate in per_s.items()}, file=sys.stderr, flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    asked = parser.parse_args()
    before = os.getloadavg()[0]
    rows = [row for dtype in asked.dtype for row in measured(dtype, rounds=asked.rounds)]
    facts = {
        "command": " ".join(sys.argv),
        "commit": asked.commit,
        "threads": torch.get_num_threads(),
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
    }
    print(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
