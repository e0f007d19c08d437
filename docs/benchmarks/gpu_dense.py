"""Dense models on one GPU: checks that graphs and overlap change no token, then times workloads with and without them.

python docs/benchmarks/gpu_dense.py --workloads W2s W2 W5 > gpu-dense.json
python docs/benchmarks/gpu_dense.py --workloads W4 --attention-backend auto --sustained 5 > w4.json: and what part of the rate that
one layer's products have on the card right behind each workload, for so many seconds on end, its prompts had
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import torch

from enginery import LLM, SamplingParams
from enginery.bench.offline import bench_offline
from enginery.bench.workloads import Workload, find_workload, shapes
from enginery.config.schema import EngineOptions

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "no overlap": {"overlap": False},
    "no graphs": {"graphs": False},
    "eager, no overlap": {"graphs": False, "overlap": False},
    "torch operations": {"blocked_plugins": ("ops-triton",)},
}


def check(options: EngineOptions) -> bool:
    """Whether greedy float32 tokens of the embedded model are those of eager steps with the torch reference."""
    prompts = [[5 + row, 6, 7 + row] * (1 + 9 * row) for row in range(7)]
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    reference = EngineOptions(attention_backend="torch", graphs=False, overlap=False)
    answers = []
    for asked in (options, reference):
        small = dataclasses.replace(asked, dtype="float32", max_batch_requests=16, num_pages=512)
        with LLM(**vars(small)) as llm:
            answers.append([generation.token_ids for generation in llm.generate(prompts, params, progress=False)])
    return answers[0] == answers[1]


def products(shape: dict[str, Any]) -> list[tuple[int, int]]:
    """Columns and inner dims of a dense layer's four products."""
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    dim = shape.get("head_dim", hidden // heads)
    return [((heads + 2 * shape["num_key_value_heads"]) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)]


def prompts_flop(shape: dict[str, Any], workload: Workload) -> float:
    """Operations of all layers over prompts that share nothing: products, and two of attention for each key that a token sees."""
    tokens = sum(length for length, _ in workload.lengths)
    seen = sum(length * (length + 1) // 2 for length, _ in workload.lengths)
    heads = shape["num_attention_heads"]
    attention = 4 * seen * heads * shape.get("head_dim", shape["hidden_size"] // heads)
    return float(shape["num_hidden_layers"] * (2 * tokens * sum(n * k for n, k in products(shape)) + attention))


def sustained_flop_per_s(shape: dict[str, Any], *, seconds: float, rows: int = 16384, device: str = "cuda") -> float:
    """Operations a second of one layer's products in bfloat16, again and again for so long. rows: of a prompt step."""
    sizes = products(shape)
    drawn = [[torch.randn(count, k, device=device).bfloat16() for count in (rows, n)] for n, k in sizes]
    began, passes = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for x, weight in drawn:
            torch.nn.functional.linear(x, weight)
        torch.zeros(1, device=device).item()  # all have ended
        passes += 1
    return passes * 2 * rows * sum(n * k for n, k in sizes) / (time.perf_counter() - began)


def main() -> None:
    """Print the reports as JSON; what is measured goes to stderr as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", default=["W2s", "W2"])
    parser.add_argument("--variants", nargs="+", default=["full"], choices=VARIANTS)
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--prefill-attention-backend")
    parser.add_argument("--decode-attention-backend")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--sustained", type=float, metavar="SECONDS", help="of workloads of prompts, dense shapes")
    asked = vars(parser.parse_args())
    names, variants, repeats, seconds = (asked.pop(name) for name in ("workloads", "variants", "repeats", "sustained"))
    options = EngineOptions(dtype="bfloat16", **asked)
    same = check(options)
    print("greedy tokens are the reference's:", same, file=sys.stderr)
    reports = []
    for name in names:
        for variant in variants:
            chosen = dataclasses.replace(options, **VARIANTS[variant])
            reports.append({"variant": variant, **bench_offline([find_workload(name)], chosen, repeats=repeats)})
            (row,) = reports[-1]["rows"]
            if seconds:
                shape = shapes()[find_workload(name).shape]
                rate = sustained_flop_per_s(shape, seconds=seconds)
                part = prompts_flop(shape, find_workload(name)) / row["measured"]["total_s"] / rate
                row["derived"] |= {"sustained_flop_per_s": rate, "prompts_part_of_sustained": part}
            print(name, variant, row["measured"], row["derived"], file=sys.stderr, flush=True)
    json.dump({"tokens_are_the_references": same, "reports": reports}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
