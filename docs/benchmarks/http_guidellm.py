"""guidellm against `engine serve`, in turns with `engine bench serve` on the same load.

    python3 -m venv LOADGEN; LOADGEN/bin/pip install torch==2.13.0; LOADGEN/bin/pip install guidellm==0.8.1
    python docs/benchmarks/http_guidellm.py --guidellm LOADGEN/bin/guidellm --output FILE

guidellm sends synthetic text of so many tokens by the embedded model's tokenizer, `engine bench serve` random token ids. No file is
fetched. Exits with 1 if a request failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from enginery_weights_tiny import FOLDER

INPUT, OUTPUT = 128, 32
CONCURRENCY = {1: 24, 4: 64, 16: 160}  # requests at once: how many in all
RATE, RATE_S = 2, 20
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
COMMANDS: list[str] = []


@contextlib.contextmanager
def served() -> Iterator[str]:
    """URL of a server with the embedded model."""
    command = ["engine", "serve", "--port", "0", "--num-threads", "1", "--log-level", "warning"]
    COMMANDS.append(shlex.join(command))
    with subprocess.Popen(
        [sys.executable, "-m", "enginery", *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=OFFLINE
    ) as server:
        url = next(found[1] for line in server.stdout or () if (found := re.search(r"ready: \S+ at (http://\S+),", line)))
        yield url
        server.terminate()


def guidellm(program: Path, url: str, *, path: str, profile: str, requests: int, seed: int) -> dict[str, object]:
    """One of its runs, in its own numbers."""
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.json"
        options = {
            "backend": f"kind=openai_http,target={url},request_format={path}",
            "profile": profile,
            "constraint": f"kind=max_requests,count={requests}",
            "data": f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}",
            "tokenizer": f"kind=huggingface_auto,model={FOLDER}",
            "seed": f"kind=static,value={seed}",
            "output": f"kind=json,path={report}",
        }
        command = ["run", *(part for name, value in options.items() for part in (f"--{name}", value)), "--disable-console"]
        shown = shlex.join(["guidellm", *command]).replace(str(FOLDER), "FOLDER").replace(str(report), "REPORT").replace(url, "URL")
        COMMANDS.append(shown)
        subprocess.run([program, *command], check=True, env=OFFLINE, stdout=subprocess.DEVNULL, timeout=500)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics, measured = benchmark["metrics"], benchmark["scheduler_metrics"]
    seconds = measured["measure_end_time"] - measured["measure_start_time"]
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    times = {"ttft": "time_to_first_token_ms", "itl": "inter_token_latency_ms"}
    return {
        "client": f"guidellm {benchmark_version(program)}",
        "path": path,
        "load": profile,
        **{name: metrics["request_totals"][name] for name in ("successful", "errored", "incomplete")},
        "errors": [request["info"]["error"] for request in benchmark["requests"]["errored"]],
        "total_s": seconds,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds,
        **{
            f"{name}_{each}_ms": metrics[key]["successful"]["percentiles"][each]
            for name, key in times.items()
            for each in ("p50", "p99")
        },
    }


def benchmark_version(program: Path) -> str:
    return subprocess.run([program, "--version"], check=True, env=OFFLINE, capture_output=True, text=True).stdout.split()[-1]


def bench_serve(url: str, *, concurrency: int, requests: int) -> dict[str, object]:
    """Our own load generator's."""
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.json"
        lengths = ["--input-len", str(INPUT), "--output-len", str(OUTPUT)]
        command = ["bench", "serve", "--concurrency", str(concurrency), "--requests", str(requests), *lengths, "--url", url]
        COMMANDS.append(shlex.join(["engine", *command]).replace(url, "URL"))
        whole = [sys.executable, "-m", "enginery", *command, "--output", str(report)]
        subprocess.run(whole, check=True, env=OFFLINE, stdout=subprocess.DEVNULL, timeout=500)
        (row,) = json.loads(report.read_text())["rows"]
    measured, derived = row["measured"], row["derived"]
    return {
        "client": "engine bench serve",
        "path": "/v1/completions",
        "load": f"kind=concurrent,streams={concurrency}",
        "successful": requests - derived["errors"],
        "errored": derived["errors"],
        "incomplete": 0,
        "total_s": measured["total_s"],
        "output_tokens": row["details"]["output_tokens"],
        "output_tokens_per_s": derived["output_tokens_per_s"],
        **{f"{name}_{each}_ms": measured[f"{name}_{each}_s"] * 1000 for name in ("ttft", "itl") for each in ("p50", "p99")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    rows: list[dict[str, object]] = []
    with served() as url:
        bench_serve(url, concurrency=4, requests=8)  # warms up
        COMMANDS.pop()
        loads = [(turn, streams, count) for turn in range(asked.rounds) for streams, count in CONCURRENCY.items()]
        for seed, (_, streams, count) in enumerate(loads):  # a seed of its own, so that no prompt is cached from the load before
            profile = f"kind=concurrent,streams={streams}"
            rows.append(guidellm(asked.guidellm, url, path="/v1/completions", profile=profile, requests=count, seed=seed))
            rows.append(bench_serve(url, concurrency=streams, requests=count))
        for seed, profile in enumerate((f"kind=poisson,rate={RATE}", "kind=concurrent,streams=8"), len(loads)):
            count = RATE * RATE_S
            rows.append(guidellm(asked.guidellm, url, path="/v1/chat/completions", profile=profile, requests=count, seed=seed))
    for row in rows:
        print(json.dumps(row))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "commands": list(dict.fromkeys(COMMANDS)),
        "commit": commit,
        "device": f"{os.cpu_count()} CPU cores",
        "load average at the end": os.getloadavg()[1],
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in ("enginery", "torch")},
        "rows": rows,
    }
    asked.output.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(any(row["errored"] or row["incomplete"] for row in rows))


if __name__ == "__main__":
    main()
