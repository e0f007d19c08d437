"""Dense models on one GPU: checks that graphs and overlap change no token, then times workloads with and without them.

python docs/benchmarks/gpu_dense.py --workloads W2s W2 > gpu-dense.json
"""

from __future__ import annotations

import argparse
import gc
import json
import sys

import torch

from enginery import LLM, SamplingParams
from enginery.run.bench import report, run_workload, serving
from enginery.run.workloads import find_workload

VARIANTS = {
    "full": {},
    "no overlap": {"overlap": False},
    "no graphs": {"graphs": False},
    "eager, no overlap": {"graphs": False, "overlap": False},
    "torch operations": {"blocked_plugins": ("ops-triton",)},
}


def check(attention: str) -> bool:
    """Whether greedy float32 tokens of the embedded model are those of eager steps with the torch reference."""
    prompts = [[5 + row, 6, 7 + row] * (1 + 9 * row) for row in range(7)]
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    answers = []
    for options in ({"attention_backend": attention}, {"attention_backend": "torch", "graphs": False, "overlap": False}):
        with LLM(dtype="float32", max_batch_requests=16, num_pages=512, **options) as llm:
            answers.append([generation.token_ids for generation in llm.generate(prompts, params, progress=False)])
    return answers[0] == answers[1]


def measure(name: str, variant: str, *, attention: str, repeats: int) -> dict[str, object]:
    """One workload with random bf16 weights."""
    workload = find_workload(name)
    with serving(workload, dtype="bfloat16", attention_backend=attention, **VARIANTS[variant]) as llm:
        measured = {"variant": variant, **report(llm, workload, run_workload(llm, workload, repeats=repeats))}
        measured["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        measured["memory_plan"] = llm.facts.memory_plan
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return measured


def main() -> None:
    """Print JSON; what is measured goes to stderr as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", default=["W2s", "W2"])
    parser.add_argument("--variants", nargs="+", default=["full"], choices=VARIANTS)
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    same = check(asked.attention)
    print("greedy tokens are the reference's:", same, file=sys.stderr)
    runs = []
    for name in asked.workloads:
        for variant in asked.variants:
            runs.append(measure(name, variant, attention=asked.attention, repeats=asked.repeats))
            print(name, variant, round(float(str(runs[-1]["output_tokens_per_s"])), 1), "out tok/s", file=sys.stderr, flush=True)
    json.dump({"command": " ".join(sys.argv), "tokens_are_the_references": same, "runs": runs}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
