"""MLA by FlashInfer beside Triton, as the two plugins run them: `python docs/benchmarks/kernels_mla.py --commit C > FILE`.

Numbers are checked first, against float64, and a wrong one ends the run. Absorbed decoding is a replay of a graph, as bytes of
latents over time and as multiply-adds; ragged prefill is timed eagerly, as multiply-adds that causality leaves; planning is the
host's time for one batch. `--verified`: steps that verify drafts alone, with 16 heads, in graphs too. One layer of DeepSeek-V2's
dims, bfloat16, pages of 64 anywhere in memory.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from enginery.api import (
    FULL,
    AttnLayerFacts,
    BackendContext,
    ForwardBatch,
    ForwardPlan,
    GlobalLayerId,
    KVGeometry,
    KVPiece,
    LatentFacts,
    LayerKV,
    LayerSpec,
    LocalLayerId,
    Phase,
    View,
)
from enginery.kv.arena import DeviceArena
from enginery.kv.states import RecurrentStatePool
from enginery_attn_flashinfer_mla.backend import FlashInferMla
from enginery_attn_flashinfer_mla.kernels import FlashInferKernels
from enginery_attn_flashinfer_mla.spec import FlashInferMlaOptions
from enginery_attn_triton.backend import TritonAttention

PAGE = 64
LATENT = LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
HEADS = (16, 128)
DECODES = tuple((requests, length) for requests in (1, 16, 128) for length in (1024, 8192, 32768))
VERIFIED = tuple((requests, rows, 1024) for requests in (1, 16) for rows in (1, 2, 3, 4, 5, 8))  # requests, rows, all
ABSORBED = ((1, 64, 8192), (16, 32, 4096))  # requests, new, all
RAGGED = ((4, 4096, 4096), (1, 8192, 8192), (1, 1024, 32768))  # requests, new, keys; in one causal piece
CHUNKS = ((1, 8192, 16384), (16, 64, 1024))  # requests, new, keys of a chunk, which all rows see
BACKENDS = {
    "flashinfer-mla": FlashInferMlaOptions(),
    "flashinfer-mla kernels=fa2": FlashInferMlaOptions(kernels="fa2"),
    "triton": None,
}
MAX_ERROR = 0.02


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """A pool of one layer, full of noise."""

    geometry: KVGeometry
    latents: torch.Tensor

    @classmethod
    def of(cls, num_pages: int, heads: int) -> Memory:
        facts = AttnLayerFacts(num_heads=heads, num_kv_heads=1, head_dim=576, latent=LATENT)
        geometry = KVGeometry(pages={FULL: num_pages}, page_size=PAGE, layers=(facts,), dtype="bfloat16")
        latents = torch.randn(num_pages + 1, PAGE, 1, 576, device="cuda", dtype=torch.bfloat16)
        return cls(geometry=geometry, latents=latents)

    @property
    def spec(self) -> LayerSpec:
        facts = self.geometry.layers[0]
        return LayerSpec(global_id=GlobalLayerId(0), local_id=LocalLayerId(0), facts=facts, scale=192**-0.5)

    def layer(self, layer: LocalLayerId) -> LayerKV:
        return LayerKV(self.latents, self.latents[..., : LATENT.rank])

    def by_slot(self, layer: LocalLayerId) -> LayerKV:
        raise NotImplementedError

    def write(self, layer: LocalLayerId, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        raise NotImplementedError


def backend_of(name: str, memory: Memory) -> Any:
    device = torch.device("cuda")
    context = BackendContext(
        instance=name,
        geometry=memory.geometry,
        pool=memory,
        states=RecurrentStatePool(memory.geometry, device),
        device=device,
        dtype=torch.bfloat16,
        arena=DeviceArena(device),
        options=BACKENDS[name],
    )
    return TritonAttention(context) if name == "triton" else FlashInferMla(context, FlashInferKernels)


def batch_of(requests: int, new: int, length: int, num_pages: int, *, verifies: bool = False) -> ForwardBatch:
    columns = -(-length // PAGE)
    rows = torch.zeros(requests * new, dtype=torch.int64, device="cuda")
    q_lens = torch.full((requests,), new, dtype=torch.int32)
    table = torch.randperm(num_pages)[: requests * columns].view(requests, columns).to(torch.int32)
    return ForwardBatch(
        phase=Phase.VERIFY if verifies else Phase.DECODE if new == 1 else Phase.PREFILL,
        decode_len=new if verifies else 1,
        input_ids=rows,
        positions=rows,
        q_lens_cpu=q_lens,
        kv_lens_cpu=torch.full_like(q_lens, length),
        num_logits_cpu=torch.ones_like(q_lens),
        seats_cpu=torch.zeros_like(q_lens),
        views={FULL: View(slots=rows, page_table_cpu=table)},
    )


def error_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, scale: float, causal: bool) -> float:
    """Of the last 8 rows of the last request, all of whose keys these are; in float64, head by head."""
    rows, worst = min(8, len(q)), 0.0
    ahead = torch.ones(rows, len(k), dtype=torch.bool, device="cuda").triu(1 + len(k) - rows)
    for head in range(0, q.shape[1], 5):
        keys, values = (part[:, head % part.shape[1]].double() for part in (k, v))
        scores = q[-rows:, head].double() @ keys.T * scale
        wanted = (scores.masked_fill(ahead, float("-inf")) if causal else scores).softmax(-1) @ values
        worst = max(worst, float((out[-rows:, head].double() - wanted).norm() / wanted.norm()))
    if not worst < MAX_ERROR:
        raise SystemExit(f"off by {worst:.1e}")
    return worst


def device_s(run: Callable[[], object], *, launches: int, repeats: int = 9) -> float:
    """Median of the device's time for one launch."""
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(launches):
            run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1000 / launches)
    return statistics.median(times[2:])


def host_s(run: Callable[[], object], *, repeats: int = 9) -> float:
    """Median of the host's time, with the device idle before."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def limits() -> dict[str, float]:
    """Read bandwidth of a sum, bytes per second, and a matrix product's operations per second."""
    whole = torch.randn(1 << 30, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    read = whole.nbytes / device_s(partial(torch.sum, whole), launches=4)
    return {"read_bytes_per_s": read, "matmul_flop_per_s": 2 * 8192**3 / device_s(partial(torch.mm, a, b), launches=4)}


def paged(name: str, memory: Memory, requests: int, new: int, length: int, *, verifies: bool = False) -> dict[str, Any]:
    """Absorbed. What decodes or verifies is in a graph of four layers."""
    heads, num_pages = memory.geometry.layers[0].num_heads, memory.geometry.num_pages
    backend, batch = backend_of(name, memory), batch_of(requests, new, length, num_pages, verifies=verifies)
    kind = "verify" if verifies else "decode" if new == 1 else "absorbed prefill"
    captured = verifies or new == 1
    q = torch.randn(requests * new, heads, 576, device="cuda", dtype=torch.bfloat16)
    out = torch.full((*q.shape[:2], 512), float("nan"), device="cuda", dtype=torch.bfloat16)
    found: dict[str, Any] = {"plan_s": host_s(partial(backend.plan_forward_metadata, batch, False))}
    if captured:
        backend.init_graph_state(requests, requests * new)
    plan = backend.plan_forward_metadata(batch, captured)
    run = partial(backend.attend, q, q, q, memory.spec, batch, plan, out)
    run()
    torch.cuda.synchronize()
    keys = memory.latents[batch.page_table_cpu[-1].long().cuda()].flatten(0, 1)[:length]
    found["relative_error"] = error_of(q[-new:], keys, keys[..., :512], out[-new:], scale=memory.spec.scale, causal=True)
    seconds = _replayed(backend, batch, plan, run=run, found=found) if captured else device_s(run, launches=2)
    pairs = requests * (new * (length - new) + new * (new + 1) / 2)
    moved = requests * length * 576 * 2
    what = {"kind": kind, "backend": name, "heads": heads, "requests": requests}
    rates = {"bytes_per_s": moved / seconds, "flop_per_s": pairs * heads * 2 * (576 + 512) / seconds}
    return what | {"new": new, "length": length, "seconds": seconds} | rates | found


def _replayed(backend: Any, batch: ForwardBatch, plan: ForwardPlan, *, run: Callable[[], None], found: dict[str, Any]) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            run()
    found["refresh_s"] = host_s(partial(backend.refresh_graph_metadata, plan, batch))
    return device_s(graph.replay, launches=2) / 4


def ragged(name: str, memory: Memory, requests: int, new: int, keys: int, *, causal: bool) -> dict[str, Any]:
    """One piece, in one causal pass or as a chunk that all rows see, with its log-sum-exp."""
    heads = memory.geometry.layers[0].num_heads
    backend, batch = backend_of(name, memory), batch_of(requests, new, max(new, keys), memory.geometry.num_pages)
    lens = torch.full((requests,), keys, dtype=torch.int32)
    piece = KVPiece(index=0, starts_cpu=torch.zeros_like(lens), lens_cpu=lens, causal=causal)
    q, k, v = (
        torch.randn(requests * rows, heads, dim, device="cuda", dtype=torch.bfloat16)
        for rows, dim in ((new, 192), (keys, 192), (keys, 256))
    )
    v = v[..., 128:]
    out = torch.full((len(q), heads, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    lse = None if causal else torch.empty(q.shape[:2], device="cuda")
    plan = partial(backend.init_mha_chunk_metadata, batch, (piece,), causal)
    planned, spec = plan(), memory.spec
    run = partial(planned.attend, q, k, v, spec, piece, out, lse)
    run()
    torch.cuda.synchronize()
    error = error_of(q[-new:], k[-keys:], v[-keys:], out[-new:], scale=spec.scale, causal=causal)
    seconds = device_s(run, launches=2)
    pairs = requests * (new * (keys - new) + new * (new + 1) / 2 if causal else new * keys)
    what = {"kind": "one piece" if causal else "chunk", "backend": name, "heads": heads, "requests": requests, "new": new}
    return what | {
        "length": keys,
        "seconds": seconds,
        "flop_per_s": pairs * heads * 2 * (192 + 128) / seconds,
        "relative_error": error,
        "plan_s": host_s(plan),
    }


def rows() -> Iterator[dict[str, Any]]:
    for heads in HEADS:
        memory = Memory.of(128 * 32768 // PAGE, heads)
        for name in BACKENDS:
            others = name.endswith("fa2")
            for requests, length in DECODES[4::4] if others else DECODES:
                yield paged(name, memory, requests, 1, length)
            for requests, new, length in ABSORBED:
                yield paged(name, memory, requests, new, length)
            for requests, new, keys in RAGGED[:1] if others else RAGGED:
                yield ragged(name, memory, requests, new, keys, causal=True)
            for requests, new, keys in CHUNKS:
                yield ragged(name, memory, requests, new, keys, causal=False)


def verified() -> Iterator[dict[str, Any]]:
    memory = Memory.of(16 * 1024 // PAGE, 16)
    for name, shape in itertools.product(BACKENDS, VERIFIED):
        yield paged(name, memory, *shape, verifies=shape[1] > 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", required=True, help="kept in the output")
    parser.add_argument("--verified", action="store_true")
    asked = parser.parse_args()
    commit = asked.commit
    names = ("torch", "triton", "flashinfer-python")
    found: dict[str, Any] = {
        "command": f"docs/benchmarks/kernels_mla.py --commit {commit}{' --verified' if asked.verified else ''}",
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "limits": limits(),
        "rows": [],
    }
    for row in verified() if asked.verified else rows():
        found["rows"].append(row)
        shown = {name: row[name] for name in ("kind", "backend", "heads", "requests", "new", "length")}
        rates = f"{row.get('bytes_per_s', 0) / 1e12:.2f} TB/s {row['flop_per_s'] / 1e12:.0f} TFLOP/s"
        print(*shown.values(), f"{row['seconds'] * 1e6:.1f} us", rates, file=sys.stderr, flush=True)
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
