"""Ranks on GPUs of one host: tokens checked against one rank's, goals of 2 and 4 GPUs, and sums within norms beside NCCL's.

python docs/benchmarks/gpu_ranks.py --ranks 2 4 > gpu-ranks.json
python docs/benchmarks/gpu_ranks.py --ranks 4 --sweep > sums.json: sums alone, by size of blocks, programs, warps and blocks ahead
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
from enginery.worker.paths.cuda_capture import CudaCapture
from enginery.worker.ranks.collectives import HeadColumns
from enginery.worker.ranks.gloo import Group, Standing, open_store
from enginery.worker.ranks.nccl import DeviceGroup
from enginery.worker.ranks.peers import Peers
from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.peer_ops import BLOCKS_OF_MORE, FEW_BYTES, NUM_BYTES, Blocks, TritonPeerOps
from enginery_ops_triton.sent_rows import PART_BYTES

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
WIDTHS = {8192: (1, 8, 16, 32, 64, 256, 512, 4096, 16384), 4096: (64, 256, 512, 2048, 16384)}  # rows by their columns
BEST_ROWS, VOCABULARY, EPS = (1, 8, 64, 256), 128_256, 1e-5
REPEATS, SUMS_IN_A_GRAPH = 20, 16
SWEPT_SIZES = ((16384, 4096), (512, 4096), (256, 4096), (2048, 4096), (16384, 8192))
BIG_BYTES, BIG_REPEATS, BIG_SUMS_IN_A_GRAPH = 32 << 20, 7, 4  # in a sweep, which is to end within a minute
HOST_CYCLES = 20_000_000  # of the device, in which the host launches what is measured
KB = 1024
EARLY_SIZES = tuple(
    (rows, columns, inner)
    for rows, columns in ((16384, 4096), (8192, 4096), (4096, 4096), (8192, 8192), (16384, 8192))
    for inner in (4096, 14336)
)
SWEPT_OF_TWO = (
    *(Blocks(ahead=ahead) for ahead in (1, 2, 3)),
    *(Blocks(most_warps=8, ahead=ahead) for ahead in (1, 2)),
    *(Blocks(most_programs=programs, most_warps=4, ahead=ahead) for programs in (384, 512) for ahead in (1, 2)),
    Blocks(most_programs=512, most_warps=8),
    *(Blocks(8 * KB, 512, ahead=ahead, most_warps=8) for ahead in (1, 2, 3)),
    *(Blocks(8 * KB, 512, ahead=ahead, most_warps=4) for ahead in (1, 2)),
    Blocks(8 * KB, 384, most_warps=8),
    Blocks(32 * KB, 256),
)
SWEPT_OF_MORE = (
    *(BLOCKS_OF_MORE._replace(ahead=ahead) for ahead in (1, 2, 3)),
    Blocks(most_programs=128),
    Blocks(most_programs=256),
    Blocks(most_programs=384, most_warps=4),
    *(Blocks(8 * KB, 384, ahead=ahead, most_warps=8) for ahead in (1, 2)),
    *(Blocks(8 * KB, 512, ahead=ahead, most_warps=4) for ahead in (1, 2, 3)),
    Blocks(8 * KB, 256, most_warps=8),
    *(Blocks(32 * KB, 128, ahead=ahead) for ahead in (1, 2)),
)


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
        staged = {"32k prompts": long, "64 streams in stages": find_workload("llama-3.1-8b:64")}
        every.append(Loads(staged, small, {"pp": ranks, "max_batch_tokens": 8192}))
    lanes = {"dp_attention": ranks, "ep": True} if ranks > 1 else {}
    every.append(Loads({"V2-Lite in lanes": find_workload("W7")}, shapes()["deepseek-v2-lite"], lanes))
    for loads in every:
        wanted = {name: workload for name, workload in loads.workloads.items() if only is None or name in only}
        if wanted:
            yield loads._replace(workloads=wanted)


class Ranks:
    """This rank among all of them, each on a GPU."""

    def __init__(self, rank: int, size: int, meeting: str) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        store, standing = open_store(meeting, size), Standing()
        host = Group(store, "host", rank=rank, size=size, standing=standing)
        self.group = DeviceGroup(store, "device", rank=rank, size=size, standing=standing, device=self.device)
        self.peers = Peers(store, host, ParallelFacts(tensor_rank=rank, tensor_size=size), self.device)
        self.ops, self.capture = TritonOps(dependent_launch=True), CudaCapture(self.device)

    def tell(self, row: dict[str, Any], results: Any) -> None:
        """At once, by the first rank."""
        if self.rank == 0:
            results.append(row)
            print(row, file=sys.stderr, flush=True)

    def replayed_us(self, way: Callable[[], object], *, repeats: int = REPEATS, times: int = SUMS_IN_A_GRAPH) -> float:
        """Of one of so many in a graph: median of replays that all ranks begin together."""
        graph = self.capture(lambda: [way() for _ in range(times)] and None)
        return self._median_us(graph.replay, repeats=repeats) / times

    def run_us(self, way: Callable[[], object], *, repeats: int = BIG_REPEATS, times: int = SUMS_IN_A_GRAPH) -> float:
        """The same of one of so many in a row, which the host has launched before the device begins."""
        return self._median_us(lambda: [way() for _ in range(times)], repeats=repeats, wait_cycles=HOST_CYCLES) / times

    def _median_us(self, run: Callable[[], object], *, repeats: int, wait_cycles: int = 0) -> float:
        """wait_cycles: of the device, before it begins."""
        found = []
        for _ in range(repeats):
            self.group.sum(torch.zeros(1, device=self.device))
            if wait_cycles:
                torch.cuda._sleep(wait_cycles)  # type: ignore[no-untyped-call]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            found.append(1000 * begin.elapsed_time(end))
        return statistics.median(found)


class Sum:
    """Rows of all ranks whose sum is added to a residual of zeros and normed."""

    def __init__(self, ranks: Ranks, rows: int, columns: int) -> None:
        self._ranks = ranks
        torch.manual_seed(rows)
        total = torch.zeros(rows, columns, dtype=torch.float64, device=ranks.device)
        for rank in range(ranks.size):
            partial = torch.randn(rows, columns, device=ranks.device).bfloat16()
            total += partial
            if rank == ranks.rank:
                self.own = partial
        self.residual, self.weight = torch.zeros_like(self.own), torch.ones(columns, dtype=torch.bfloat16, device=ranks.device)
        self._wanted = total.mul_((total.square().mean(-1, keepdim=True) + EPS).rsqrt())

    def by_nccl(self) -> torch.Tensor:
        return self._ranks.ops.add_rms_norm(self._ranks.group.sum(self.own.clone()), self.residual, self.weight, EPS)

    def by(self, kernel: TritonPeerOps) -> torch.Tensor:
        return kernel.add_rms_norm(self.own, self.residual, self.weight, EPS)

    def compared(self, way: Callable[[], torch.Tensor]) -> tuple[float, bool]:
        """The largest difference from float64, and whether the first rank gives the same bits."""
        self.residual.zero_()
        self._ranks.group.sum(torch.zeros(1, device=self._ranks.device))  # kernels that take other blocks of one memory meet first
        normed = way()
        both = torch.stack((normed, self.residual))
        self._ranks.group.from_first(both)
        same = bool((both[0] == normed).all() & (both[1] == self.residual).all())
        return float(normed.double().sub_(self._wanted).abs_().max()), same


def early_sum(ranks: Ranks, rows: int, columns: int, inner: int, kernel: TritonPeerOps) -> dict[str, Any]:
    """Microseconds of a product alone, with its sum behind it, and with one whose rows leave early; whether these two are alike."""
    torch.manual_seed(ranks.rank)
    product = ranks.ops.bind_linear(torch.randn(columns, inner, device=ranks.device).bfloat16(), None)
    begins, x = kernel.summed_early(product, columns), torch.randn(rows, inner, device=ranks.device).bfloat16() * inner**-0.5
    residual, weight = (
        torch.zeros(rows, columns, dtype=torch.bfloat16, device=ranks.device),
        torch.ones(columns, device=ranks.device),
    )
    weight = weight.bfloat16()

    def behind() -> torch.Tensor:
        return kernel.add_rms_norm(product(x), residual, weight, EPS)

    def early() -> torch.Tensor:
        return kernel.add_rms_norm(begins(x), residual, weight, EPS)

    row: dict[str, Any] = {"rows": rows, "columns": columns, "inner": inner}
    for name, way in {
        "product, us": functools.partial(product, x),
        "and its sum, us": behind,
        "sum begun early, us": early,
    }.items():
        way()
        row[name] = round(ranks.run_us(way), 1)
    found = []
    for way in (behind, early):
        residual.zero_()
        found += [way().double(), residual.double()]
    largest = max(float((one - other).abs().max()) for one, other in zip(found[:2], found[2:], strict=True))
    everyone = torch.stack(found[2:])
    ranks.group.from_first(everyone)
    return {**row, "largest difference": largest, "same bits": bool((everyone == torch.stack(found[2:])).all())}


def sums_of_rank(rank: int, size: int, meeting: str, results: Any) -> None:
    """Microseconds of a sum with the add and norm behind it, in graphs, by NCCL and by the kernel; checked against float64."""
    ranks, kernels = Ranks(rank, size, meeting), dict[str, TritonPeerOps]()
    if ranks.peers.are_in_reach():
        for name, few in KERNELS.items() if size > 2 else [("kernel", FEW_BYTES)]:
            memory = ranks.peers.memory(NUM_BYTES + PART_BYTES * (size == 2))
            kernels[name] = TritonPeerOps(memory, dependent_launch=True, few_bytes=few)
    for columns, rows in ((columns, rows) for columns, each in WIDTHS.items() for rows in each):
        case = Sum(ranks, rows, columns)
        ways: dict[str, Callable[[], torch.Tensor]] = {"NCCL": case.by_nccl}
        for name, kernel in kernels.items():
            if kernel.takes_sum(case.own, case.residual, case.weight):
                ways[name] = functools.partial(case.by, kernel)
        row: dict[str, Any] = {"ranks": size, "rows": rows, "columns": columns, "bytes": case.own.nbytes}
        for name, way in ways.items():
            row[f"{name}: largest error"], row[f"{name}: same bits"] = case.compared(way)
            row[f"{name}, us"] = ranks.replayed_us(way)
        ranks.tell(row, results)
    for rows, columns, inner in EARLY_SIZES if kernels and size == 2 else ():
        ranks.tell(early_sum(ranks, rows, columns, inner // size, kernels["kernel"]), results)
    for rows in BEST_ROWS if kernels else ():
        torch.manual_seed(rows)
        logits, width = torch.randn(rows, VOCABULARY, device=ranks.device).bfloat16(), VOCABULARY // size
        ranks.group.from_first(logits)
        own, row = logits[:, rank * width :][:, :width].contiguous(), {"ranks": size, "rows": rows, "best of columns": VOCABULARY}
        for name, peer_ops in (("NCCL", None), ("kernel", kernels["kernel"])):
            best = functools.partial(HeadColumns(ranks.group, VOCABULARY, peer_ops).best, own)
            row[f"{name}: finds the best"] = bool((best() == logits.argmax(-1)).all())
            row[f"{name}, us"] = ranks.replayed_us(best)
        ranks.tell(row, results)


def sweep_of_rank(rank: int, size: int, meeting: str, results: Any) -> None:
    """The same in all the blocks of a sweep, which share one memory."""
    began_s, ranks = time.perf_counter(), Ranks(rank, size, meeting)
    swept = SWEPT_OF_TWO if size == 2 else SWEPT_OF_MORE
    memory = ranks.peers.memory(max(blocks.part_bytes for blocks in swept))
    for rows, columns in SWEPT_SIZES:
        case = Sum(ranks, rows, columns)
        often = (BIG_REPEATS, BIG_SUMS_IN_A_GRAPH) if case.own.nbytes > BIG_BYTES else (REPEATS, SUMS_IN_A_GRAPH)
        ways: list[tuple[dict[str, Any], Callable[[], torch.Tensor]]] = [({"way": "NCCL"}, case.by_nccl)]
        for blocks in swept:
            kernel = TritonPeerOps(memory, dependent_launch=True, few_bytes=0, blocks=blocks)
            ways.append((blocks._asdict(), functools.partial(case.by, kernel)))
        for named, way in ways:
            error, same = case.compared(way)
            took_us = round(ranks.replayed_us(way, repeats=often[0], times=often[1]), 1)
            row = {
                "ranks": size,
                "rows": rows,
                "columns": columns,
                **named,
                "us": took_us,
                "error": round(error, 4),
                "same bits": same,
            }
            ranks.tell({**row, "at_s": round(time.perf_counter() - began_s, 1)}, results)


def sums(ranks: int, *, of_rank: Callable[[int, int, str, Any], None] = sums_of_rank) -> list[dict[str, Any]]:
    """A row for each size."""
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.list()
        mp.spawn(of_rank, (ranks, f"{folder}/meeting", results), nprocs=ranks)
        return list(results)


def main() -> None:
    """Print the report as JSON; what is measured goes to stderr as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", help="names of workloads; 'sums' for the kernels")
    parser.add_argument("--sweep", action="store_true", help="sums alone, in blocks of many kinds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", action=argparse.BooleanOptionalAction, default=True, help="compare tokens with one rank's")
    asked = parser.parse_args()
    present, options = torch.cuda.device_count(), EngineOptions(dtype="bfloat16", device="cuda")
    if max(asked.ranks) > present:
        parser.error(f"--ranks {max(asked.ranks)} needs as many GPUs, and there are {present}")
    tokens, rows, table = dict[int, bool](), [], []
    alone = tokens_of(options) if asked.tokens and not asked.sweep else []
    for ranks in asked.ranks:
        if asked.sweep:
            table += sums(ranks, of_rank=sweep_of_rank)
            continue
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
