"""What a CPU does with the embedded model, compiled and not: `python docs/benchmarks/cpu_first_minute.py > FILE`.

Without is what runs where there was no compiler at installation: the plugins are left out. Both take turns, medians of some rounds.
`first_answer_s`: from start to end of a process, `engine generate` of one token. `tokens_per_s`: one stream of the embedded
model, 256 greedy tokens, after a pass that does not count; `drafting`: the same as `make serve` runs it, with --drafter auto.
`greedy_125m`: how many of 64 greedy tokens of eight prompts, 125M Llama of random weights, are the same with and without.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from enginery import LLM, SamplingParams
from enginery.bench.workloads import write_shape

VARIANTS: dict[str, tuple[str, ...]] = {"compiled": (), "without": ("ops-cpu", "attn-cpu")}
PROMPT = "Tell me a story about a fox named Mia."
GREEDY = SamplingParams(max_tokens=256, temperature=0, ignore_eos=True)


def first_answer_s(without: tuple[str, ...]) -> float:
    blocked = [word for name in without for word in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "enginery", "generate", PROMPT, "--max-tokens", "1", *blocked]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def tokens_per_s(llm: LLM) -> float:
    began = time.perf_counter()
    (answer,) = llm.generate([PROMPT], GREEDY, progress=False)
    return len(answer.token_ids) / (time.perf_counter() - began)


def greedy_tokens(folder: str, dtype: str, without: tuple[str, ...]) -> list[tuple[int, ...]]:
    llm = LLM(folder, load_format="dummy", dtype=dtype, blocked_plugins=without)
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(10, 30000, (8, 96), generator=generator).tolist()
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    return [tuple(answer.token_ids) for answer in llm.generate(prompts, params, progress=False)]


def equal_tokens(dtype: str) -> list[int]:
    """Of each prompt, how many tokens are the same until the first that is not."""
    with tempfile.TemporaryDirectory() as folder:
        shape = str(write_shape("llama-125m", Path(folder)))
        pairs = zip(*(greedy_tokens(shape, dtype, without) for without in VARIANTS.values()), strict=True)
        return [next((at for at, both in enumerate(zip(*pair, strict=True)) if len(set(both)) > 1), 64) for pair in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", default="unknown")
    asked = parser.parse_args()
    rows: dict[str, dict[str, list[float]]] = {name: {} for name in VARIANTS}
    kinds = {"tokens_per_s": "off", "drafting": "auto"}
    engines = {
        (name, kind): LLM(dtype="float32", blocked_plugins=without, drafter=drafter)
        for name, without in VARIANTS.items()
        for kind, drafter in kinds.items()
    }
    for llm in engines.values():
        tokens_per_s(llm)
    for _ in range(asked.rounds):
        for name, without in VARIANTS.items():
            rows[name].setdefault("first_answer_s", []).append(first_answer_s(without))
            for kind in kinds:
                rows[name].setdefault(kind, []).append(tokens_per_s(engines[name, kind]))
    report = {
        "command": " ".join(sys.argv),
        "commit": asked.commit,
        "device": f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "medians": {name: {what: statistics.median(found) for what, found in row.items()} for name, row in rows.items()},
        "all": rows,
        "greedy_125m": {dtype: equal_tokens(dtype) for dtype in ("float32", "bfloat16")},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
