"""Dense models on one GPU: checks that graphs and overlap change no token, then times workloads with and without them.

python docs/benchmarks/gpu_dense.py --workloads W2s W2 W5 > gpu-dense.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from enginery import LLM, SamplingParams
from enginery.bench.offline import bench_offline
from enginery.bench.workloads import find_workload
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


def main() -> None:
    """Print the reports as JSON; what is measured goes to stderr as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", default=["W2s", "W2"])
    parser.add_argument("--variants", nargs="+", default=["full"], choices=VARIANTS)
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--prefill-attention-backend")
    parser.add_argument("--decode-attention-backend")
    parser.add_argument("--repeats", type=int, default=2)
    asked = vars(parser.parse_args())
    names, variants, repeats = (asked.pop(name) for name in ("workloads", "variants", "repeats"))
    options = EngineOptions(dtype="bfloat16", **asked)
    same = check(options)
    print("greedy tokens are the reference's:", same, file=sys.stderr)
    reports = []
    for name in names:
        for variant in variants:
            chosen = dataclasses.replace(options, **VARIANTS[variant])
            reports.append({"variant": variant, **bench_offline([find_workload(name)], chosen, repeats=repeats)})
            (row,) = reports[-1]["rows"]
            print(name, variant, row["measured"], row["derived"], file=sys.stderr, flush=True)
    json.dump({"tokens_are_the_references": same, "reports": reports}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
