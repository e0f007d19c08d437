"""Whether a product of one row should norm the row itself: `python docs/benchmarks/kernels_norm_product.py --output FILE`.

A decoding step's norms are kernels of one program, a hop of some 1.2 us each. Here every program of the product behind one adds
and norms the row for itself, and one program more leaves the sum and the norm for whoever reads them later. Layers follow each
other in a graph, each with weights of its own: norm and first product, product back, norm and second product, product back; there
are neither attention nor experts between. Numbers are checked against float64 first. Ways:

- `apart`: as the engine has it, `add_rms_norm` and what `bind_small_linear` takes for one row;
- `matvec`: the same with the kernel that is changed here, where the engine would take another;
- `within, waiting`: the sum is written in place of the residual stream, by a program that waits until all others have read it;
- `within`: it is written elsewhere, so nobody waits. No contract has this yet: `add_rms_norm` adds in place;
- `within, direct`: so too, and by the Gluon kernel (`norm_product_direct.py`) where the engine takes that.
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
from norm_product_matvec import norm_matvec

from enginery.api import LinearFn
from enginery_ops_triton.kernels.launch import next_power_of_2
from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.small_linear import DirectShape, Matvec, bind_small_linear, direct_shape, matvec_shape

HAS_DEVICE = torch.cuda.is_available()
DEVICE = "cuda" if HAS_DEVICE else "cpu"
DTYPE = torch.bfloat16 if HAS_DEVICE else torch.float32  # the interpreter cuts bfloat16 off
READ_TB_S = 4.26  # of an H200, measured
EPS, LAYERS = 1e-6, 12
WITHIN = ("within, waiting", "within", "within, direct")


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
SMALL = {  # for the interpreter: a program's columns at once, in several blocks that are ahead, and in more
    "small": Shape(hidden=320, first=96, back=64, second=40, back_again=32),
    "ahead": Shape(hidden=2304, first=16, back=16, second=12, back_again=12),
    "more": Shape(hidden=4608, first=16, back=16, second=6, back_again=6),
}


@dataclass(frozen=True)
class DirectNormProduct:
    """As `NormProduct`, in Gluon."""

    norm: torch.Tensor
    weight: torch.Tensor
    shape: DirectShape

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, residual: [1, C]. The product [1, N], the sum and its norm [1, C]."""
        from norm_product_direct import norm_direct  # the interpreter has no Gluon

        (outputs, columns), shape = self.weight.shape, self.shape
        out, summed, normed = torch.empty((1, outputs), dtype=x.dtype, device=x.device), torch.empty_like(x), torch.empty_like(x)
        norm_direct[(triton.cdiv(outputs, shape.block_n) + 1,)](
            x,
            residual,
            self.norm,
            self.weight,
            out,
            summed,
            normed,
            self.weight.stride(0),
            outputs,
            EPS,
            COLUMNS=columns,
            BLOCK=next_power_of_2(columns),
            BLOCK_N=shape.block_n,
            BLOCK_K=shape.block_k,
            AHEAD=shape.ahead,
            X_AHEAD=shape.x_ahead,
            CHAINED=HAS_DEVICE,
            num_warps=shape.num_warps,
            maxnreg=shape.registers,
            launch_pdl=HAS_DEVICE,
        )
        return out, summed, normed


@dataclass(frozen=True)
class NormProduct:
    """The product behind a norm, which makes the norm."""

    norm: torch.Tensor
    weight: torch.Tensor
    arrived: torch.Tensor
    waiting: bool

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, residual: [1, C]. The product [1, N], the sum and its norm [1, C]."""
        outputs, columns = self.weight.shape
        shape = matvec_shape(columns)
        out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
        summed, normed = residual if self.waiting else torch.empty_like(residual), torch.empty_like(residual)
        norm_matvec[(triton.cdiv(outputs, shape.block_n) + 1,)](
            x,
            residual,
            self.norm,
            self.weight,
            out,
            summed,
            normed,
            self.arrived,
            self.weight.stride(0),
            outputs,
            EPS,
            COLUMNS=columns,
            BLOCK=next_power_of_2(columns),
            BLOCK_N=shape.block_n,
            BLOCK_K=shape.block_k,
            AHEAD=shape.ahead,
            WAITING=self.waiting,
            CHAINED=HAS_DEVICE,
            num_warps=shape.num_warps,
            launch_pdl=HAS_DEVICE,
        )
        return out, summed, normed


class Layer:
    """Random weights of one."""

    def __init__(self, shape: Shape) -> None:
        def drawn(outputs: int, columns: int) -> torch.Tensor:
            return torch.randn((outputs, columns), dtype=DTYPE, device=DEVICE).mul_(columns**-0.5)

        hidden = shape.hidden
        self.norms = [torch.rand(hidden, dtype=DTYPE, device=DEVICE) + 0.5 for _ in range(2)]
        self.behind_norms = [drawn(shape.first, hidden), drawn(shape.second, hidden)]
        self.back = [drawn(hidden, shape.back), drawn(hidden, shape.back_again)]
        self.arrived = torch.zeros(2, dtype=torch.int32, device=DEVICE)


Run = Callable[[torch.Tensor], torch.Tensor]


def bound(weight: torch.Tensor) -> LinearFn:
    return bind_small_linear(weight, None, dependent_launch=HAS_DEVICE)


def matvec(weight: torch.Tensor) -> LinearFn:
    return Matvec(weight, None, matvec_shape(weight.shape[1]), dependent_launch=HAS_DEVICE)


def apart(layers: list[Layer], bind: Callable[[torch.Tensor], LinearFn]) -> Run:
    ops = TritonOps(dependent_launch=HAS_DEVICE)
    parts = [
        (norm, bind(weight), bound(back))
        for layer in layers
        for norm, weight, back in zip(layer.norms, layer.behind_norms, layer.back, strict=True)
    ]

    def run(x: torch.Tensor) -> torch.Tensor:
        residual = x.clone()
        for norm, product, back in parts:
            made = product(ops.add_rms_norm(x, residual, norm, EPS))
            x = back(made[:, : back.weight.shape[1]])
        return residual + x

    return run


def norm_product(norm: torch.Tensor, weight: torch.Tensor, counter: torch.Tensor, way: str) -> NormProduct | DirectNormProduct:
    shape = direct_shape(*weight.shape, 1, multiprocessors=132) if way == "within, direct" and HAS_DEVICE else None
    return DirectNormProduct(norm, weight, shape) if shape else NormProduct(norm, weight, counter, way == "within, waiting")


def within(layers: list[Layer], way: str) -> Run:
    parts = [
        (norm_product(norm, weight, counter, way), bound(back))
        for layer in layers
        for norm, weight, back, counter in zip(layer.norms, layer.behind_norms, layer.back, layer.arrived.unbind(), strict=True)
    ]

    def run(x: torch.Tensor) -> torch.Tensor:
        residual = x.clone()
        for product, back in parts:
            made, residual, _ = product(x, residual)
            x = back(made[:, : back.weight.shape[1]])
        return residual + x

    return run


def exact(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
    """In float64."""
    x = x.double()
    residual = x.clone()
    for layer in layers:
        for norm, weight, back in zip(layer.norms, layer.behind_norms, layer.back, strict=True):
            residual = residual + x
            normed = residual * (residual.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
            x = (normed @ weight.double().T)[:, : back.shape[1]] @ back.double().T
    return residual + x


def check(layers: list[Layer], ways: dict[str, Run]) -> dict[str, float]:
    """Each way's error beside float64, relative to its largest number; and what the last program of a product leaves."""
    layer, errors = layers[0], {}
    for way in WITHIN:
        x, residual = (torch.randn((1, layer.norms[0].shape[0]), dtype=DTYPE, device=DEVICE) for _ in range(2))
        given = residual.clone()
        product = norm_product(layer.norms[0], layer.behind_norms[0], layer.arrived[0], way)
        for _ in range(2):  # the counter is ready again
            residual.copy_(given)
            _, summed, normed = product(x, residual)
        wanted = TritonOps(dependent_launch=False).add_rms_norm(x, given, layer.norms[0], EPS)
        torch.testing.assert_close(summed, given)
        torch.testing.assert_close(normed, wanted)
        assert (summed is residual) == (way == "within, waiting")
        assert layer.arrived.count_nonzero() == 0
    x = torch.randn((1, layer.norms[0].shape[0]), dtype=DTYPE, device=DEVICE)
    wanted = exact(layers, x)
    for name, run in ways.items():
        errors[name] = ((run(x).double() - wanted).abs().max() / wanted.abs().max()).item()
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
        ways = {
            "apart": apart(layers, bound),
            "matvec": apart(layers, matvec),
            **{way: within(layers, way) for way in WITHIN},
        }
        errors = check(layers, ways)
        x = torch.randn((1, shape.hidden), dtype=DTYPE, device=DEVICE)
        for way in [*ways, *ways] if HAS_DEVICE else ():  # by turns
            taken = time_us([partial(ways[way], x)], replays=30) / len(layers)
            floor = shape.bytes / READ_TB_S / 1e6
            rows.append({"shape": name, "way": way, "us_a_layer": round(taken, 2), "floor_us": round(floor, 2)})
            print(f"{name:14} {way:16} {taken:8.2f} us a layer, floor {floor:.2f}", file=sys.stderr, flush=True)
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
