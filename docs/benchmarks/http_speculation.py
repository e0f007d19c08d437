"""`engine bench serve` at 16 requests a second, plain and with a draft model: `python docs/benchmarks/http_speculation.py > FILE`.

Llama-3.1-8B's shape and the EAGLE-3 head of random weights of `gpu_speculation.py`, 512 tokens in, 128 out, streamed. Guesses are
right by chance, each three times of four if those before it are. A server has no option for that: `Engine.build` is told in each
process, by a `sitecustomize.py`. The load comes twice to each server, and the first time does not count: steps that verify are
captured when they are first needed.

Where there is no GPU: `--device cpu --attention torch --shape llama-125m --rate 1 --requests 4`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_speculation
import torch

from enginery.bench.workloads import write_tokenizer
from enginery.cli.bench_serve import LoadFlags, bench_started

FORCED = """
import functools
from enginery.engine.engine import Engine
Engine.build = functools.partial(Engine.build, forced_rates={rates})
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rate", type=float, default=16.0)
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--shape", default=gpu_speculation.SHAPE)
    parser.add_argument("--runs", nargs="+", default=["plain", "3", "auto"], help="plain, or what --draft-length is")
    asked = parser.parse_args()
    load = LoadFlags(rate=[asked.rate] * 2, requests=asked.requests)
    rows, device = [], ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = gpu_speculation.options(folder, asked.device, asked.attention, shape=asked.shape)
        drafting = dataclasses.replace(options, max_model_len=2048, prefill_fraction=None)
        write_tokenizer(folder / "target")
        (folder / "forced").mkdir()
        for run in asked.runs:
            changes: dict[str, Any] = {"draft_length": run}
            rates = (gpu_speculation.RATES[0],) * (7 if run == "auto" else 3)
            (folder / "forced" / "sitecustomize.py").write_text("" if run == "plain" else FORCED.format(rates=rates))
            os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "forced"), *sys.path])
            if run == "plain":
                changes = {"drafter": "off", "draft_model": None, "draft_length": "auto"}
            report = bench_started(load, dataclasses.replace(drafting, **changes), None)
            device, (_, row) = report["device"], report["rows"]
            rows.append({"run": run, **row, "what": {**row["what"], "model": asked.shape}})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    about = {
        "command": " ".join(sys.argv),
        "commit": asked.commit,
        "device": device,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "rates": gpu_speculation.RATES,
    }
    print(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
