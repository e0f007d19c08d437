"""The attention kernels of enginery-attn-triton on a CUDA device: `python docs/benchmarks/kernels_triton_attention.py > FILE`.

Numbers are checked first, against float64, then decoding is timed as bytes of keys and values over the time of one replay of a
graph, and prefill as multiply-adds that causality leaves. Beside them the read bandwidth and matrix product of the same device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from enginery.api import AttnLayerFacts, LatentFacts
from enginery_attn_triton.launch import Memory, Scores, run_decode, run_prefill
from enginery_attn_triton.plan import Split, Tiles, split_decoding, tiles_of
from enginery_attn_triton.tiling import Device, LayerCut, Tile, prefill_tile

PAGE = 16
L2_BYTES = 60 << 20
LATENT = LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
SHAPES = {
    "Qwen3-0.6B": AttnLayerFacts(num_heads=16, num_kv_heads=8, head_dim=128),
    "Llama-3.1-8B": AttnLayerFacts(num_heads=32, num_kv_heads=8, head_dim=128),
    "DeepSeek-V2-Lite": AttnLayerFacts(num_heads=16, num_kv_heads=1, head_dim=576, latent=LATENT),
}
DECODES = ((1, 4096), (1, 32768), (16, 32768), (64, 4096), (256, 1024))
PREFILLS = ((4, 4096), (1, 16384))
SWEPT = ((64, 4096), (1, 32768), (4, 4096))
# Keys, stages, warps and the size of a wave relative to the usual; rows, keys, warps and stages.
DECODE_TILES = ((64, 3, 4, 0.5), (64, 3, 4, 2), (128, 3, 4, 1), (64, 3, 8, 1), (64, 5, 8, 1), (128, 3, 8, 1), (32, 3, 4, 2))
PREFILL_TILES = ((128, 64, 8, 7), (128, 32, 8, 5), (64, 64, 4, 5), (64, 64, 8, 3), (64, 32, 8, 3))


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

    @classmethod
    def of(cls, facts: AttnLayerFacts, requests: int, length: int) -> Bench:
        columns = -(-length // PAGE)
        table = torch.randperm(requests * columns).view(requests, columns).to(torch.int32)
        k = torch.randn(requests * columns, PAGE, facts.num_kv_heads, facts.head_dim, device="cuda", dtype=torch.bfloat16)
        v = torch.randn_like(k) if facts.latent is None else k[..., : facts.value_dim]
        cut = LayerCut.of(facts, itemsize=2, device=Device.of(torch.device("cuda")))
        memory = Memory(k=k, v=v, pages=table.cuda())
        return cls(facts=facts, cut=cut, memory=memory, kv_lens=np.full(requests, length, dtype=np.int32), table=table.numpy())

    def tensors(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.randn(rows, self.facts.num_heads, self.facts.head_dim, device="cuda", dtype=torch.bfloat16)
        return q, torch.full_like(q[..., : self.facts.value_dim], float("nan"))

    @property
    def scores(self) -> Scores:
        return Scores(scale=self.facts.head_dim**-0.5)

    def decode(self, cut: LayerCut) -> Run:
        items, splits = split_decoding(self.kv_lens, cut.decode, columns=self.table.shape[1])
        split = Split(items=torch.from_numpy(items).cuda(), splits=torch.from_numpy(splits).cuda(), merged=bool(splits[:, 1].any()))
        parts = torch.empty(cut.workspace_bytes, dtype=torch.uint8, device="cuda")
        q, out = self.tensors(len(self.kv_lens))

        def launch() -> None:
            run_decode(q, self.memory, out, cut=cut, split=split, parts=parts, scores=self.scores)

        return Run(launch=launch, q=q, out=out)

    def prefill(self, tile: Tile) -> Run:
        bases = np.arange(len(self.kv_lens), dtype=np.int32) * np.int32(self.table.shape[1])
        table = tiles_of(self.kv_lens, self.kv_lens, bases, first_row=0, tokens=tile.tokens)
        tiles = Tiles(table=torch.from_numpy(table).cuda(), tile=tile)
        q, out = self.tensors(int(self.kv_lens.sum()))

        def launch() -> None:
            run_prefill(q, self.memory, out, dims=self.cut.dims, tiles=tiles, scores=self.scores)

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


def decode_tiles(cut: LayerCut, *, sweep: bool) -> Iterator[LayerCut]:
    """The one that the backend takes, then others."""
    yield cut
    for keys, stages, warps, wave in DECODE_TILES if sweep else ():
        tile = dataclasses.replace(cut.decode_tile, keys=keys, stages=stages, warps=warps)
        decode = dataclasses.replace(cut.decode, tile_keys=keys, wave=int(cut.decode.wave * wave))
        yield dataclasses.replace(cut, decode_tile=tile, decode=decode)


def prefill_tiles(tile: Tile, *, sweep: bool) -> Iterator[Tile]:
    """The one that the backend takes, then others."""
    yield tile
    for rows, keys, warps, stages in PREFILL_TILES if sweep else ():
        yield dataclasses.replace(tile, rows=rows, keys=keys, warps=warps, stages=stages)


def measured(bench: Bench, run: Run, *, request: int, rows: int) -> dict[str, Any]:
    """The error of the last `rows` rows, which are of this request, and then the time."""
    try:
        relative = bench.error(run, request=request, rows=rows)
        if not relative < 0.01:
            return {"error": f"relative error {relative}"}
        launches = 8 if bench.memory.k.nbytes > L2_BYTES else 1  # what fits is in the cache the second time
        return {"relative_error": relative, "seconds": median_s(run.launch, launches=launches), "launches": launches}
    except triton.OutOfResources as full:
        return {"error": str(full)[:80]}


def rate(amount: float, found: dict[str, Any]) -> float | None:
    """Per second."""
    return amount / found["seconds"] if "seconds" in found else None


def decodes(name: str, *, sweep: bool) -> Iterator[dict[str, Any]]:
    """Of one model."""
    facts = SHAPES[name]
    for requests, length in DECODES:
        bench = Bench.of(facts, requests, length)
        num_bytes = bench.memory.k.nbytes * (1 if facts.latent is not None else 2)
        for cut in decode_tiles(bench.cut, sweep=sweep and (requests, length) in SWEPT):
            found = measured(bench, bench.decode(cut), request=requests - 1, rows=1)
            tile = dataclasses.asdict(cut.decode_tile) | {"wave": cut.decode.wave}
            what = {"model": name, "kind": "decode", "requests": requests, "length": length, "tile": tile}
            yield what | found | {"bytes_per_s": rate(num_bytes, found)}


def prefills(name: str, *, sweep: bool) -> Iterator[dict[str, Any]]:
    """Of one model."""
    facts = SHAPES[name]
    for requests, length in PREFILLS:
        bench = Bench.of(facts, requests, length)
        usual = prefill_tile(bench.cut.dims, Device.of(torch.device("cuda")), max_rows=1 << 20)
        flop = requests * length * (length + 1) / 2 * facts.num_heads * 2 * (facts.head_dim + facts.value_dim)
        for tile in prefill_tiles(usual, sweep=sweep and (requests, length) in SWEPT):
            found = measured(bench, bench.prefill(tile), request=requests - 1, rows=40)
            what = {"model": name, "kind": "prefill", "requests": requests, "length": length, "tile": dataclasses.asdict(tile)}
            yield what | found | {"flop_per_s": rate(flop, found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="other tile sizes too")
    sweep = parser.parse_args().sweep
    device = {"name": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    torch.manual_seed(0)
    found = []
    for name in SHAPES:
        for row in (*decodes(name, sweep=sweep), *prefills(name, sweep=sweep)):
            found.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps({"device": device, "limits": limits(), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
