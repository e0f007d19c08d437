"""Products of 4 to 64 rows behind a norm, by shapes of blocks: `python docs/benchmarks/kernels_few_rows.py > FILE`.

Those of gpt-oss have biases.

What `small_linear.few_rows_shape` chooses from, and with `--direct`, for up to 8 rows, `direct_shape`: then each line is printed as
it comes, and beside it are torch, what `few_rows_shape` chooses, and one row by `matvec`.

A time is that of a norm and one product in a CUDA graph of many, whose weights are together larger than the L2 cache; numbers are
checked first. `--compile I N` only compiles the I-th of N parts, to share that work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from kernels_triton_ops import copies, random, relative_error, time_us

from enginery_ops_triton.gluon_kernels import gluon_kernels
from enginery_ops_triton.matvec import Matvec, matvec_shape
from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.small_linear import (
    FEW_ROWS,
    DirectRows,
    DirectShape,
    FewRows,
    FewRowsShape,
    few_rows_shape,
)

WEIGHTS = {
    "8B out": (4096, 4096),
    "8B qkv": (6144, 4096),
    "8B down": (4096, 14336),
    "8B gate_up": (28672, 4096),
    "gpt-oss qkv": (5120, 2880),
    "gpt-oss out": (2880, 4096),
    "gpt-oss router": (128, 2880),
    "Qwen3-Next qkvz": (12288, 2048),
    "Qwen3-Next out": (2048, 4096),
    "Kimi-Linear qkv": (12448, 2304),
    "Kimi-Linear out": (2304, 4096),
    "V2-Lite gate_up": (21888, 2048),
}
ROWS = (4, 16, 32, 64)
DIRECT_ROWS = (1, 2, 4, 8)
DIRECT_WEIGHTS = tuple(name for name in WEIGHTS if name != "gpt-oss router")
# block_n, block_k, num_warps, ahead, x_ahead, registers: none of them spills a register.
DIRECT_SHAPES = (
    (16, 64, 8, 4, 4, 128),
    (16, 64, 8, 3, 2, 80),
    (16, 64, 8, 2, 2, 64),
    (16, 32, 8, 8, 4, 128),
    (16, 128, 8, 2, 2, 128),
    (16, 64, 4, 4, 4, 128),
    (16, 64, 4, 3, 2, 80),
    (16, 64, 16, 4, 4, 128),
    (16, 64, 16, 2, 2, 64),
    (32, 64, 8, 5, 4, 255),
    (32, 64, 8, 2, 2, 128),
    (32, 64, 16, 2, 2, 128),
)
MOST_SHARED_BYTES = 200_000
FEWEST_PROGRAMS, MOST_PROGRAMS = 40, 800


def candidates(outputs: int, columns: int, rows: int) -> Iterator[FewRowsShape]:
    """Shapes that keep the device busy and fit into its shared memory."""
    block_m = max(16, rows)
    for block_n, block_k, split, stages in itertools.product((16, 32, 64, 128), (128, 256, 512), (1, 2, 3, 4, 6, 8, 12), (2, 3, 5)):
        steps = -(-columns // (block_k * split))
        fits = steps * (split - 1) * block_k < columns and (block_n + block_m) * block_k * 2 * stages <= MOST_SHARED_BYTES
        if fits and stages <= max(2, steps) and FEWEST_PROGRAMS <= -(-outputs // block_n) * split <= MOST_PROGRAMS:
            yield FewRowsShape(block_n=block_n, block_k=block_k, split=split, stages=stages)


def measured(name: str, rows: int, ops: TritonOps) -> dict[str, Any]:
    """The best shapes for a weight and a number of rows, and torch."""
    outputs, columns = WEIGHTS[name]
    bias = random(outputs) if name.startswith("gpt-oss") else None
    weights = [random(outputs, columns, scale=columns**-0.5) for _ in range(copies(outputs * columns * 2, most=12))]
    small, scale, x = random(8, 4096), random(4096), random(rows, columns)

    def behind_norm(linear: Any) -> Any:
        ops.rms_norm(small, scale, 1e-6)
        return linear(x)

    exact, times = F.linear(x.double(), weights[0].double(), None if bias is None else bias.double()), []
    for shape in candidates(outputs, columns, rows):
        products = [FewRows(weight, bias, shape, dependent_launch=True) for weight in weights]
        assert relative_error(products[0](x), exact) < 5e-3, shape
        times.append({"us": time_us([partial(behind_norm, product) for product in products], replays=5), **vars(shape)})
    theirs = time_us([partial(behind_norm, partial(F.linear, weight=weight, bias=bias)) for weight in weights], replays=7)
    norm = time_us([partial(ops.rms_norm, small, scale, 1e-6)] * 8, replays=7)
    best = sorted(times, key=lambda each: each["us"])[:8]
    return {"weight": name, "rows": rows, "norm_us": norm, "torch_us": theirs, "tried": len(times), "best": best}


def direct_shapes() -> list[DirectShape]:
    names = ("block_n", "block_k", "num_warps", "ahead", "x_ahead", "registers")
    return [DirectShape(**dict(zip(names, each, strict=True))) for each in DIRECT_SHAPES]


def direct_product(weight: torch.Tensor, bias: torch.Tensor | None, shape: DirectShape) -> DirectRows:
    kernels = gluon_kernels("linear_few")
    assert kernels is not None, f"Triton is {triton.__version__}"
    return DirectRows(weight, bias, shape, kernels=kernels, dependent_launch=True)


def print_direct(name: str, all_rows: list[int], ops: TritonOps) -> None:
    """A line for each number of rows and shape: microseconds of a norm and a product, and the weight's bytes in that time."""
    outputs, columns = WEIGHTS[name]
    bias = random(outputs) if name.startswith("gpt-oss") else None
    weights = [random(outputs, columns, scale=columns**-0.5) for _ in range(copies(outputs * columns * 2, most=12))]
    small, scale = random(8, 4096), random(4096)
    norm = time_us([partial(ops.rms_norm, small, scale, 1e-6)] * 8, replays=7)

    def show(rows: int, kind: str, products: list[Any]) -> None:
        x = random(rows, columns)
        exact = F.linear(x.double(), weights[0].double(), None if bias is None else bias.double())
        error = relative_error(products[0](x), exact)
        line = {"weight": name, "rows": rows, "kind": kind, "error": float(f"{error:.1e}")}
        if error < 5e-3:

            def behind_norm(product: Any) -> Any:
                ops.rms_norm(small, scale, 1e-6)
                return product(x)

            us = time_us([partial(behind_norm, product) for product in products], replays=7)
            line |= {"us": round(us, 2), "norm_us": round(norm, 2), "tb_s": round(outputs * columns * 2 / us / 1e6, 2)}
        else:
            line["wrong"] = True
        print(json.dumps(line), flush=True)

    show(1, "matvec", [Matvec(weight, bias, matvec_shape(columns), dependent_launch=True) for weight in weights])
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    few = few_rows_shape(outputs, columns, FEW_ROWS, multiprocessors=multiprocessors)
    for rows in all_rows:
        show(rows, "torch", [partial(F.linear, weight=weight, bias=bias) for weight in weights])
        if few and rows > 1:
            show(rows, "few_rows", [FewRows(weight, bias, few, dependent_launch=True) for weight in weights])
        for shape in direct_shapes():
            show(rows, f"direct {tuple(vars(shape).values())}", [direct_product(weight, bias, shape) for weight in weights])


def run_direct(asked: argparse.Namespace) -> None:
    weights = asked.weights or list(DIRECT_WEIGHTS)
    if asked.compile:
        columns_of_all = sorted({WEIGHTS[name][1] for name in weights})
        todo = list(itertools.product(columns_of_all, direct_shapes()))
        for columns, shape in todo[asked.compile[0] :: asked.compile[1]]:
            direct_product(random(256, columns), None, shape)(random(2, columns))
        return
    print(
        json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}), flush=True
    )
    ops = TritonOps(dependent_launch=True)
    for name in weights:
        print_direct(name, asked.rows or list(DIRECT_ROWS), ops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS)
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("I", "N"))
    asked = parser.parse_args()
    torch.manual_seed(0)
    if asked.direct:
        run_direct(asked)
        return
    chosen = list(itertools.product(asked.weights or WEIGHTS, asked.rows or ROWS))
    if asked.compile:
        todo = [(name, rows, shape) for name, rows in chosen for shape in candidates(*WEIGHTS[name], rows)]
        for name, rows, shape in todo[asked.compile[0] :: asked.compile[1]]:
            columns = WEIGHTS[name][1]
            bias = random(256) if name.startswith("gpt-oss") else None
            FewRows(random(256, columns), bias, shape, dependent_launch=True)(random(rows, columns))
        return
    ops = TritonOps(dependent_launch=True)
    found = [measured(name, rows, ops) for name, rows in chosen]
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(
        json.dumps(
            {"command": " ".join(sys.argv), "device": torch.cuda.get_device_name(), "versions": versions, "rows": found}, indent=1
        )
    )


if __name__ == "__main__":
    main()
