"""Attention on a CPU, `cpu` beside `torch`: `python docs/benchmarks/kernels_cpu_attention.py --commit C > FILE`.

Each row is checked against float64 first. Then both backends take turns over all layers of a model, whose keys and values are more
than the caches hold where the contexts are long; the time is that of one layer, the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from enginery.api import (
    FULL,
    AttnLayerFacts,
    BackendContext,
    ForwardBatch,
    GlobalLayerId,
    KVGeometry,
    LayerSpec,
    LocalLayerId,
    Phase,
    View,
)
from enginery.kv.arena import DeviceArena
from enginery.kv.pool import TORCH_DTYPES, PagedKVPool
from enginery.kv.states import RecurrentStatePool
from enginery_attn_cpu import native_part
from enginery_attn_cpu.backend import CpuAttention
from enginery_attn_torch.backend import TorchAttention

PAGE = 16
SHAPES = {  # heads, layers: of the longest contexts of the larger model so many as are out of the caches' reach
    "125M Llama": (AttnLayerFacts(num_heads=12, num_kv_heads=4, head_dim=64), 12),
    "Llama-3.1-8B": (AttnLayerFacts(num_heads=32, num_kv_heads=8, head_dim=128), 3),
}
LOADS = [(requests, length) for requests in (1, 16) for length in (256, 2048, 8192)]
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of one length, of which a step computes the last `rows` tokens; their pages lie anywhere."""

    facts: AttnLayerFacts
    layers: int
    requests: int
    length: int
    dtype: str
    rows: int = 1

    @property
    def kv_bytes(self) -> int:
        """Of one layer."""
        facts = self.facts
        per_token = facts.num_kv_heads * (facts.head_dim + facts.value_dim) * TORCH_DTYPES[self.dtype].itemsize
        return self.requests * self.length * per_token


def contexts(load: Load) -> tuple[KVGeometry, PagedKVPool, ForwardBatch]:
    """Memory with random numbers, and a batch over it."""
    columns = -(-load.length // PAGE)
    geometry = KVGeometry(
        pages={FULL: load.requests * columns}, page_size=PAGE, layers=(load.facts,) * load.layers, dtype=load.dtype
    )
    pool = PagedKVPool(geometry, CPU)
    for index in range(load.layers):
        for pages in pool.layer(LocalLayerId(index)):
            pages.normal_()
    table = torch.randperm(load.requests * columns).view(load.requests, columns).to(torch.int32)
    total = load.requests * load.rows
    tokens, ones = torch.zeros(total, dtype=torch.int64), torch.ones(load.requests, dtype=torch.int32)
    batch = ForwardBatch(
        phase={1: Phase.DECODE, load.length: Phase.PREFILL}.get(load.rows, Phase.VERIFY),
        input_ids=tokens,
        positions=tokens,
        q_lens_cpu=ones * load.rows,
        kv_lens_cpu=ones * load.length,
        num_logits_cpu=ones * load.rows,
        seats_cpu=ones,
        views={FULL: View(slots=tokens, page_table_cpu=table)},
        decode_len=load.rows if load.rows < load.length else 1,
    )
    return geometry, pool, batch


def expected(load: Load, q: torch.Tensor, pool: PagedKVPool, batch: ForwardBatch) -> torch.Tensor:
    """Of the last request and the last layer, in float64: [rows, H, V]."""
    pages = batch.page_table_cpu[-1].long()
    k, v = (part[pages].flatten(0, 1)[: load.length].double() for part in pool.layer(LocalLayerId(load.layers - 1)))
    group = load.facts.num_heads // load.facts.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("shd,lhd->hsl", q[-load.rows :].double(), k) * load.facts.head_dim**-0.5
    ahead = torch.ones(load.rows, load.length, dtype=torch.bool).triu(1 + load.length - load.rows)
    return torch.einsum("hsl,lhv->shv", scores.masked_fill(ahead, float("-inf")).softmax(-1), v)


def measured(load: Load, *, rounds: int) -> dict[str, Any]:
    """Seconds a layer of each backend, seconds of its planning, and its error."""
    geometry, pool, batch = contexts(load)
    states, arena, dtype = RecurrentStatePool(geometry, CPU), DeviceArena(CPU), TORCH_DTYPES[load.dtype]
    total, facts = load.requests * load.rows, load.facts
    q = torch.randn(total, facts.num_heads, facts.head_dim).to(dtype)
    k = torch.zeros(total, facts.num_kv_heads, facts.head_dim, dtype=dtype)
    layers = [
        LayerSpec(global_id=GlobalLayerId(i), local_id=LocalLayerId(i), facts=facts, scale=facts.head_dim**-0.5)
        for i in range(load.layers)
    ]
    wanted = expected(load, q, pool, batch)
    runs: dict[str, Any] = {}
    for name, kind in (("torch", TorchAttention), ("cpu", CpuAttention)):
        context = BackendContext(instance=name, geometry=geometry, pool=pool, states=states, device=CPU, dtype=dtype, arena=arena)
        runs[name] = kind(context)
    times: dict[str, list[float]] = {name: [] for name in runs}
    planning: dict[str, list[float]] = {name: [] for name in runs}
    errors = {}
    for _ in range(rounds):
        for name, backend in runs.items():
            start = time.perf_counter()
            plan = backend.plan_forward_metadata(batch, False)
            planning[name].append(time.perf_counter() - start)
            out = torch.full((total, facts.num_heads, facts.value_dim), float("nan"), dtype=dtype)
            start = time.perf_counter()
            for layer in layers:
                backend.attend(q, k, k, layer, batch, plan, out)
            times[name].append((time.perf_counter() - start) / load.layers)
            errors[name] = float((out[-load.rows :].double() - wanted).norm() / wanted.norm())
    found = {}
    for name in runs:
        seconds = statistics.median(times[name])
        found[name] = {
            "seconds": seconds,
            "planning_seconds": statistics.median(planning[name]),
            "bytes_per_s": load.kv_bytes / seconds,
            "relative_error": errors[name],
        }
    return found


def rows(models: list[str], *, threads: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """One of each load."""
    for model in models:
        facts, layers = SHAPES[model]
        for dtype in ("bfloat16", "float32"):
            for requests, length in LOADS:
                for count in threads:
                    for tokens in (1, 4, length) if (requests, length) == (1, 2048) else (1,):
                        torch.set_num_threads(count)
                        load = Load(facts=facts, layers=layers, requests=requests, length=length, dtype=dtype, rows=tokens)
                        found = measured(load, rounds=max(3, rounds // (1 + requests * length // 8192)))
                        what = {"model": model, "dtype": dtype, "requests": requests, "keys": length, "rows": tokens}
                        yield what | {"threads": count} | found


def cpu_name() -> str:
    """As Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--model", choices=SHAPES, action="append", help="all if left out")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    asked = parser.parse_args()
    torch.manual_seed(0)
    before, found = os.getloadavg()[0], []
    for row in rows(asked.model or list(SHAPES), threads=asked.threads, rounds=asked.rounds):
        found.append(row)
        mine, theirs = row["cpu"], row["torch"]
        seconds = theirs["seconds"], mine["seconds"]
        times = f"torch {seconds[0] * 1e6:.0f} us, cpu {seconds[1] * 1e6:.0f} us, {seconds[0] / seconds[1]:.2f} x"
        errors = f"error {mine['relative_error']:.1e}, torch's {theirs['relative_error']:.1e}"
        print(
            *(row[name] for name in ("model", "dtype", "requests", "keys", "rows", "threads")),
            f"{times}, {mine['bytes_per_s'] / 1e9:.1f} GB/s, {errors}",
            file=sys.stderr,
            flush=True,
        )
    assert native_part.kernels is not None, "the compiled part is there"
    facts = {
        "command": " ".join(sys.argv),
        "commit": asked.commit,
        "device": cpu_name(),
        "load_average": {"before": before, "after": os.getloadavg()[0]},
        "instruction_set": native_part.kernels.isa,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
    }
    print(json.dumps({**facts, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
