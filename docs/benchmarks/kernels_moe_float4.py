"""Experts of gpt-oss in MXFP4 with enginery-ops-triton: `python docs/benchmarks/kernels_moe_float4.py --output FILE`.

One layer's experts on random weights with biases and clamped gates, checked against float64 first. A time is that of one call
among several in a CUDA graph, each with tokens and experts of its own, routed in advance. The floor is the larger of two times: the
packed bytes of the experts that were used over the memory's bandwidth, and the products over the matrix rate in bfloat16. Beside it
stand the same experts in bfloat16 (`plain`; --no-plain leaves them out), with a floor of their own. `--sweep` times the blocks that
expert_blocks.py chooses from, one product at a time. Kernels are compiled by several processes before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from kernels_moe import DEVICE, READ_TB_S, TFLOP_S, rates, relative_error, time_us
from moe_shapes import DTYPE

from enginery.api import Activation, ExpertBiases, ExpertNames, ExpertsShape, Routed, Routing, StoredWeight
from enginery.nn import reference_experts
from enginery.nn.stored import FLOAT4_BLOCKS, one_expert, widen
from enginery_ops_triton.expert_blocks import ExpertSizes, Float4Blocks, float4_blocks_for
from enginery_ops_triton.experts import Experts, bind_experts
from enginery_ops_triton.experts_float4 import Float4Experts
from enginery_ops_triton.routing import route

ROUTING = Routing(top_k=4, renormalise=True)
TOKENS = (1, 2, 8, 32, 64, 256, 1024, 8192)
CHECKED = 24  # tokens
BYTES_EACH = 0.5 + 1 / 32  # of a value and its part of a scale
GATE = Activation(kind="clamped_swiglu", alpha=1.702, limit=7.0)
UNFIT = (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's layer of experts."""

    num_experts: int
    columns: int = 2880
    inner: int = 2880

    def blocks(self, num_tokens: int) -> Float4Blocks:
        sizes = ExpertSizes(
            num_experts=self.num_experts,
            columns=self.columns,
            inner=self.inner,
            dtype=DTYPE,
            weight_dtype=torch.uint8,
            has_direct=True,
        )
        return float4_blocks_for(num_tokens * ROUTING.top_k, ROUTING.top_k, sizes)


SHAPES = {"gpt-oss-120b": Shape(num_experts=128), "gpt-oss-20b": Shape(num_experts=32)}


class Layer:
    """Random weights of a shape, or of its first experts."""

    def __init__(self, shape: Shape, num_experts: int | None = None) -> None:
        self.shape, self.count = shape, num_experts or shape.num_experts
        columns, inner = shape.columns, shape.inner
        self.stored = self.drawn(2 * inner, columns), self.drawn(columns, inner)
        self.biases = ExpertBiases(
            torch.randn((self.count, 2 * inner), dtype=DTYPE, device=DEVICE),
            torch.randn((self.count, columns), dtype=DTYPE, device=DEVICE),
        )
        self.of_model = ExpertsShape(names=ExpertNames(), count=self.count, inner=inner, hidden=columns, bias=True, activation=GATE)

    def drawn(self, rows: int, columns: int) -> StoredWeight:
        values = torch.randint(256, (self.count, rows, columns // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.randint(119, 121, (self.count, rows, columns // 32), dtype=torch.uint8, device=DEVICE)
        return StoredWeight(scheme=FLOAT4_BLOCKS, values=values, scales=scales.view(torch.float8_e8m0fnu))

    def bound(self) -> Float4Experts:
        found = bind_experts(*self.stored, self.of_model, self.biases, dependent_launch=True)
        assert isinstance(found, Float4Experts)
        return found

    def plain(self) -> Experts:
        """In bfloat16, an expert at a time, so that no more is in memory."""
        wide = []
        for each in self.stored:
            weight = torch.empty((*each.values.shape[:2], 2 * each.values.shape[2]), dtype=DTYPE, device=DEVICE)
            for expert in range(self.count):
                weight[expert] = widen(one_expert(each, expert), DTYPE)
            wide.append(weight)
        return Experts(*wide, activation=GATE, biases=self.biases, dependent_launch=True)

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, Routed]:
        x = torch.randn((num_tokens, self.shape.columns), dtype=DTYPE, device=DEVICE)
        logits = torch.randn((num_tokens, self.shape.num_experts), device=DEVICE)
        return x, route(logits, None, ROUTING, dependent_launch=True)

    def exact(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """In float64, one expert after the other."""
        out = torch.zeros_like(x, dtype=torch.float64)
        for expert in torch.unique(routed.ids).tolist():
            gate_up, down = (widen(one_expert(each, expert), torch.float64)[None] for each in self.stored)
            biases = ExpertBiases(*(each[expert : expert + 1].double() for each in self.biases))
            shares = torch.where(routed.ids == expert, routed.weights, 0.0)
            one = reference_experts.bind_experts(gate_up, down, self.of_model, biases)
            out += one(x.double(), Routed(torch.zeros_like(routed.ids), shares))
        return out


def floor(shape: Shape, routings: Sequence[Routed], bytes_each: float) -> dict[str, float]:
    """Of a call: bytes of weights, operations, microseconds."""
    used = statistics.mean(len(torch.unique(each.ids)) for each in routings)
    values = 3 * shape.columns * shape.inner
    num_bytes, flops = used * values * bytes_each, 2 * values * routings[0].ids.numel()
    return {
        "experts_used": used,
        "weight_bytes": num_bytes,
        "flops": flops,
        "floor_us": max(num_bytes / READ_TB_S / 1e6, flops / TFLOP_S / 1e6),
    }


def num_calls(num_tokens: int) -> int:
    """So many that what a cache of 50 MB still has is not read again."""
    return 24 if num_tokens <= 2 else 6 if num_tokens <= 64 else 3


def compare(models: Sequence[str], tokens: Sequence[int], *, plain: bool) -> Iterator[dict[str, Any]]:
    for name in models:
        shape = SHAPES[name]
        layer = Layer(shape)
        bound, wide = layer.bound(), layer.plain() if plain else None
        for num_tokens in tokens:
            inputs = [layer.inputs(num_tokens) for _ in range(num_calls(num_tokens))]
            routings = [routed for _, routed in inputs]
            x, routed = inputs[0]
            expected = layer.exact(x[:CHECKED], Routed(routed.ids[:CHECKED], routed.weights[:CHECKED]))
            found: dict[str, Any] = {"model": name, "tokens": num_tokens, **floor(shape, routings, BYTES_EACH)}
            found["blocks"] = str(shape.blocks(num_tokens))
            found["error"] = relative_error(bound(x, routed), expected)
            assert found["error"] < 1e-2, found
            found["packed"] = rates(found, time_us([partial(bound, *each) for each in inputs], replays=7))
            if wide is not None:
                error = relative_error(wide(x, routed), expected)
                assert error < 1e-2, error
                of_plain = floor(shape, routings, DTYPE.itemsize)
                found["plain"] = rates(of_plain, time_us([partial(wide, *each) for each in inputs], replays=5))
            yield found
        del layer, bound, wide


def candidates(shape: Shape, num_tokens: int) -> Iterator[tuple[str, Float4Blocks]]:
    """Those of one product at a time, with the other as it is chosen. `sweep` tries the best two of them together, too."""
    chosen = shape.blocks(num_tokens)
    yield "chosen", chosen
    for m, few, alone, (n, num_warps, stages, registers) in tried(num_tokens * ROUTING.top_k, shape, chosen.m):
        block = replace(chosen.gate_up, n=n, num_warps=num_warps, stages=stages, registers=registers, split=1)
        for which in ("gate_up", "down"):
            yield which, replace(chosen, m=m, alone=alone, few=few, **{which: block})


def tried(num_pairs: int, shape: Shape, m: int) -> Iterator[tuple[int, int, bool, tuple[int, int, int, int | None]]]:
    """Pairs of a tile and of its smaller kind, whether each pair is one; rows, warps, stages, registers."""
    if m == 8:
        yield from ((m, 0, alone, sizes) for alone in (False, num_pairs <= shape.num_experts // 4) for sizes in OF_8)
    elif m == 16:
        yield from ((m, few, False, sizes) for few in (0, 8) for sizes in OF_16)
    else:
        wide = ((32, 0), (32, 16), (64, 0), (64, 16), (64, 32), (128, 0), (128, 32), (128, 64))
        yield from ((of, few, False, sizes) for of, few in wide if m // 2 <= of <= 2 * m for sizes in OF_MANY)


OF_8 = (
    *((128, 4, stages, registers) for stages, registers in ((2, None), (2, 96), (3, None))),
    *((64, 4, stages, None) for stages in (3, 4, 6)),
    *((64, 2, 3, None), (128, 8, 3, 80), (256, 8, 3, 128)),
)
OF_16 = (
    *((128, 4, stages, registers) for stages, registers in ((2, None), (2, 128), (3, 168))),
    *((64, 4, stages, registers) for stages, registers in ((3, None), (4, 96))),
    *((256, 8, 2, 128), (128, 8, 3, 80)),
)
OF_MANY = (*((128, warps, stages, None) for warps in (4, 8) for stages in (3, 4)), (256, 8, 2, None), (256, 8, 3, None))


def sweep(models: Sequence[str], tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    for name in models:
        layer = Layer(SHAPES[name])
        for num_tokens in tokens:
            yield {"model": name, "tokens": num_tokens, **swept(layer, num_tokens)}


def swept(layer: Layer, num_tokens: int) -> dict[str, Any]:
    """Every candidate's time, the fastest first, numbers checked."""
    bound, inputs = layer.bound(), [layer.inputs(num_tokens) for _ in range(num_calls(num_tokens))]
    x, routed = inputs[0]
    expected = layer.exact(x[:CHECKED], Routed(routed.ids[:CHECKED], routed.weights[:CHECKED]))
    times: list[tuple[float, str, Float4Blocks]] = []

    def measure(which: str, blocks: Float4Blocks) -> None:
        try:
            error = relative_error(bound.of_blocks(x, routed, blocks)[:CHECKED], expected)
            taken = time_us([partial(bound.of_blocks, *each, blocks) for each in inputs], replays=5)
        except UNFIT:
            return
        assert error < 1e-2, blocks
        times.append((round(taken, 1), which, blocks))

    for which, blocks in dict.fromkeys(candidates(layer.shape, num_tokens)):
        measure(which, blocks)
    times.sort(key=lambda each: each[0])
    gate_up, down = (next(blocks for _, which, blocks in times if which == wanted) for wanted in ("gate_up", "down"))
    measure("both", replace(gate_up, down=down.down))
    known = floor(layer.shape, [routed for _, routed in inputs], BYTES_EACH)
    return {**known, "us": [(us, which, str(blocks)) for us, which, blocks in sorted(times, key=lambda each: each[0])]}


def compile_part(part: int, parts: int, models: Sequence[str], tokens: Sequence[int], *, swept: bool) -> None:
    """On a layer of one expert, so that many processes have room."""
    for name in models:
        shape = SHAPES[name]
        every = [
            blocks
            for num_tokens in tokens
            for _, blocks in (candidates(shape, num_tokens) if swept else [("", shape.blocks(num_tokens))])
        ]
        bound = Layer(shape, num_experts=1).bound()
        x = torch.randn((4, shape.columns), dtype=DTYPE, device=DEVICE)
        ids = torch.zeros((4, ROUTING.top_k), dtype=torch.int32, device=DEVICE)
        for blocks in list(dict.fromkeys(every))[part::parts]:
            try:
                bound.of_blocks(x, Routed(ids, torch.rand(ids.shape, device=DEVICE)), blocks)
            except UNFIT:
                continue
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["gpt-oss-120b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--no-plain", action="store_true", help="leave bfloat16 experts out, 6.4 GB of them")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--compile", type=int, metavar="PART", help="what a worker does")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    if asked.compile is not None:
        compile_part(asked.compile, asked.workers, asked.models, asked.tokens, swept=asked.sweep)
        return
    began = time.monotonic()
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
    part = "sweep" if asked.sweep else "experts"
    rows = sweep(asked.models, asked.tokens) if asked.sweep else compare(asked.models, asked.tokens, plain=not asked.no_plain)
    result[part] = []
    for row in rows:
        result[part].append(row)
        print(json.dumps(row)[:600], file=sys.stderr, flush=True)
        if asked.output:
            asked.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"done in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
