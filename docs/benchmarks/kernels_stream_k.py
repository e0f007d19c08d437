"""Products of 2 to 64 rows by shares of the weight (Stream-K), beside others: `python docs/benchmarks/kernels_stream_k.py > FILE`.

What `stream_k.serves` is drawn from. A line for each weight and number of rows, printed as it comes: microseconds of a norm and one
product behind it in a CUDA graph of many, whose weights are together larger than the L2 cache. Numbers are checked first. Then, for
each number of rows, a layer of 8B without attention, whose products are all, none, or some by shares (`layer_us`): what is fastest
alone may leave no room for the kernels around it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from kernels_layers import MODELS, NAMES, layer_us
from kernels_triton_ops import copies, random, relative_error, time_us

from enginery.api import LinearFn
from enginery_ops_triton import small_linear
from enginery_ops_triton.gluon_kernels import gluon_kernels
from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.small_linear import DIRECT_ROWS, FEW_ROWS, DirectRows, FewRows, direct_shape, few_rows_shape
from enginery_ops_triton.stream_k import StreamK, num_programs

WEIGHTS = {  # outputs, columns
    "8B out": (4096, 4096),
    "8B qkv": (6144, 4096),
    "8B down": (4096, 14336),
    "8B gate_up": (28672, 4096),
    "8B head": (128256, 4096),
    "half of 8B out": (4096, 2048),
    "half of 8B qkv": (3072, 4096),
    "half of 8B down": (4096, 7168),
    "half of 8B gate_up": (14336, 4096),
    "half of 70B out": (8192, 4096),
    "half of 70B qkv": (5120, 8192),
    "half of 70B down": (8192, 14336),
    "half of 70B gate_up": (28672, 8192),
    "0.6B out": (1024, 2048),
    "0.6B qkv": (4096, 1024),
    "0.6B down": (1024, 3072),
    "0.6B gate_up": (6144, 1024),
    "gpt-oss qkv": (5120, 2880),
    "gpt-oss out": (2880, 4096),
    "Qwen3-Next qkvz": (12288, 2048),
    "Qwen3-Next out": (2048, 4096),
    "Kimi-Linear qkv": (12448, 2304),
    "Kimi-Linear out": (2304, 4096),
}
ROWS = (2, 4, 8, 16, 32, 64)


def ways(outputs: int, columns: int, rows: int) -> dict[str, Callable[[torch.Tensor, torch.Tensor | None], LinearFn]]:
    """By name, what makes each product that is able."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    found: dict[str, Callable[[torch.Tensor, torch.Tensor | None], LinearFn]] = {
        "torch": lambda weight, bias: partial(F.linear, weight=weight, bias=bias)
    }
    kernels, shared = gluon_kernels("linear_few"), gluon_kernels("linear_stream_k")
    assert kernels is not None
    assert shared is not None
    if few := few_rows_shape(outputs, columns, max(rows, FEW_ROWS), multiprocessors=multiprocessors):
        found["few_rows"] = partial(FewRows, shape=few, dependent_launch=True)
    if rows <= DIRECT_ROWS and (direct := direct_shape(outputs, columns, DIRECT_ROWS, multiprocessors=multiprocessors)):
        found["direct"] = partial(DirectRows, shape=direct, kernels=kernels, dependent_launch=True)
    found["stream_k"] = partial(StreamK, kernels=shared, programs=num_programs(multiprocessors))
    return found


def measured(name: str, rows: int, weights: list[torch.Tensor]) -> dict[str, object]:
    """Microseconds by the name of each way."""
    outputs, columns = WEIGHTS[name]
    bias = random(outputs) if name.startswith("gpt-oss") else None
    small, scale, x = random(8, 4096), random(4096), random(rows, columns)
    exact = F.linear(x.double(), weights[0].double(), None if bias is None else bias.double())
    ops, taken = TritonOps(dependent_launch=True), {}
    for way, make in ways(outputs, columns, rows).items():
        products = [make(weight, bias) for weight in weights]

        def behind_norm(product: LinearFn) -> None:
            ops.rms_norm(small, scale, 1e-6)
            product(x)

        first = products[0](x)
        assert relative_error(first, exact) < 5e-3, (name, rows, way)
        assert torch.equal(products[0](x), first), (name, rows, way)
        taken[way] = round(time_us([partial(behind_norm, product) for product in products], replays=9), 2)
    return {"weight": name, "rows": rows, "us": taken, "best": min(taken, key=lambda way: taken[way])}


def bound(shared: tuple[str, ...], weights: list[dict[str, torch.Tensor]]) -> list[dict[str, LinearFn]]:
    """Products of each layer, those by shares that are named and able."""
    ops = TritonOps(dependent_launch=True)
    return [
        {name: ops.bind_linear(weight, None) if name in shared else without_shares(weight) for name, weight in layer.items()}
        for layer in weights
    ]


def without_shares(weight: torch.Tensor) -> LinearFn:
    """What `bind_small_linear` gives on other devices."""
    nothing = {"bind_stream_k": mock.Mock(return_value=None), "bind_persistent": mock.Mock(return_value=None)}
    with mock.patch.multiple(small_linear, **nothing):
        return small_linear.bind_small_linear(weight, None, dependent_launch=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    asked = parser.parse_args()
    torch.manual_seed(0)
    print(
        json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}), flush=True
    )
    for name in asked.weights:
        outputs, columns = WEIGHTS[name]
        weights = [random(outputs, columns, scale=columns**-0.5) for _ in range(copies(outputs * columns * 2, most=24))]
        for rows in asked.rows:
            print(json.dumps(measured(name, rows, weights)), flush=True)
    del weights
    sizes = dict(zip(NAMES, MODELS["8B"], strict=True))
    hidden = MODELS["8B"][0][1]
    layers = [{name: random(*size, scale=size[1] ** -0.5) for name, size in sizes.items()} for _ in range(6)]
    for rows in asked.rows:
        taken = {}
        for shared in (NAMES, ("gate_up",), ()):
            taken["+".join(shared) or "none"] = round(layer_us(rows, bound(shared, layers), hidden, hidden, is_gated=False), 2)
        print(json.dumps({"layer": "8B", "rows": rows, "us": taken}), flush=True)


if __name__ == "__main__":
    main()
