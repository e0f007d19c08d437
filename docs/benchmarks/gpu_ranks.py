"""Ranks on GPUs of one host: tokens checked against one rank's, goals of 2 and 4 GPUs, and sums within norms beside NCCL's.

python docs/benchmarks/gpu_ranks.py --ranks 2 4 > gpu-ranks.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp

from enginery import LLM, SamplingParams
from enginery.bench.offline import free_memory, run_workload
from enginery.bench.workloads import Workload, find_workload, shapes
from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import ParallelFacts
from enginery.worker.paths.decode_graphs import CudaCapture
from enginery.worker.ranks.collectives import HeadColumns
from enginery.worker.ranks.gloo import Group, Standing, open_store
from enginery.worker.ranks.nccl import DeviceGroup
from enginery.worker.ranks.peers import Peers
from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.peer_ops import FEW_BYTES, NUM_BYTES, TritonPeerOps

BIG = {
    **shapes()["llama-3.1-8b"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
GOALS = {  # output tokens a second by workload and number of GPUs; SGLang 0.5.12 on H200s of one host had 304, 400, 17,213, 24,565
    ("W2", 2): 390,
    ("W2", 4): 560,
    ("W3", 2): 20_000,
    ("W3", 4): 36_000,
    ("70B, one stream", 2): 56,
    ("70B, 64 streams", 2): 1_950,
}
KERNELS = {"kernel": FEW_BYTES, "sent to all": 1 << 20, "by shares": 0}  # `few_bytes`, of which two ranks know nothing
ROWS, COLUMNS, EPS = (1, 8, 16, 32, 64, 256, 512, 4096, 16384), 8192, 1e-5
BEST_ROWS, VOCABULARY = (1, 8, 64, 256), 128_256
REPEATS, SUMS_IN_A_GRAPH = 20, 16


def tokens_of(options: EngineOptions) -> list[list[int]]:
    """Greedy float32 tokens of the embedded model, of prompts of several lengths."""
    prompts = [[5 + row, 6, 7 + row] * (1 + 9 * row) for row in range(7)]
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    small = dataclasses.replace(options, dtype="float32", max_batch_requests=16, num_pages=512)
    with LLM(**vars(small)) as llm:
        return [list(generation.token_ids) for generation in llm.generate(prompts, params, progress=False)]


class Loads(NamedTuple):
    """What one engine is given: workloads by name, of a shape's config.json and on a mesh."""

    workloads: dict[str, Workload]
    config: dict[str, object]
    mesh: dict[str, int]


def measured(loads: Loads, options: EngineOptions, *, repeats: int) -> Iterator[dict[str, Any]]:
    """Of each workload the seconds of all passes, and tokens a second of the median one."""
    free_memory()
    longest = max(sum(lengths) for workload in loads.workloads.values() for lengths in workload.lengths)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(loads.config))
        asked = dataclasses.replace(options, model=folder, load_format="dummy", max_model_len=longest + 1, **loads.mesh)
        with LLM(**vars(asked)) as llm:
            for name, workload in loads.workloads.items():
                runs = run_workload(llm, workload, repeats=repeats)
                middle = sorted(runs)[(len(runs) - 1) // 2]
                yield {
                    "workload": name,
                    "runs_s": [run.total_s for run in runs],
                    "output_tokens_per_s": middle.output_tokens / middle.total_s,
                    "prompt_tokens_per_s": middle.prompt_tokens / middle.total_s,
                }


def loads_of(ranks: int, only: Collection[str] | None) -> Iterator[Loads]:
    """only: names of workloads; None: all."""
    small, tensor, prompts = shapes()["llama-3.1-8b"], {"tp": ranks}, ((32768, 1),) * 4
    every = [Loads({name: find_workload(name)}, small, tensor) for name in ("W2", "W3")]
    if ranks > 1:
        big = {"70B, one stream": find_workload("W2"), "70B, 64 streams": find_workload("llama-3.1-8b:64")}
        every.append(Loads(big, BIG, tensor))
    if ranks <= 2:
        long = Workload(name="", shape="", summary="prompts of 32k in chunks of 8,192", lengths=prompts)
        every.append(Loads({"32k prompts": long}, small, {"pp": ranks, "max_batch_tokens": 8192}))
    lanes = {"dp_attention": ranks, "ep": True} if ranks > 1 else {}
    every.append(Loads({"V2-Lite in lanes": find_workload("W7")}, shapes()["deepseek-v2-lite"], lanes))
    for loads in every:
        wanted = {name: workload for name, workload in loads.workloads.items() if only is None or name in only}
        if wanted:
            yield loads._replace(workloads=wanted)


def sums_of_rank(rank: int, ranks: int, meeting: str, results: Any) -> None:
    """Microseconds of a sum with the add and norm behind it, in graphs, by NCCL and by the kernel; checked against float64."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store, standing = open_store(meeting, ranks), Standing()
    host = Group(store, "host", rank=rank, size=ranks, standing=standing)
    group = DeviceGroup(store, "device", rank=rank, size=ranks, standing=standing, device=device)
    peers, kernels = Peers(store, host, ParallelFacts(tensor_rank=rank, tensor_size=ranks), device), dict[str, TritonPeerOps]()
    if peers.are_in_reach():
        for name, few in KERNELS.items() if ranks > 2 else [("kernel", FEW_BYTES)]:
            kernels[name] = TritonPeerOps(peers.memory(NUM_BYTES), dependent_launch=True, few_bytes=few)
    ops, capture = TritonOps(dependent_launch=True), CudaCapture(device)
    weight = torch.ones(COLUMNS, dtype=torch.bfloat16, device=device)
    for rows in ROWS:
        torch.manual_seed(rows)
        partials = [torch.randn(rows, COLUMNS, device=device).bfloat16() for _ in range(ranks)]
        own, residual = partials[rank], torch.zeros(rows, COLUMNS, dtype=torch.bfloat16, device=device)

        def by_nccl(own: torch.Tensor = own, residual: torch.Tensor = residual) -> torch.Tensor:
            return ops.add_rms_norm(group.sum(own.clone()), residual, weight, EPS)

        ways: dict[str, Callable[[], torch.Tensor]] = {"NCCL": by_nccl}
        for name, kernel in kernels.items():
            if kernel.takes_sum(own, residual, weight):
                ways[name] = functools.partial(kernel.add_rms_norm, own, residual, weight, EPS)
        total = sum(each.double() for each in partials)
        wanted = total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt()
        row: dict[str, Any] = {"ranks": ranks, "rows": rows, "bytes": own.nbytes}
        for name, way in ways.items():
            residual.zero_()
            row[f"{name}: largest error"] = float((way().double() - wanted).abs().max())
            graph = capture(lambda way=way: [way() for _ in range(SUMS_IN_A_GRAPH)] and None)
            row[f"{name}, us"] = _replayed_us(graph.replay, group) / SUMS_IN_A_GRAPH
        if rank == 0:
            results.append(row)
            print(row, file=sys.stderr, flush=True)
    for rows in BEST_ROWS if kernels else ():
        torch.manual_seed(rows)
        logits, width = torch.randn(rows, VOCABULARY, device=device).bfloat16(), VOCABULARY // ranks
        group.from_first(logits)
        own, row = logits[:, rank * width :][:, :width].contiguous(), {"ranks": ranks, "rows": rows, "best of columns": VOCABULARY}
        for name, peer_ops in (("NCCL", None), ("kernel", kernels["kernel"])):
            best = functools.partial(HeadColumns(group, VOCABULARY, peer_ops).best, own)
            row[f"{name}: finds the best"] = bool((best() == logits.argmax(-1)).all())
            graph = capture(lambda best=best: [best() for _ in range(SUMS_IN_A_GRAPH)] and None)
            row[f"{name}, us"] = _replayed_us(graph.replay, group) / SUMS_IN_A_GRAPH
        if rank == 0:
            results.append(row)
            print(row, file=sys.stderr, flush=True)


def _replayed_us(replay: Callable[[], None], group: DeviceGroup) -> float:
    """Median of replays that all ranks begin together."""
    found = []
    for _ in range(REPEATS):
        group.sum(torch.zeros(1, device=group.device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        found.append(1000 * begin.elapsed_time(end))
    return statistics.median(found)


def sums(ranks: int) -> list[dict[str, Any]]:
    """A row for each size."""
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.list()
        mp.spawn(sums_of_rank, (ranks, f"{folder}/meeting", results), nprocs=ranks)
        return list(results)


def main() -> None:
    """Print the report as JSON; what is measured goes to stderr as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", help="names of workloads; 'sums' for the kernels")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", action=argparse.BooleanOptionalAction, default=True, help="compare tokens with one rank's")
    asked = parser.parse_args()
    present, options = torch.cuda.device_count(), EngineOptions(dtype="bfloat16", device="cuda")
    if max(asked.ranks) > present:
        parser.error(f"--ranks {max(asked.ranks)} needs as many GPUs, and there are {present}")
    tokens, rows, table = dict[int, bool](), [], []
    alone = tokens_of(options) if asked.tokens else []
    for ranks in asked.ranks:
        if asked.tokens:
            tokens[ranks] = ranks == 1 or tokens_of(dataclasses.replace(options, tp=ranks)) == alone
            print(f"{ranks} ranks: greedy tokens are one rank's: {tokens[ranks]}", file=sys.stderr, flush=True)
        if ranks > 1 and (not asked.only or "sums" in asked.only):
            table += sums(ranks)
        for loads in loads_of(ranks, asked.only):
            began_s = time.perf_counter()
            for row in measured(loads, options, repeats=asked.repeats):
                rows.append({"ranks": ranks, "goal": GOALS.get((row["workload"], ranks)), **row})
                print(rows[-1], f"{time.perf_counter() - began_s:.0f} s with its start", file=sys.stderr, flush=True)
    device = f"{present} x {torch.cuda.get_device_name()}"
    report = {"device": device, "torch": torch.__version__, "tokens_are_one_ranks": tokens, "rows": rows, "sums": table}
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
