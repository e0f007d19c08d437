"""A layer of a dense model without attention, of 1 to 8 rows, by which products it has: `python docs/benchmarks/kernels_layers.py`.

What `persistent_rows.serves_few` is drawn from: a product that is fastest alone may leave no room for the kernels around it. A line
for each model and number of rows, printed as it comes: microseconds of a layer of several in a CUDA graph, whose weights are
together larger than the L2 cache. Numbers are checked first. `bound` is what `TritonOps.bind_linear` gives, with the gate if it
takes that, `direct` what it gave before. `--ways` measures some of them, `--compile I N` only compiles the I-th of N parts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import triton
from kernels_triton_ops import random, relative_error, time_us

from enginery.api import GatableLinear, LinearFn
from enginery_ops_triton.gluon_kernels import gluon_kernels
from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.persistent_rows import MOST_COLUMNS, PersistentRows
from enginery_ops_triton.small_linear import DIRECT_ROWS, DirectRows, FewRows, direct_shape, few_rows_shape
from enginery_ops_triton.stream_k import StreamK, num_programs

MODELS = {  # outputs and columns of qkv, out, gate and up, down
    "Qwen3-Next, shared expert": ((9216, 2048), (2048, 4096), (1024, 2048), (2048, 512)),
    "8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "half of 8B": ((3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168)),
    "Qwen3-4B": ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),
    "Qwen3-1.7B": ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)),
    "Llama-3.2-1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "Llama-3.2-3B": ((5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "Qwen3-14B": ((7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)),
    "half of 70B": ((5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336)),
    "a quarter of 70B": ((2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168)),
}
NAMES = ("qkv", "out", "gate_up", "down")
ROWS = (1, 4, 8)
TB_S = 4.4  # that one row reads of large weights
Make = Callable[[torch.Tensor], LinearFn]


def ways(multiprocessors: int) -> dict[str, Make]:
    few, stays, shared = (gluon_kernels(name) for name in ("linear_few", "linear_persistent", "linear_stream_k"))
    assert few is not None
    assert stays is not None
    assert shared is not None

    def direct(weight: torch.Tensor) -> LinearFn:
        if shape := direct_shape(*weight.shape, DIRECT_ROWS, multiprocessors=multiprocessors):
            return DirectRows(weight, None, shape, kernels=few, dependent_launch=True)
        if in_blocks := few_rows_shape(*weight.shape, DIRECT_ROWS, multiprocessors=multiprocessors):
            return FewRows(weight, None, in_blocks, dependent_launch=True)
        return partial(F.linear, weight=weight)

    def in_shares(weight: torch.Tensor) -> LinearFn:
        return StreamK(weight, None, kernels=shared, programs=num_programs(multiprocessors))

    def persistent(weight: torch.Tensor) -> LinearFn:
        if weight.shape[1] > MOST_COLUMNS:
            return in_shares(weight)
        return PersistentRows(weight, None, kernels=stays, programs=multiprocessors)

    ops = TritonOps(dependent_launch=True)
    return {"bound": partial(ops.bind_linear, bias=None), "direct": direct, "persistent": persistent, "shares": in_shares}


def layer_us(rows: int, layers: list[dict[str, LinearFn]], hidden: int, attended: int, *, is_gated: bool) -> float:
    """Norms, the activation and products, also as `NormingLinear`. is_gated: gate_up takes the activation."""
    ops, scale, wide, x = TritonOps(dependent_launch=True), random(hidden), random(attended), random(rows, hidden)

    def normed(product: LinearFn, h: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        norm = getattr(product, "add_rms_norm", None)
        made = norm(h, residual, scale, 1e-6) if norm else None
        return ops.add_rms_norm(h, residual, scale, 1e-6) if made is None else made

    def run() -> None:
        residual, h = x.clone(), x
        for layer in layers:
            h = normed(layer["qkv"], h, residual)
            h = layer["out"](ops.rms_norm(layer["qkv"](h)[:, :attended], wide, 1e-6))
            h = normed(layer["gate_up"], h, residual)
            made = layer["gate_up"](h)
            h = layer["down"](made if is_gated else ops.gated_silu(made))

    return time_us([run]) / len(layers)


def measured(model: str, rows: int, weights: list[dict[str, torch.Tensor]], makers: dict[str, Make]) -> dict[str, object]:
    taken = {}
    for way, make in makers.items():
        layers = [{name: make(weight) for name, weight in layer.items()} for layer in weights]
        for name, weight in weights[0].items():
            x = random(rows, weight.shape[1])
            assert relative_error(layers[0][name](x), F.linear(x.double(), weight.double())) < 5e-3, (model, rows, way, name)
        takes_gates = False
        for layer in layers if way == "bound" else []:
            if isinstance(product := layer["gate_up"], GatableLinear):
                takes_gates, layer["gate_up"] = True, product.with_gate(TritonOps(dependent_launch=True).gated_silu)
        taken[way] = round(layer_us(rows, layers, MODELS[model][0][1], MODELS[model][1][1], is_gated=takes_gates), 2)
    num_bytes = sum(weight.numel() * 2 for weight in weights[0].values())
    return {"layer": model, "rows": rows, "bytes_us": round(num_bytes / TB_S / 1e6, 1), "us": taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--ways", nargs="+", choices=("bound", "direct", "persistent", "shares"))
    parser.add_argument("--compile", type=int, nargs=2, metavar=("I", "N"))
    asked = parser.parse_args()
    torch.manual_seed(0)
    makers = ways(torch.cuda.get_device_properties(0).multi_processor_count)
    makers = {way: make for way, make in makers.items() if not asked.ways or way in asked.ways}
    if asked.compile:
        todo = [(size, make) for model in asked.models for size in MODELS[model] for make in makers.values()]
        for size, make in todo[asked.compile[0] :: asked.compile[1]]:
            for rows in asked.rows:
                make(random(*size))(random(rows, size[1]))
        return
    print(
        json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}), flush=True
    )
    for model in asked.models:
        count = max(4, min(24, -(-400_000_000 // sum(2 * outputs * columns for outputs, columns in MODELS[model]))))
        sizes = dict(zip(NAMES, MODELS[model], strict=True))
        weights = [{name: random(*size, scale=size[1] ** -0.5) for name, size in sizes.items()} for _ in range(count)]
        for rows in asked.rows:
            print(json.dumps(measured(model, rows, weights, makers)), flush=True)


if __name__ == "__main__":
    main()
