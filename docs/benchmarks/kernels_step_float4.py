"""A decoding step of one stream of gpt-oss-120b without attention: `python docs/benchmarks/kernels_step_float4.py --output FILE`.

Layers that follow each other in a graph, each with weights of its own: norm, qkv, four small norms in attention's place, o, norm,
router, route, experts in MXFP4. Single products in a graph rank blocks otherwise than whole steps do, as kernels overlap. A layer
has 32 experts, so that eight of them are made quickly; a token reads four. Time is that of a layer; its bytes take `floor_us`. What
is varied: blocks of single pairs' experts, columns of a program that adds up, and the router's kernel.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from kernels_moe import DEVICE, READ_TB_S, relative_error, time_us
from kernels_moe_float4 import ROUTING, SHAPES, Layer
from moe_shapes import DTYPE

from enginery_ops_triton import expert_pairs
from enginery_ops_triton.expert_blocks import Float4Blocks, ProductBlock
from enginery_ops_triton.matvec import Matvec, matvec_shape
from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.small_linear import FewRows, FewRowsShape

COLUMNS, QKV, HEADS = 2880, 5120, 4096
SHAPE = SHAPES["gpt-oss-20b"]
BYTES = 2 * COLUMNS * (QKV + HEADS + 128) + 4 * 3 * COLUMNS * COLUMNS * (0.5 + 1 / 32)
LAYERS = 8


@dataclass(frozen=True, kw_only=True)
class Variant:
    """router: None is the matrix-vector kernel."""

    blocks: Float4Blocks
    sum_block: int = 128
    router: FewRowsShape | None = None


class StepLayer:
    """Random weights of one."""

    def __init__(self) -> None:
        def drawn(outputs: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            weight = torch.randn((outputs, columns), dtype=DTYPE, device=DEVICE).mul_(columns**-0.5)
            return weight, torch.randn(outputs, dtype=DTYPE, device=DEVICE)

        self.layer = Layer(SHAPE)
        self.experts = self.layer.bound()
        self.norm = torch.ones(COLUMNS, dtype=DTYPE, device=DEVICE)
        self.qkv, self.out, self.router = drawn(QKV, COLUMNS), drawn(COLUMNS, HEADS), drawn(SHAPE.num_experts, COLUMNS)


def product(weight: torch.Tensor, bias: torch.Tensor) -> Matvec:
    return Matvec(weight, bias, matvec_shape(weight.shape[1]), dependent_launch=True)


def step(layers: list[StepLayer], variant: Variant, x: torch.Tensor, ops: TritonOps) -> Callable[[], torch.Tensor]:
    small, scale = torch.randn((64, 64), dtype=DTYPE, device=DEVICE), torch.ones(64, dtype=DTYPE, device=DEVICE)
    made = []
    for layer in layers:
        router = product(*layer.router)
        few = None if variant.router is None else FewRows(*layer.router, variant.router, dependent_launch=True)
        made.append((layer, product(*layer.qkv), product(*layer.out), few or router))

    def run() -> torch.Tensor:
        residual = x.clone()
        hidden = x
        for layer, qkv, out, router in made:
            heads = qkv(ops.add_rms_norm(hidden, residual, layer.norm, 1e-5))
            for _ in range(4):
                ops.rms_norm(small, scale, 1e-5)
            normed = ops.add_rms_norm(out(heads[:, :HEADS]), residual, layer.norm, 1e-5)
            routed = ops.route(router(normed), None, ROUTING)
            hidden = layer.experts.of_blocks(normed, routed, variant.blocks)
        return hidden

    return run


def variants() -> Iterator[tuple[str, Variant]]:
    def block(n: int, num_warps: int, stages: int, split: int) -> ProductBlock:
        return ProductBlock(n=n, k=128, num_warps=num_warps, stages=stages, split=split)

    usual = SHAPES["gpt-oss-120b"].blocks(1)
    yield "usual", Variant(blocks=usual)
    in_blocks = Float4Blocks(m=8, gate_up=block(64, 2, 3, 3), down=block(128, 4, 3, 6), alone=True)
    yield "through shared memory", Variant(blocks=in_blocks)
    for sum_block in (1024, 512, 256, 64):
        yield f"sums of {sum_block}", Variant(blocks=usual, sum_block=sum_block)
    for n in (16, 32):
        yield "router", Variant(blocks=usual, router=FewRowsShape(block_n=n, block_k=256, split=12, stages=2))
    for sizes in GATE_UPS:
        yield "gate_up", Variant(blocks=replace(usual, gate_up=block(*sizes)))
    for sizes in DOWNS:
        yield "down", Variant(blocks=replace(usual, down=block(*sizes)))


GATE_UPS = (
    *((64, 4, stages, 1) for stages in (3, 4, 6, 8)),
    *((64, 4, stages, split) for stages in (3, 4, 6) for split in (2, 3)),
    *((32, 2, stages, split) for stages in (4, 6) for split in (1, 2, 3)),
)
DOWNS = (
    *((64, 4, stages, split) for stages in (3, 4) for split in (3, 4, 6)),
    *((64, 4, 6, 1), (64, 4, 6, 2), (32, 2, 4, 4)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--compile", type=int, metavar="PART", help="what a worker does")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    ops, every = TritonOps(dependent_launch=True), list(variants())
    x = torch.randn((1, COLUMNS), dtype=DTYPE, device=DEVICE)
    if asked.compile is not None:
        layers = [StepLayer()]
        for _, variant in every[asked.compile :: asked.workers]:
            step(layers, variant, x, ops)()
        torch.cuda.synchronize()
        return
    began = time.monotonic()
    workers = [subprocess.Popen([sys.executable, *sys.argv, "--compile", str(part)]) for part in range(asked.workers)]
    failed = [worker.args for worker in workers if worker.wait() != 0]
    assert not failed, failed
    print(f"compiled in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    layers, found = [StepLayer() for _ in range(asked.layers)], []
    normed = ops.rms_norm(x, layers[0].norm, 1e-5)
    for name, variant in every:
        expert_pairs.LEAST_SUM_BLOCK = variant.sum_block
        bound, routed = layers[0].experts, ops.route(torch.randn((1, SHAPE.num_experts), device=DEVICE), None, ROUTING)
        error = relative_error(bound.of_blocks(normed, routed, variant.blocks), layers[0].layer.exact(normed, routed))
        assert error < 1e-2, (variant, error)
        taken = time_us([step(layers, variant, x, ops)], replays=15) / len(layers)
        found.append({"us": round(taken, 2), "what": name, **{key: str(value) for key, value in vars(variant).items()}})
        print(f"{taken:7.2f} {name:12} {variant}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "commit": asked.commit,
        "device": torch.cuda.get_device_name(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__},
        "bytes": BYTES,
        "floor_us": BYTES / READ_TB_S / 1e6,
        "layers": found,
    }
    if asked.output:
        asked.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
