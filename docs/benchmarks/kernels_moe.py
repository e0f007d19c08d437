"""Mixture-of-experts kernels of enginery-ops-triton: `python docs/benchmarks/kernels_moe.py --output FILE`.

One layer's experts on random weights, checked against float64 first. A time is that of one call among several in a CUDA graph,
each with tokens and experts of its own. The floor is the larger of two times: the weights of the experts that were used over the
memory's bandwidth, and the products over the matrix rate in bfloat16. Beside it stand torch's grouped product (bfloat16; with
sorting, gate and sum) and the core's reference, a loop over experts that the host drives. Where every token has a shared expert
too, a whole layer from router to sum is timed with it among the others (`joined`), as an MLP of its own (`apart`) and as products
added to the sum (`added`; enginery.nn.moe has this and `joined`); and so are the experts alone, routed in advance (`known`).
`--sweep` times the blocks that expert_blocks.py chooses from, `--tiles` tiles of other sizes than it chooses. Kernels are compiled
by several processes before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from moe_shapes import DTYPE, FLOAT8, SHAPES, WEIGHTS, Shape, Tried, candidates, only_chosen, other_tiles

from enginery.api import SILU, ExpertNames, ExpertsShape, Routed, StoredWeight
from enginery.nn import reference_experts
from enginery.nn.moe import JoinedExperts
from enginery.nn.stored import FLOAT8_BLOCKS, widen
from enginery_ops_triton.experts import Experts
from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.routing import route

DEVICE = "cuda"
READ_TB_S, TFLOP_S = 4.26, 792  # of an H200, measured
TOKENS = (1, 16, 256, 512, 1024, 4096)
CHECKED = 48  # tokens
Call = Callable[[], torch.Tensor]


class Layer:
    """Random weights of a shape."""

    def __init__(self, shape: Shape, weight_dtype: torch.dtype, *, num_experts: int | None = None) -> None:
        experts, columns, inner = num_experts or shape.num_experts, shape.columns, shape.inner
        self.shape = shape
        self.scales: tuple[torch.Tensor, torch.Tensor] | None = None  # of gate_up, of down
        self.gate_up = self.drawn(experts, 2 * inner, columns, weight_dtype=weight_dtype)
        self.down = self.drawn(experts, columns, inner, weight_dtype=weight_dtype)
        if weight_dtype is FLOAT8:
            self.scales = self.drawn_scales(self.gate_up), self.drawn_scales(self.down)

    def drawn(self, experts: int, rows: int, columns: int, *, weight_dtype: torch.dtype) -> torch.Tensor:
        weight = torch.empty((experts, rows, columns), dtype=weight_dtype, device=DEVICE)
        spread = columns**-0.5 if weight_dtype is DTYPE else 100.0
        for each in weight:
            each.copy_(torch.randn((rows, columns), dtype=DTYPE, device=DEVICE).mul_(spread).clamp_(-440, 440))
        return weight

    def drawn_scales(self, weight: torch.Tensor) -> torch.Tensor:
        experts, rows, columns = weight.shape
        blocks = (experts, math.ceil(rows / 128), math.ceil(columns / 128))
        return torch.rand(blocks, device=DEVICE).add_(0.5).mul_(columns**-0.5 / 100)

    def weights(self, some: slice = slice(None)) -> tuple[torch.Tensor | StoredWeight, torch.Tensor | StoredWeight]:
        """gate_up and down of some experts, as operations are given them."""
        values = self.gate_up[some], self.down[some]
        if self.scales is None:
            return values
        gate_up, down = (
            StoredWeight(scheme=FLOAT8_BLOCKS, values=v, scales=s[some]) for v, s in zip(values, self.scales, strict=True)
        )
        return gate_up, down

    def bound(self) -> Experts:
        return Experts(*self.weights(), dependent_launch=True)

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, Routed]:
        x = torch.randn((num_tokens, self.shape.columns), dtype=DTYPE, device=DEVICE)
        logits = torch.randn((num_tokens, self.shape.num_experts), device=DEVICE)
        return x, route(logits, None, self.shape.routing, dependent_launch=True)

    def exact(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """In float64, one expert after the other."""
        out = torch.zeros_like(x, dtype=torch.float64)
        for expert in torch.unique(routed.ids).tolist():
            token, place = (routed.ids == expert).nonzero(as_tuple=True)
            gate_up, down = self.gate_up[expert].double(), self.down[expert].double()
            if self.scales is not None:
                gate_up *= spread_out(self.scales[0][expert], gate_up)
                down *= spread_out(self.scales[1][expert], down)
            gate, up = F.linear(x[token].double(), gate_up).chunk(2, dim=-1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, down) * routed.weights[token, place, None])
        return out

    def grouped(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """With torch's grouped product."""
        ids = routed.ids.flatten()
        order = ids.argsort(stable=True)
        ends = torch.searchsorted(ids[order], torch.arange(self.shape.num_experts, device=DEVICE), right=True).int()
        both = F.grouped_mm(x[order // routed.ids.shape[1]], self.gate_up.mT, offs=ends)
        gate, up = both.chunk(2, dim=-1)
        parts = F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)
        own = torch.empty_like(parts).index_copy_(0, order, parts).view(*routed.ids.shape, -1)
        return (own.float() * routed.weights[..., None]).sum(1).to(x.dtype)


def spread_out(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    return scale.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def time_us(calls: Sequence[Call], *, replays: int) -> float:
    """Microseconds of one call: the median over replays of a graph that holds all of them."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(taken)


def time_loop_us(call: Call) -> float:
    """Of what the host drives: the second call."""
    taken = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken = (time.perf_counter() - began) * 1e6
    return taken


def floor(shape: Shape, weight_dtype: torch.dtype, routings: Sequence[Routed]) -> dict[str, float]:
    """Of a call: bytes of weights, operations, microseconds."""
    used = statistics.mean(len(torch.unique(each.ids)) for each in routings)
    each = 3 * shape.columns * shape.inner
    num_bytes, flops = used * each * weight_dtype.itemsize, 2 * each * routings[0].ids.numel()
    return {
        "experts_used": used,
        "weight_bytes": num_bytes,
        "flops": flops,
        "floor_us": max(num_bytes / READ_TB_S / 1e6, flops / TFLOP_S / 1e6),
    }


def rates(found: dict[str, Any], taken: float) -> dict[str, float]:
    return {
        "us": round(taken, 1),
        "gb_s": round(found["weight_bytes"] / taken / 1e3),
        "tflop_s": round(found["flops"] / taken / 1e6, 1),
        "of_floor": round(found["floor_us"] / taken, 3),
    }


def num_calls(num_tokens: int) -> int:
    return {1: 24, 16: 6, 256: 4}.get(num_tokens, 2)


def compare(models: Sequence[str], kinds: Sequence[str], *, loop: bool) -> Iterator[dict[str, Any]]:
    for name, label in itertools.product(models, kinds):
        shape, weight_dtype = SHAPES[name], WEIGHTS[label]
        layer = Layer(shape, weight_dtype)
        bound = layer.bound()
        for num_tokens in TOKENS:
            inputs = [layer.inputs(num_tokens) for _ in range(num_calls(num_tokens))]
            x, routed = inputs[0]
            some = Routed(routed.ids[:CHECKED], routed.weights[:CHECKED])
            expected = layer.exact(x[:CHECKED], some)
            errors = {"triton": relative_error(bound(x, routed), expected)}
            if weight_dtype is DTYPE:
                errors["grouped"] = relative_error(layer.grouped(x, routed), expected)
            found: dict[str, Any] = {"model": name, "weights": label, "tokens": num_tokens}
            found |= floor(shape, weight_dtype, [routed for _, routed in inputs])
            found["blocks"] = str(shape.blocks(num_tokens, weight_dtype))
            found["error"] = errors
            assert errors["triton"] < 1e-2, errors
            found["triton"] = rates(found, time_us([partial(bound, *each) for each in inputs], replays=7))
            if weight_dtype is DTYPE:
                found["grouped"] = rates(found, time_us([partial(layer.grouped, *each) for each in inputs], replays=5))
            if loop:
                sizes = ExpertsShape(names=ExpertNames(), count=shape.num_experts, inner=shape.inner, hidden=shape.columns)
                reference = reference_experts.bind_experts(*layer.weights(), sizes)
                found["reference"] = rates(found, time_loop_us(partial(reference, x, routed)))
            yield found
        del layer, bound


class WithShared:
    """A layer from router to sum, whose last `shared` experts are the shared one's parts."""

    def __init__(self, shape: Shape, weight_dtype: torch.dtype) -> None:
        count, inner, self.shape = shape.num_experts, shape.inner, shape
        layer = Layer(shape, weight_dtype, num_experts=count + shape.shared)
        ops = TritonOps(dependent_launch=True)
        self.joined_experts = layer.bound()
        self.routed_experts = Experts(*layer.weights(slice(count)), dependent_launch=True)
        last = layer.weights(slice(count, None))
        gate_up, down = (widen(each, DTYPE) if isinstance(each, StoredWeight) else each for each in last)  # [S, 2I, C], [S, C, I]
        gate, up = gate_up[:, :inner].flatten(0, 1), gate_up[:, inner:].flatten(0, 1)  # [S I, C]
        self.parts = JoinedExperts(gate_up, down, SILU, ops)
        self.shared_gate_up = ops.bind_linear(torch.cat((gate, up)), None)
        self.shared_down = ops.bind_linear(down.transpose(0, 1).flatten(1).contiguous(), None)
        self.gated_silu = ops.gated_silu
        self.router = (torch.randn((shape.columns, count), device=DEVICE) * shape.columns**-0.5).to(DTYPE)

    def routed(self, x: torch.Tensor, num_shared: int = 0) -> Routed:
        routing = replace(self.shape.routing, num_shared=num_shared)
        return route(torch.mm(x, self.router, out_dtype=torch.float32), None, routing, dependent_launch=True)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return self.joined_experts(x, self.routed(x, self.shape.shared))

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        out = self.routed_experts(x, self.routed(x))
        return out.add_(self.shared_down(self.gated_silu(self.shared_gate_up(x))))

    def added(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(self.routed_experts(x, self.routed(x)), x, None)


def layers(models: Sequence[str], counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    for name, (label, weight_dtype) in itertools.product([name for name in models if SHAPES[name].shared], WEIGHTS.items()):
        layer = WithShared(SHAPES[name], weight_dtype)
        for num_tokens in counts:
            inputs = [
                torch.randn((num_tokens, layer.shape.columns), dtype=DTYPE, device=DEVICE) for _ in range(num_calls(num_tokens))
            ]
            expected = layer.apart(inputs[0]).double()
            error = max(relative_error(found, expected) for found in (layer.joined(inputs[0]), layer.added(inputs[0])))
            assert error < 1e-2, error
            known = [partial(layer.joined_experts, x, layer.routed(x, layer.shape.shared)) for x in inputs]
            times = {
                "joined_us": [partial(layer.joined, x) for x in inputs],
                "apart_us": [partial(layer.apart, x) for x in inputs],
                "added_us": [partial(layer.added, x) for x in inputs],
                "known_us": known,
            }
            taken = {kind: round(time_us(calls, replays=7), 1) for kind, calls in times.items()}
            yield {"model": name, "weights": label, "tokens": num_tokens, "error": error, **taken}
        del layer


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    part = actual[: len(expected)].double()
    return ((part - expected).norm() / expected.norm()).item()


def routers(models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Routing alone, beside the reference in a graph too."""
    for name, num_tokens in itertools.product(models, TOKENS):
        shape = SHAPES[name]
        bias = torch.rand(shape.num_experts, device=DEVICE) if shape.routing.scoring == "sigmoid" else None
        logits = [torch.randn((num_tokens, shape.num_experts), device=DEVICE) for _ in range(20)]
        mine = [partial(route, each, bias, shape.routing, dependent_launch=True) for each in logits]
        theirs = [partial(reference_experts.route, each, bias, shape.routing) for each in logits]
        expected = reference_experts.route(logits[0].double().cpu(), None if bias is None else bias.cpu(), shape.routing)
        found: dict[str, Any] = {"model": name, "tokens": num_tokens}
        found["other_experts"] = int((mine[0]().ids.cpu() != expected.ids).sum())
        yield found | {"triton_us": round(time_us(mine, replays=7), 2), "torch_us": round(time_us(theirs, replays=5), 2)}


def sweep(models: Sequence[str], tokens: Sequence[int], kinds: Sequence[str], tried: Tried) -> Iterator[dict[str, Any]]:
    for name, label in itertools.product(models, kinds):
        layer = Layer(SHAPES[name], WEIGHTS[label])
        bound = layer.bound()
        for num_tokens in tokens:
            inputs = [layer.inputs(num_tokens) for _ in range(num_calls(num_tokens))]
            known = floor(layer.shape, WEIGHTS[label], [routed for _, routed in inputs])
            times = []
            for which, blocks in dict.fromkeys(tried(layer.shape, num_tokens, WEIGHTS[label])):
                try:
                    taken = time_us([partial(bound.of_blocks, *each, blocks) for each in inputs], replays=3)
                except triton.runtime.errors.OutOfResources:
                    continue
                times.append((round(taken, 1), which, *([str(blocks)] if which == "chosen" or tried is candidates else [])))
            yield {"model": name, "weights": label, "tokens": num_tokens, **known, "us": sorted(times)}
        del layer, bound


def compile_part(part: int, parts: int, todo: Sequence[tuple[str, str, int]], tried: Tried) -> None:
    """On a layer of one expert, so that many processes have room."""
    work = []
    for name, label, num_tokens in todo:
        work += [(name, label, blocks) for _, blocks in tried(SHAPES[name], num_tokens, WEIGHTS[label])]
    for name, label in sorted({each[:2] for each in work}):
        shape = SHAPES[name]
        bound = Layer(shape, WEIGHTS[label], num_experts=1).bound()
        x = torch.randn((4, shape.columns), dtype=DTYPE, device=DEVICE)
        ids = torch.zeros((4, shape.routing.top_k), dtype=torch.int32, device=DEVICE)
        mine = list(dict.fromkeys(each[2] for each in work if each[:2] == (name, label)))
        for blocks in mine[part::parts]:
            try:
                bound.of_blocks(x, Routed(ids, torch.rand(ids.shape, device=DEVICE)), blocks)
            except triton.runtime.errors.OutOfResources:
                continue
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", dest="tried", action="store_const", const=candidates)
    parser.add_argument("--tiles", dest="tried", action="store_const", const=other_tiles)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="of the sweep and the layers")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="of the sweep and the experts")
    parser.add_argument("--only", nargs="+", choices=("layers", "routing", "experts"), help="of what is compared")
    parser.add_argument("--no-loop", action="store_true", help="leave the core's reference out")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--compile", type=int, metavar="PART", help="what a worker does")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    if asked.compile is not None:
        todo = list(itertools.product(asked.models, asked.weights, asked.tokens))
        compile_part(asked.compile, asked.workers, todo, asked.tried or only_chosen)
        return
    began = time.monotonic()
    asked.workers *= asked.only != ["layers"]  # they are few
    workers = [subprocess.Popen([sys.executable, *sys.argv, "--compile", str(part)]) for part in range(asked.workers)]
    failed = [worker.args for worker in workers if worker.wait() != 0]
    assert not failed, failed
    print(f"compiled in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "commit": asked.commit,
        "device": torch.cuda.get_device_name(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__},
        "floor": {"read_tb_s": READ_TB_S, "tflop_s": TFLOP_S},
    }
    parts: dict[str, Iterator[dict[str, Any]]] = (
        {"sweep": sweep(asked.models, asked.tokens, asked.weights, asked.tried)}
        if asked.tried
        else {
            "layers": layers(asked.models, asked.tokens),
            "routing": routers(asked.models),
            "experts": compare(asked.models, asked.weights, loop=not asked.no_loop),
        }
    )
    for part, rows in parts.items():
        if asked.only and part not in asked.only:
            continue
        result[part] = []
        for row in rows:
            result[part].append(row)
            print(json.dumps(row)[:420], file=sys.stderr, flush=True)
            if asked.output:
                asked.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"done in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
