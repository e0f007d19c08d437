"""Products of one row that norm the row themselves: `python docs/benchmarks/kernels_norm_product.py --output FILE`.

Layers follow each other in a graph, each with weights of its own: norm and first product, product back, norm and second product,
product back; there are neither attention nor experts between. `apart`: a kernel for each norm. `within`: as `NormingLinear`.
Numbers are checked against float64 first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from kernels_moe import time_us

from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.small_linear import Product, bind_small_linear

HAS_DEVICE = torch.cuda.is_available()
DEVICE = "cuda" if HAS_DEVICE else "cpu"
DTYPE = torch.bfloat16 if HAS_DEVICE else torch.float32  # the interpreter cuts bfloat16 off
READ_TB_S = 4.26  # of an H200, measured
EPS, LAYERS = 1e-6, 12


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Outputs of a layer's products behind norms, and columns of those back: the first so many of what the ones before give."""

    hidden: int
    first: int
    back: int
    second: int
    back_again: int

    @property
    def bytes(self) -> int:
        return 2 * self.hidden * (self.first + self.back + self.second + self.back_again)


SHAPES = {
    "qwen3-next": Shape(hidden=2048, first=12352, back=4096, second=520, back_again=512),
    "gpt-oss-120b": Shape(hidden=2880, first=5120, back=4096, second=128, back_again=128),
    "llama-3.1-8b": Shape(hidden=4096, first=6144, back=4096, second=28672, back_again=14336),
}
SMALL = {"small": Shape(hidden=320, first=96, back=64, second=40, back_again=32)}  # for the interpreter


class Layer:
    """Random weights of one."""

    def __init__(self, shape: Shape) -> None:
        def bound(outputs: int, columns: int) -> Product:
            weight = torch.randn((outputs, columns), dtype=DTYPE, device=DEVICE).mul_(columns**-0.5)
            made = bind_small_linear(weight, None, dependent_launch=HAS_DEVICE)
            assert isinstance(made, Product)
            return made

        hidden = shape.hidden
        self.norms = [torch.rand(hidden, dtype=DTYPE, device=DEVICE) + 0.5 for _ in range(2)]
        self.behind_norms = [bound(shape.first, hidden), bound(shape.second, hidden)]
        self.back = [bound(hidden, shape.back), bound(hidden, shape.back_again)]


def run(layers: list[Layer], x: torch.Tensor, *, within: bool) -> torch.Tensor:
    ops, residual = TritonOps(dependent_launch=HAS_DEVICE), x.clone()
    for layer in layers:
        for norm, product, back in zip(layer.norms, layer.behind_norms, layer.back, strict=True):
            normed = product.add_rms_norm(x, residual, norm, EPS) if within else ops.add_rms_norm(x, residual, norm, EPS)
            assert normed is not None
            x = back(product(normed)[:, : back.weight.shape[1]])
    return residual + x


def exact(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
    """In float64."""
    x = x.double()
    residual = x.clone()
    for layer in layers:
        for norm, product, back in zip(layer.norms, layer.behind_norms, layer.back, strict=True):
            residual = residual + x
            normed = residual * (residual.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
            x = (normed @ product.weight.double().T)[:, : back.weight.shape[1]] @ back.weight.double().T
    return residual + x


def check(layers: list[Layer], ways: dict[str, Callable[[torch.Tensor], torch.Tensor]], hidden: int) -> dict[str, float]:
    """Each way's error beside float64, relative to its largest number."""
    x = torch.randn((1, hidden), dtype=DTYPE, device=DEVICE)
    wanted, errors = exact(layers, x), {}
    for name, way in ways.items():
        errors[name] = ((way(x).double() - wanted).abs().max() / wanted.abs().max()).item()
        assert errors[name] < (2e-2 if HAS_DEVICE else 1e-5), (name, errors[name])
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for name, shape in {name: SHAPES[name] for name in asked.shapes}.items() if HAS_DEVICE else SMALL.items():
        layers = [Layer(shape) for _ in range(LAYERS if HAS_DEVICE else 2)]
        ways = {way: partial(run, layers, within=way == "within") for way in ("apart", "within")}
        errors = check(layers, ways, shape.hidden)
        x = torch.randn((1, shape.hidden), dtype=DTYPE, device=DEVICE)
        for way in [*ways, *ways, *ways] if HAS_DEVICE else ():  # by turns
            taken = time_us([partial(ways[way], x)], replays=30) / len(layers)
            floor = shape.bytes / READ_TB_S / 1e6
            rows.append({"shape": name, "way": way, "us_a_layer": round(taken, 2), "floor_us": round(floor, 2)})
            print(f"{name:14} {way:8} {taken:8.2f} us a layer, floor {floor:.2f}", file=sys.stderr, flush=True)
        rows.append({"shape": name, "errors": errors})
    result = {
        "command": "python " + " ".join(sys.argv),
        "commit": asked.commit,
        "device": torch.cuda.get_device_name() if HAS_DEVICE else "cpu",
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__},
        "rows": rows,
    }
    if asked.output:
        asked.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
