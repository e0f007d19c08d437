"""FlashInfer's kernels beside Triton's, as the plugins run them: `python docs/benchmarks/kernels_flashinfer.py --commit ID > FILE`.

Numbers are checked first, against float64. Decoding, and verifying drafts, is a replay of a graph, as bytes of keys and values over
time; prefill is timed eagerly, as multiply-adds that causality leaves; planning is the host's time for one batch. One layer of
Llama-3.1-8B's dims, whose queries, keys and values are parts of one tensor, as a model has them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from enginery.api import (
    FULL,
    AttnLayerFacts,
    BackendContext,
    ForwardBatch,
    GlobalLayerId,
    KVGeometry,
    LayerKV,
    LayerSpec,
    LocalLayerId,
    Phase,
    View,
)
from enginery.kv.arena import DeviceArena
from enginery.kv.states import RecurrentStatePool
from enginery_attn_flashinfer.backend import FlashInferAttention
from enginery_attn_flashinfer.kernels import FlashInferKernels
from enginery_attn_flashinfer.spec import FlashInferOptions
from enginery_attn_triton.backend import TritonAttention

PAGE = 16
FACTS = AttnLayerFacts(num_heads=32, num_kv_heads=8, head_dim=128)
LAYER = LayerSpec(global_id=GlobalLayerId(0), local_id=LocalLayerId(0), facts=FACTS, scale=FACTS.head_dim**-0.5)
DECODES = ((64, 1, 4096), (16, 1, 32768), (256, 1, 1024), (1, 1, 32768))  # requests, rows of each, all tokens
VERIFIED = ((1, 4, 1024), (8, 4, 1024), (64, 4, 1024), (1, 4, 32768), (64, 4, 4096), (128, 2, 4096), (32, 8, 4096), (64, 1, 1024))
PREFILLS = (  # requests, new, all
    *((4, 4096, 4096), (2, 4096, 4096), (1, 32768, 32768), (1, 8192, 32768), (1, 8192, 16384), (8, 512, 4096)),
)
COPIES = (  # the same, from pages and from a copy of them
    *((1, 8192, 32768), (4, 2048, 8192), (1, 2048, 32768), (8, 1024, 4096), (8, 512, 4096), (2, 512, 32768), (16, 256, 4096)),
    *((16, 512, 512), (16, 128, 4096), (1, 128, 32768)),
)
MIXED = ((64, 1024, 8128, 32768), (128, 2048, 8064, 8064))  # decoding requests, all of each; new and all of one that prefills
SHARED = ((64, 8192, 8704), (16, 8192, 8704), (64, 2048, 2560), (16, 2048, 2560), (256, 512, 1024), (8, 16384, 16896))
BACKENDS: dict[str, FlashInferOptions | None] = {
    "triton": None,
    "flashinfer": FlashInferOptions(),
    "flashinfer shared_prefix_in_graphs": FlashInferOptions(shared_prefix_in_graphs=True),
    "flashinfer prefill=fa2": FlashInferOptions(prefill="fa2"),
    "flashinfer fp8": FlashInferOptions(),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """A pool of one layer."""

    geometry: KVGeometry
    kv: LayerKV

    def layer(self, layer: LocalLayerId) -> LayerKV:
        return self.kv

    def write(self, layer: LocalLayerId, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        raise NotImplementedError


def memory_of(num_pages: int, dtype: torch.dtype) -> Memory:
    geometry = KVGeometry(pages={FULL: num_pages}, page_size=PAGE, layers=(FACTS,), dtype=str(dtype).removeprefix("torch."))
    shape = (num_pages + 1, PAGE, FACTS.num_kv_heads, FACTS.head_dim)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2))
    return Memory(geometry=geometry, kv=LayerKV(k, v))


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
    return TritonAttention(context) if name == "triton" else FlashInferAttention(context, FlashInferKernels)


def verification_of(requests: int, new: int, length: int) -> ForwardBatch:
    """Drafts of as many rows of each request; decoding where that is one."""
    phase = Phase.DECODE if new == 1 else Phase.VERIFY
    return dataclasses.replace(ragged_batch([(new, length)] * requests, phase=phase), decode_len=new)


def batch_of(requests: int, new: int, length: int, *, shared: int = 0) -> ForwardBatch:
    """See `ragged_batch`."""
    return ragged_batch([(new, length)] * requests, phase=Phase.DECODE if new == 1 else Phase.PREFILL, shared=shared)


def ragged_batch(lengths: Sequence[tuple[int, int]], *, phase: Phase, shared: int = 0) -> ForwardBatch:
    """Requests of (new, all) tokens. Pages anywhere, but for the first `shared` ones, which all requests have in common."""
    q_lens, kv_lens = (torch.tensor(values, dtype=torch.int32) for values in zip(*lengths, strict=True))
    columns = -(-int(kv_lens.max()) // PAGE)
    table = torch.randperm(len(lengths) * columns).view(len(lengths), columns).to(torch.int32)
    table[:, :shared] = table[0, :shared]
    rows = torch.zeros(int(q_lens.sum()), dtype=torch.int64, device="cuda")
    return ForwardBatch(
        phase=phase,
        input_ids=rows,
        positions=rows,
        q_lens_cpu=q_lens,
        kv_lens_cpu=kv_lens,
        num_logits_cpu=torch.ones_like(q_lens),
        seats_cpu=torch.zeros_like(q_lens),
        views={FULL: View(slots=rows, page_table_cpu=table)},
    )


def relative_error(q: torch.Tensor, out: torch.Tensor, batch: ForwardBatch, memory: Memory) -> float:
    """Of the last request's last 16 rows."""
    length, new = int(batch.kv_lens_cpu[-1]), min(16, int(batch.q_lens_cpu[-1]))
    pages = batch.page_table_cpu[-1, : -(-length // PAGE)].long().cuda()
    k, v = (part[pages].flatten(0, 1)[:length].double() for part in memory.kv)
    k, v = (part.repeat_interleave(FACTS.num_heads // FACTS.num_kv_heads, 1) for part in (k, v))
    scores = torch.einsum("shd,lhd->hsl", q[-new:].double(), k) * LAYER.scale
    ahead = torch.ones(new, length, dtype=torch.bool, device="cuda").triu(1 + length - new)
    wanted = torch.einsum("hsl,lhv->shv", scores.masked_fill(ahead, float("-inf")).softmax(-1), v)
    return float((out[-new:].double() - wanted).norm() / wanted.norm())


def device_s(run: Callable[[], None], *, launches: int, repeats: int = 12) -> float:
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
    return statistics.median(times[3:])


def host_s(run: Callable[[], object], *, repeats: int = 15) -> float:
    """Median of the host's time, with the device idle before."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A batch with its tensors. The step's own keys and values are those in memory."""

    batch: ForwardBatch
    memory: Memory
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, memory: Memory) -> Step:
        q = torch.randn(batch.num_tokens, FACTS.num_heads, FACTS.head_dim, device="cuda", dtype=torch.bfloat16)
        slots = []
        for new, end, pages in zip(batch.q_lens_cpu.tolist(), batch.kv_lens_cpu.tolist(), batch.page_table_cpu, strict=True):
            places = torch.arange(end - new, end)
            slots.append(pages[places // PAGE].long() * PAGE + places % PAGE)
        rows = torch.cat(slots).cuda()
        whole = torch.cat((q, *(part.flatten(0, 1)[rows].to(q.dtype) for part in memory.kv)), dim=1)
        parts = whole.split((FACTS.num_heads, FACTS.num_kv_heads, FACTS.num_kv_heads), dim=1)
        return cls(batch=batch, memory=memory, q=parts[0], k=parts[1], v=parts[2], out=torch.empty_like(q))

    def attending(self, backend: Any, batch: ForwardBatch) -> Callable[[], None]:
        """backend: an `AttnBackend` that attends. batch: the step's, planned."""
        return partial(backend.attend, self.q, self.k, self.v, LAYER, batch, batch.plan, self.out)

    def relative_error(self) -> float:
        return relative_error(self.q, self.out, self.batch, self.memory)

    def flop(self) -> float:
        """Of the requests with more than one new token."""
        lengths = zip(self.batch.q_lens_cpu.tolist(), self.batch.kv_lens_cpu.tolist(), strict=True)
        pairs = sum(new * (end - new) + new * (new + 1) / 2 for new, end in lengths if new > 1)
        return pairs * FACTS.num_heads * 4 * FACTS.head_dim


def decodes(name: str, dtype: torch.dtype, steps: Sequence[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """Graphs of eight layers."""
    for requests, new, length in steps:
        batch = verification_of(requests, new, length)
        memory = memory_of(requests * -(-length // PAGE), dtype)
        backend, step = backend_of(name, memory), Step.of(batch, memory)
        eager = host_s(partial(backend.plan_forward_metadata, batch, False))
        backend.init_graph_state(requests, requests * new)
        plan = backend.plan_forward_metadata(batch, True)
        run = step.attending(backend, batch.planned(plan))
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(8):
                run()
        refresh = host_s(partial(backend.refresh_graph_metadata, plan, batch))
        graph.replay()
        error = step.relative_error()
        seconds = device_s(graph.replay, launches=2) / 8
        moved = 2 * requests * length * FACTS.num_kv_heads * FACTS.head_dim * dtype.itemsize
        what = {"backend": name, "kind": "decode" if new == 1 else "verify", "requests": requests, "rows": new}
        what |= {"length": length, "relative_error": error}
        yield what | {"seconds": seconds, "bytes_per_s": moved / seconds, "plan_s": eager, "refresh_s": refresh}


def prefills(name: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    for requests, new, length in PREFILLS:
        batch = batch_of(requests, new, length)
        memory = memory_of(requests * -(-length // PAGE), dtype)
        backend, step = backend_of(name, memory), Step.of(batch, memory)
        planning = host_s(partial(backend.plan_forward_metadata, batch, False))
        what = {"backend": name, "kind": "prefill", "requests": requests, "new": new, "length": length}
        yield what | timed(backend, step) | {"plan_s": planning}


def timed(backend: Any, step: Step) -> dict[str, Any]:
    """Of a batch that is planned here."""
    batch = step.batch.planned(backend.plan_forward_metadata(step.batch, False))
    run = step.attending(backend, batch)
    run()
    error, seconds = step.relative_error(), device_s(run, launches=2)
    return {"relative_error": error, "seconds": seconds, "flop_per_s": step.flop() / seconds}


def copies(name: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Prefill from pages and from a copy of them, whatever the backend would choose, and the copying alone."""
    for requests, new, length in COPIES:
        batch = batch_of(requests, new, length)
        memory = memory_of(requests * -(-length // PAGE), dtype)
        backend, step = backend_of(name, memory), Step.of(batch, memory)
        chosen = backend.planner.prefill.least_readers
        what = {"backend": name, "kind": "copied pages", "requests": requests, "new": new, "length": length}
        readers = new * (length - new / 2) / length * FACTS.num_heads / FACTS.num_kv_heads
        for least in (1 << 40, 0):
            backend.planner.prefill.least_readers = least
            row = timed(backend, step)
            (part,) = [cut.prefill for cut in backend.plan_forward_metadata(batch, False).cuts.values()]
            if part.gathering is not None:
                copy = partial(backend.kernels.gather, memory.kv, part.gathering.lists, part.gathering.into)
                moved = requests * length * FACTS.num_kv_heads * FACTS.head_dim * 2 * (dtype.itemsize + 2)
                copy_s = device_s(copy, launches=4)
                row |= {"copy_s": copy_s, "copy_bytes_per_s": moved / copy_s}
            yield what | {"readers": readers, "chosen": (readers >= chosen) == (least == 0), "own": part.own} | row


def mixed(name: str) -> Iterator[dict[str, Any]]:
    """Steps that decode and prefill: the whole, and what it takes more than the same step without the prefill."""
    for decoding, cached, new, length in MIXED:
        batch = ragged_batch([*[(1, cached)] * decoding, (new, length)], phase=Phase.MIXED)
        memory = memory_of(batch.page_table_cpu.numel(), torch.bfloat16)
        backend = backend_of(name, memory)
        alone = timed(backend, Step.of(batch_of(decoding, 1, cached), memory))["seconds"]
        row = timed(backend, step := Step.of(batch, memory))
        what = {"backend": name, "kind": "mixed", "decoding": decoding, "cached": cached, "new": new, "length": length}
        yield what | row | {"decoding_s": alone, "prefill_flop_per_s": step.flop() / (row["seconds"] - alone)}


def shared(name: str) -> Iterator[dict[str, Any]]:
    """Decoding of requests with a prefix in common, read once or not; a graph of an eager plan, so that the device is timed."""
    for requests, prefix, length in SHARED:
        batch = batch_of(requests, 1, length, shared=prefix // PAGE)
        memory = memory_of(requests * -(-length // PAGE), torch.bfloat16)
        backend, step = backend_of(name, memory), Step.of(batch, memory)
        for once in (True, False):
            backend.planner.shared_tokens = 512 if once else 0
            planning = host_s(partial(backend.plan_forward_metadata, batch, False))
            run = step.attending(backend, batch.planned(backend.plan_forward_metadata(batch, False)))
            run()
            error = step.relative_error()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(8):
                    run()
            seconds = device_s(graph.replay, launches=2) / 8
            what = {"backend": name, "kind": "shared prefix", "requests": requests, "prefix": prefix, "length": length}
            yield what | {"read_once": once, "relative_error": error, "seconds": seconds, "plan_s": planning}


def rows(*, only_prefill: bool, only_verify: bool) -> Iterator[dict[str, Any]]:
    if not only_prefill:
        for name in ("triton", "flashinfer prefill=fa2"):
            yield from decodes(name, torch.bfloat16, VERIFIED)
    for name in () if only_verify else BACKENDS:
        dtype = torch.float8_e4m3fn if "fp8" in name else torch.bfloat16
        if "prefill=" not in name and not only_prefill:
            yield from decodes(name, dtype, DECODES)
        if "graphs" not in name:
            yield from prefills(name, dtype)
        if name in ("flashinfer", "flashinfer prefill=fa2", "flashinfer fp8"):
            yield from copies(name, dtype)
    if only_verify:
        return
    yield from mixed("flashinfer")
    if not only_prefill:
        yield from shared("flashinfer")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--only-prefill", action="store_true")
    parser.add_argument("--only-verify", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "flashinfer-python")}
    found = []
    for row in rows(only_prefill=asked.only_prefill, only_verify=asked.only_verify):
        assert row["relative_error"] < 0.01, row
        found.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    facts = {"command": " ".join(sys.argv), "commit": asked.commit, "device": torch.cuda.get_device_name(), "versions": versions}
    print(json.dumps(facts | {"rows": found}, indent=1))


if __name__ == "__main__":
    main()
