"""The attention kernels of enginery-attn-triton on a CUDA device: `python docs/benchmarks/kernels_triton_attention.py > FILE`.

Numbers are checked first, against float64, then decoding is timed as bytes of keys and values over the time of one replay of a
graph, and prefill as multiply-adds that causality leaves. Beside them the read bandwidth and matrix product of the same device, and
what the host needs to plan a captured decoding step. Keys that requests share are counted once for each: the rate can be more than
the memory's. With --verify alone: decoding and verifying of requests whose lengths the device knows, with their times alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from enginery.api import FULL, AttnLayerFacts, ForwardBatch, LatentFacts, Phase, View
from enginery_attn_triton.launch import Memory, Scores, run_decode, run_prefill
from enginery_attn_triton.plan import GraphState, Split, Tiles, sharing, split_decoding, tiles_of
from enginery_attn_triton.splitting import split_alone
from enginery_attn_triton.tiling import Device, LayerCut, LayerCuts, Tile, prefill_tile

PAGE = 16
L2_BYTES = 60 << 20
LATENT = LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
SHAPES = {
    "Qwen3-0.6B": AttnLayerFacts(num_heads=16, num_kv_heads=8, head_dim=128),
    "Llama-3.1-8B": AttnLayerFacts(num_heads=32, num_kv_heads=8, head_dim=128),
    "DeepSeek-V2-Lite": AttnLayerFacts(num_heads=16, num_kv_heads=1, head_dim=576, latent=LATENT),
}
VERIFYING = {
    "Llama-3.1-8B": SHAPES["Llama-3.1-8B"],
    "Llama-3.1-70B": AttnLayerFacts(num_heads=64, num_kv_heads=8, head_dim=128),
    "gpt-oss-20b": AttnLayerFacts(num_heads=64, num_kv_heads=8, head_dim=64),
    "Gemma-3-4B": AttnLayerFacts(num_heads=8, num_kv_heads=4, head_dim=256),
    "Qwen3-Next": AttnLayerFacts(num_heads=16, num_kv_heads=2, head_dim=256),
}
PREFILLS = ((4, 4096), (1, 16384))


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that decode. shared: how many first tokens are the same for all; sharing: whether planning knows."""

    kv_lens: tuple[int, ...]
    shared: int = 0
    sharing: bool = True

    @property
    def name(self) -> str:
        own = {length - self.shared for length in self.kv_lens}
        lengths = str(own.pop()) if len(own) == 1 else f"{min(own)} to {max(own)}"
        shared = f"{self.shared} {'shared' if self.sharing else 'unknown to be shared'} + " if self.shared else ""
        return f"{len(self.kv_lens)} x {shared}{lengths}"


def uniform(seed: int, count: int) -> tuple[int, ...]:
    """As in the middle of W1: prompts of 100 to 1024 tokens, and half of answers that are as long."""
    random = np.random.default_rng(seed)
    return tuple((random.integers(100, 1025, count) + random.integers(100, 1025, count) // 2).tolist())


ALONE = [
    Load(kv_lens=lens)
    for lens in ((640,), (4096,), (32768,), (4096,) * 8, (32768,) * 16, (4096,) * 64, (1024,) * 256, uniform(0, 256))
]
SHARED = [
    Load(kv_lens=(shared + own,) * count, shared=shared, sharing=sharing)
    for count, shared, own in ((128, 4096, 96), (8, 4096, 96), (256, 512, 512))
    for sharing in (False, True)
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """launch: writes out [rows, H, V] from q [rows, H, D]."""

    launch: Callable[[], None]
    q: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One layer's memory: the requests' pages lie anywhere in it."""

    facts: AttnLayerFacts
    cut: LayerCut
    memory: Memory
    kv_lens: np.ndarray
    table: np.ndarray
    sharing: bool

    @classmethod
    def of(cls, facts: AttnLayerFacts, load: Load, *, length: int = 1) -> Bench:
        """length: rows of a request that decodes."""
        requests, columns, same = len(load.kv_lens), -(-max(load.kv_lens) // PAGE), load.shared // PAGE
        table = torch.randperm(requests * columns).view(requests, columns).to(torch.int32)
        table[:, :same] = table[0, :same]
        k = torch.randn(requests * columns, PAGE, facts.num_kv_heads, facts.head_dim, device="cuda", dtype=torch.bfloat16)
        v = torch.randn_like(k) if facts.latent is None else k[..., : facts.value_dim]
        cut = LayerCut.of(facts, itemsize=2, device=Device.of(torch.device("cuda")), length=length)
        memory = Memory(k=k, v=v, pages=table.cuda())
        kv_lens = np.array(load.kv_lens, dtype=np.int32)
        return cls(facts=facts, cut=cut, memory=memory, kv_lens=kv_lens, table=table.numpy(), sharing=load.sharing)

    def tensors(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.randn(rows, self.facts.num_heads, self.facts.head_dim, device="cuda", dtype=torch.bfloat16)
        return q, torch.full_like(q[..., : self.facts.value_dim], float("nan"))

    @property
    def scores(self) -> Scores:
        return Scores(scale=self.facts.head_dim**-0.5)

    def decode(self, cut: LayerCut) -> Run:
        columns, num = self.table.shape[1], len(self.kv_lens)
        shared = sharing(self.table, self.kv_lens, page_size=PAGE) if self.sharing else []
        items, splits, num_tall = split_decoding(self.kv_lens, cut.decode, columns=columns, page_size=PAGE, shared=shared)

        def captured(part: np.ndarray, size: int) -> torch.Tensor:
            """With as many empty items as in a captured step."""
            return torch.from_numpy(np.pad(part, ((0, size - len(part)), (0, 0)))).cuda()

        most_tall = cut.decode.tall_room(num)
        split = Split(
            items=captured(items[num_tall:], num + cut.decode.room(num)),
            splits=torch.from_numpy(splits).cuda(),
            tall=captured(items[:num_tall], most_tall) if most_tall else None,
            merged=True,
        )
        parts = torch.empty(cut.workspace_bytes, dtype=torch.uint8, device="cuda")
        q, out = self.tensors(num)

        def launch() -> None:
            run_decode(q, self.memory, out, cut=cut, split=split, parts=parts, scores=self.scores)

        return Run(launch=launch, q=q, out=out)

    def verify(self) -> Run:
        """As in a captured step, whose lengths the device knows."""
        cut, num, length = self.cut.decode, len(self.kv_lens), self.cut.decode.length
        items, splits, _ = split_alone(self.kv_lens, cut, columns=self.table.shape[1], exact=False)
        items = np.pad(items, ((0, cut.captured_items(num) - len(items)), (0, 0)))
        split = Split(items=torch.from_numpy(items).cuda(), splits=torch.from_numpy(splits).cuda(), tall=None, merged=True)
        parts = torch.empty(self.cut.workspace_bytes, dtype=torch.uint8, device="cuda")
        (q, out), lengths = self.tensors(num * length), torch.from_numpy(self.kv_lens).cuda()

        def launch() -> None:
            run_decode(q, self.memory, out, cut=self.cut, split=split, parts=parts, scores=self.scores, lengths=lengths)

        return Run(launch=launch, q=q, out=out)

    def prefill(self, tile: Tile) -> Run:
        bases = np.arange(len(self.kv_lens), dtype=np.int32) * np.int32(self.table.shape[1])
        table = tiles_of(self.kv_lens, self.kv_lens, bases, first_row=0, tokens=tile.tokens)
        tiles = Tiles(table=torch.from_numpy(table).cuda(), tile=tile)
        q, out = self.tensors(int(self.kv_lens.sum()))
        parts = torch.empty(self.cut.workspace_bytes, dtype=torch.uint8, device="cuda")

        def launch() -> None:
            run_prefill(q, self.memory, out, cut=self.cut, tiles=tiles, parts=parts, scores=self.scores)

        return Run(launch=launch, q=q, out=out)

    def error(self, run: Run, *, request: int, rows: int) -> float:
        """The norm of the difference over the norm of the result."""
        run.launch()
        q, out = run.q[-rows:], run.out[-rows:]
        pages = torch.from_numpy(self.table[request]).long().cuda()
        k, v = (part[pages].flatten(0, 1)[: self.kv_lens[request]].double() for part in (self.memory.k, self.memory.v))
        group = self.facts.num_heads // self.facts.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("shd,lhd->hsl", q.double(), k) * self.scores.scale
        count, length = scores.shape[1:]
        ahead = torch.ones(count, length, dtype=torch.bool, device="cuda").triu(1 + length - count)
        wanted = torch.einsum("hsl,lhv->shv", scores.masked_fill(ahead, float("-inf")).softmax(-1), v)
        return float((out.double() - wanted).norm() / wanted.norm())


def median_s(run: Callable[[], None], *, launches: int = 1, repeats: int = 15) -> float:
    """Of a graph with so many launches of it, for one."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1000 / launches)
    return statistics.median(times[3:])


def limits() -> dict[str, float]:
    """Read bandwidth of a sum, bytes per second, and a matrix product's operations per second."""
    whole = torch.randn(1 << 30, device="cuda")
    read = max(whole.numel() * 4 / median_s(lambda: torch.sum(whole)), whole.numel() * 4 / median_s(lambda: torch.amax(whole)))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"read_bytes_per_s": read, "matmul_flop_per_s": 2 * 8192**3 / median_s(lambda: torch.mm(a, b))}


def measured(bench: Bench, run: Run, *, request: int, rows: int) -> dict[str, Any]:
    """The error of the last `rows` rows, which are of this request, and then the time."""
    try:
        relative = bench.error(run, request=request, rows=rows)
        if not relative < 0.01:
            return {"error": f"relative error {relative}"}
        launches = 8 if bench.memory.k.nbytes > L2_BYTES else 28  # what fits is in the cache the second time
        return {"relative_error": relative, "seconds": median_s(run.launch, launches=launches), "launches": launches}
    except triton.OutOfResources as full:
        return {"error": str(full)[:80]}


def rate(amount: float, found: dict[str, Any]) -> float | None:
    """Per second."""
    return amount / found["seconds"] if "seconds" in found else None


def decodes(name: str) -> Iterator[dict[str, Any]]:
    """Of one model."""
    facts = SHAPES[name]
    token_bytes = facts.num_kv_heads * 2 * (facts.head_dim if facts.latent is not None else facts.head_dim + facts.value_dim)
    for load in ALONE + (SHARED if facts.latent is None else []):
        bench = Bench.of(facts, load)
        variants = {"as it is": bench.cut}
        if len(load.kv_lens) == 1:
            variants["not chained"] = dataclasses.replace(bench.cut, chained=False)
        for variant, cut in variants.items():
            found = measured(bench, bench.decode(cut), request=len(load.kv_lens) - 1, rows=1)
            what = {"model": name, "kind": "decode", "load": load.name, "variant": variant}
            yield what | found | {"bytes_per_s": rate(token_bytes * sum(load.kv_lens), found)}


def verifies(name: str) -> Iterator[dict[str, Any]]:
    """Of one model, with as many guesses."""
    random, facts = np.random.default_rng(0), VERIFYING[name]
    mixed = [tuple(random.integers(140, most, count).tolist()) for count, most in ((64, 640), (128, 1000), (256, 1000))]
    for lens in ((374,), (4096,), (374,) * 8, (374,) * 64, (4096,) * 24, *mixed):
        for length in (1, 4, 5, 8):
            bench = Bench.of(facts, load := Load(kv_lens=lens), length=length)
            found = measured(bench, bench.verify(), request=len(lens) - 1, rows=length)
            yield {"model": name, "kind": "verify", "guesses": length - 1, "load": load.name} | found


def prefills(name: str) -> Iterator[dict[str, Any]]:
    """Of one model."""
    facts = SHAPES[name]
    for requests, length in PREFILLS:
        load = Load(kv_lens=(length,) * requests)
        bench = Bench.of(facts, load)
        tile = prefill_tile(bench.cut.dims, Device.of(torch.device("cuda")), max_rows=1 << 20)
        flop = requests * length * (length + 1) / 2 * facts.num_heads * 2 * (facts.head_dim + facts.value_dim)
        found = measured(bench, bench.prefill(tile), request=requests - 1, rows=40)
        yield {"model": name, "kind": "prefill", "load": load.name} | found | {"flop_per_s": rate(flop, found)}


def plans() -> Iterator[dict[str, Any]]:
    """Seconds of the host for `GraphState.refresh`, the median."""
    cuts = LayerCuts([SHAPES["Llama-3.1-8B"]], itemsize=2, device=Device.of(torch.device("cuda")))
    state = GraphState(cuts, max_batch_size=256, max_rows=256, num_pages=1 << 16, device=torch.device("cuda"))
    for load in (Load(kv_lens=(1000,)), Load(kv_lens=uniform(0, 256)), Load(kv_lens=(4096 + 96,) * 128, shared=4096)):
        num, columns, same = len(load.kv_lens), max(128, -(-max(load.kv_lens) // PAGE)), load.shared // PAGE
        table = torch.randperm(num * columns).view(num, columns).to(torch.int32)
        table[:, :same] = table[0, :same]
        lens, ones, tokens = (torch.tensor(values, dtype=torch.int32) for values in (load.kv_lens, [1] * num, [0] * num))
        batch = ForwardBatch(
            phase=Phase.DECODE,
            input_ids=tokens,
            positions=tokens,
            q_lens_cpu=ones,
            kv_lens_cpu=lens,
            num_logits_cpu=ones,
            seats_cpu=ones,
            views={FULL: View(slots=tokens, page_table_cpu=table)},
        )
        for variant in ("cut anew", "a recent cut"):
            times = []
            for _ in range(300):
                if variant == "cut anew":
                    state.recent.clear()
                start = time.perf_counter()
                state.refresh(batch, page_size=PAGE)
                times.append(time.perf_counter() - start)
                torch.cuda.synchronize()
            yield {"kind": "plan", "load": load.name, "variant": variant, "seconds": statistics.median(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--verify", nargs="*", choices=VERIFYING, help="of none named, all")
    asked = parser.parse_args()
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__, "numpy": np.__version__}
    torch.manual_seed(0)
    found = []

    def rows() -> Iterator[dict[str, Any]]:
        if asked.verify is not None:
            for name in asked.verify or VERIFYING:
                yield from verifies(name)
            return
        yield from plans()
        for name in SHAPES:
            yield from decodes(name)
            yield from prefills(name)

    for row in rows():
        found.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    facts = {"command": " ".join(sys.argv), "commit": asked.commit, "device": torch.cuda.get_device_name(), "versions": versions}
    print(json.dumps({**facts, "limits": limits(), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
