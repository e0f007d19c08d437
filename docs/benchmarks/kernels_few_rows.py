"""Products of 4 to 64 rows behind a norm, by shapes of blocks: `python docs/benchmarks/kernels_few_rows.py > FILE`.

Those of gpt-oss have biases.

What `small_linear.few_rows_shape` chooses from. A time is that of a norm and one product in a CUDA graph of many, whose weights are
together larger than the L2 cache; numbers are checked first. `--compile I N` only compiles the I-th of N parts, to share that work.
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

from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.small_linear import FewRows, FewRowsShape

WEIGHTS = {
    "8B out": (4096, 4096),
    "8B qkv": (6144, 4096),
    "8B down": (4096, 14336),
    "gpt-oss qkv": (5120, 2880),
    "gpt-oss out": (2880, 4096),
    "gpt-oss router": (128, 2880),
}
ROWS = (4, 16, 32, 64)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--compile", type=int, nargs=2, metavar=("I", "N"))
    asked = parser.parse_args()
    torch.manual_seed(0)
    if asked.compile:
        todo = [
            (name, rows, shape)
            for name, rows in itertools.product(asked.weights, asked.rows)
            for shape in candidates(*WEIGHTS[name], rows)
        ]
        for name, rows, shape in todo[asked.compile[0] :: asked.compile[1]]:
            columns = WEIGHTS[name][1]
            bias = random(256) if name.startswith("gpt-oss") else None
            FewRows(random(256, columns), bias, shape, dependent_launch=True)(random(rows, columns))
        return
    ops = TritonOps(dependent_launch=True)
    found = [measured(name, rows, ops) for name, rows in itertools.product(asked.weights, asked.rows)]
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(
        json.dumps(
            {"command": " ".join(sys.argv), "device": torch.cuda.get_device_name(), "versions": versions, "rows": found}, indent=1
        )
    )


if __name__ == "__main__":
    main()
