"""The operations of enginery-ops-triton beside the core's torch reference: `python docs/benchmarks/kernels_triton_ops.py > FILE`.

On the shapes of Qwen3-0.6B and Llama-3.1-8B in bfloat16. Numbers are checked first. A time is that of one call among many in a CUDA
graph; the calls take turns over inputs that together are larger than the L2 cache, as a model's layers do. `--sweep` times the
block sizes that `small_linear.py` chooses from; `--compile I N` only compiles the I-th of N parts of them, to share that work.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

from enginery.contracts.ops import SamplingTensors
from enginery.nn import reference_ops
from enginery_ops_triton import small_linear
from enginery_ops_triton.matvec import Matvec, MatvecShape
from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.sampling import draw_rows, greedy_sample
from enginery_ops_triton.small_linear import FewRows, FewRowsShape

DTYPE, DEVICE = torch.bfloat16, "cuda"
COLD_BYTES = 256 << 20
Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's sizes."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int
    qk_norm: bool
    dim: int = 128

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.dim, self.hidden),
            "out": (self.hidden, self.heads * self.dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }


SHAPES = {
    "qwen3-0.6b": Shape(hidden=1024, inner=3072, heads=16, kv_heads=8, vocab=151936, layers=28, qk_norm=True),
    "llama-3.1-8b": Shape(hidden=4096, inner=14336, heads=32, kv_heads=8, vocab=128256, layers=32, qk_norm=False),
}


def random(*shape: int, scale: float = 1) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE).mul_(scale)


def copies(num_bytes: int, most: int = 64) -> int:
    """How many inputs of that size are more than the cache holds."""
    return max(2, min(most, -(-COLD_BYTES // num_bytes)))


def time_us(calls: Sequence[Call], *, replays: int = 15) -> float:
    """Microseconds of one call: the median over replays of a graph that holds all of them, at least 20."""
    todo = list(itertools.islice(itertools.cycle(calls), max(20, len(calls))))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in {id(call): call for call in todo}.values():
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in todo:
            call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / len(todo))
    return statistics.median(taken)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def limits() -> dict[str, float]:
    """Bytes per second, in units of 1e12, of this device."""
    x = random(1 << 30)
    y = torch.empty_like(x)
    num_bytes = x.numel() * 2
    copy = 2 * num_bytes / time_us([lambda: torch.neg(x, out=y)] * 3, replays=5)
    read = num_bytes / time_us([lambda: x.view(torch.int32).amax()] * 3, replays=5)
    return {"copy_tb_s": copy / 1e6, "read_tb_s": read / 1e6}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on one shape. run: with either table, on input number i."""

    model: str
    op: str
    rows: int
    num_bytes: int
    mine: Sequence[Call]
    theirs: Sequence[Call]
    outputs: tuple[Call, Call] | None = None  # that are the same if all is well


def cases(name: str, shape: Shape, rows: int, ops: TritonOps) -> Iterator[Case]:
    made = partial(Case, model=name, rows=rows)
    eps, hidden, inner = 1e-6, shape.hidden, shape.inner
    count = copies(4 * rows * hidden * 2)
    xs, residuals = ([random(rows, hidden) for _ in range(count)] for _ in range(2))
    scale = random(hidden)
    yield made(
        op="rms_norm",
        num_bytes=2 * rows * hidden * 2,
        mine=[partial(ops.rms_norm, x, scale, eps) for x in xs],
        theirs=[partial(reference_ops.rms_norm, x, scale, eps) for x in xs],
    )
    first, second = residuals[0].clone(), residuals[0].clone()
    yield made(
        op="add_rms_norm",
        num_bytes=4 * rows * hidden * 2,
        mine=[partial(ops.add_rms_norm, x, r, scale, eps) for x, r in zip(xs, residuals, strict=True)],
        theirs=[partial(reference_ops.add_rms_norm, x, r, scale, eps) for x, r in zip(xs, residuals, strict=True)],
        outputs=(
            partial(ops.add_rms_norm, xs[0], first, scale, eps),
            partial(reference_ops.add_rms_norm, xs[0], second, scale, eps),
        ),
    )
    count = copies(rows * inner * 6)
    gates = [random(rows, 2 * inner) for _ in range(count)]
    yield made(
        op="gated_silu",
        num_bytes=3 * rows * inner * 2,
        mine=[partial(ops.gated_silu, x) for x in gates],
        theirs=[partial(reference_ops.gated_silu, x) for x in gates],
    )
    yield from rotary_cases(made, shape, rows, ops)
    if rows <= 64:
        for which, (outputs, columns) in shape.linears.items():
            count = copies(outputs * columns * 2)
            weights = [random(outputs, columns, scale=columns**-0.5) for _ in range(count)]
            x = random(rows, columns)
            yield made(
                op=f"linear {which}",
                num_bytes=(outputs * columns + rows * (outputs + columns)) * 2,
                mine=[partial(ops.bind_linear(weight, None), x) for weight in weights],
                theirs=[partial(reference_ops.bind_linear(weight, None), x) for weight in weights],
            )
    if rows <= 256:
        yield from sampling_cases(made, shape, rows, ops)


def rotary_cases(made: Callable[..., Case], shape: Shape, rows: int, ops: TritonOps) -> Iterator[Case]:
    rotated, dim, kv = shape.heads + shape.kv_heads, shape.dim, shape.kv_heads
    width = (rotated + kv) * dim
    count = copies(rows * width * 4)
    merged = [random(rows, rotated + kv, dim) for _ in range(count)]
    weight = random(rotated, dim) if shape.qk_norm else None
    angles = torch.rand(rows, dim // 2, device=DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DTYPE)
    keys, values = (random(2 * rows + 16, kv, dim) for _ in range(2))
    slots = torch.randperm(2 * rows, device=DEVICE)[:rows]

    def rotate(table: Any, qkv: torch.Tensor) -> torch.Tensor:
        table.qk_norm_rotary(qkv[:, :rotated], weight, 1e-6, cos_sin)
        return qkv

    def rotate_then_write(qkv: torch.Tensor) -> torch.Tensor:
        reference_ops.qk_norm_rotary(qkv[:, :rotated], weight, 1e-6, cos_sin)
        keys.index_copy_(0, slots, qkv[:, rotated - kv : rotated])
        values.index_copy_(0, slots, qkv[:, rotated:])
        return qkv

    def written(run: Callable[[torch.Tensor], Any], qkv: torch.Tensor) -> torch.Tensor:
        run(qkv)
        return torch.cat((qkv, keys[slots], values[slots]), dim=1)

    write = partial(ops.qk_norm_rotary_write, weight=weight, eps=1e-6, cos_sin=cos_sin, keys=keys, values=values, slots=slots)
    yield made(
        op="qk_norm_rotary",
        num_bytes=2 * rows * rotated * dim * 2,
        mine=[partial(rotate, ops, qkv) for qkv in merged],
        theirs=[partial(rotate, reference_ops, qkv) for qkv in merged],
        outputs=(partial(rotate, ops, merged[0].clone()), partial(rotate, reference_ops, merged[0].clone())),
    )
    yield made(
        op="qk_norm_rotary and KV write",
        num_bytes=rows * (2 * rotated * dim + 3 * kv * dim) * 2,
        mine=[partial(write, qkv) for qkv in merged],
        theirs=[partial(rotate_then_write, qkv) for qkv in merged],
        outputs=(partial(written, write, merged[0].clone()), partial(written, rotate_then_write, merged[0].clone())),
    )


def sampling_cases(made: Callable[..., Case], shape: Shape, rows: int, ops: TritonOps) -> Iterator[Case]:
    count = copies(rows * shape.vocab * 2, most=8)
    logits = [random(rows, shape.vocab, scale=3) for _ in range(count)]
    chained = ops.dependent_launch
    yield made(
        op="greedy",
        num_bytes=rows * shape.vocab * 2,
        mine=[partial(greedy_sample, x, dependent_launch=chained) for x in logits],
        theirs=[partial(torch.argmax, x, -1) for x in logits],
    )
    full = partial(torch.full, (rows,), device=DEVICE)
    uniform, nothing = torch.rand(rows, device=DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    for label, top_k, top_p in (("whole", 0, 1.0), ("top_k 50", 50, 1.0), ("top_k 50, top_p 0.9", 50, 0.9), ("top_p 0.9", 0, 0.9)):
        table = torch.stack([full(0.6), full(float(top_k)), full(top_p), full(0.0), uniform])
        draws = SamplingTensors(table=table, most_kept=top_k or shape.vocab, cut=bool(top_k) or top_p < 1)
        draw = partial(draw_rows, draws=draws, dependent_launch=chained)
        theirs = partial(sample_by_sorting, uniform=uniform, top_k=top_k, top_p=top_p)
        yield made(
            op=f"sample, {label}",
            num_bytes=rows * shape.vocab * 2,
            mine=[partial(draw, x) for x in logits],
            theirs=[partial(theirs, x) for x in logits],
            outputs=(partial(misplaced, draw, logits[0], top_k=top_k, top_p=top_p), lambda: nothing),
        )


def sample_by_sorting(logits: torch.Tensor, *, uniform: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """As the core does it, without its host side."""
    scaled, tokens = logits.float() / 0.6, None
    if top_k or top_p < 1:
        scaled, tokens = scaled.topk(top_k or logits.shape[1], dim=-1)
    weights = scaled.softmax(-1)
    if top_p < 1:
        weights = weights.masked_fill(weights.cumsum(-1) - weights >= top_p, 0)
    cumulative = weights.cumsum(-1)
    index = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    return index if tokens is None else tokens.gather(1, index.clamp(max=tokens.shape[1] - 1))


def misplaced(draw: Callable[..., torch.Tensor], logits: torch.Tensor, *, top_k: int, top_p: float) -> torch.Tensor:
    """1 for each row whose token is less likely than the last that the cuts keep, by a sort in float64: [N] int64."""
    token = draw(logits)
    values = (logits.double() / 0.6).sort(descending=True).values[:, : top_k or None]
    weights = values.softmax(-1)
    num_kept = (weights.cumsum(-1) - weights < top_p).sum(-1, keepdim=True)
    least = values.gather(1, num_kept - 1)
    return (logits.double().gather(1, token[:, None]) / 0.6 < least).squeeze(1).long()


def steps(name: str, shape: Shape, rows: int) -> dict[str, Any]:
    """All of a decoding step but attention, in one graph: what a token costs at least."""
    layers = [
        {which: random(*size, scale=size[1] ** -0.5) for which, size in shape.linears.items() if which != "head"}
        for _ in range(shape.layers)
    ]
    head = random(*shape.linears["head"], scale=0.02)
    scale, table = random(shape.hidden), random(16, shape.dim)
    kv, dim = shape.kv_heads, shape.dim
    rotated = shape.heads + kv
    weight = random(rotated, dim) if shape.qk_norm else None
    keys, values = (random(256, kv, dim) for _ in range(2))
    slots = torch.arange(rows, device=DEVICE)
    embedded, cos_sin = random(rows, shape.hidden), table[:1].expand(rows, -1)
    num_bytes = 2 * (sum(each.numel() for layer in layers for each in layer.values()) + head.numel())

    def step(ops: Any, bound: list[dict[str, Any]], logits: Any, *, fused: bool) -> torch.Tensor:
        residual, delta = torch.zeros_like(embedded), embedded
        for layer in bound:
            x = ops.add_rms_norm(delta, residual, scale, 1e-6)
            qkv = layer["qkv"](x).view(rows, -1, dim)
            if fused:
                ops.qk_norm_rotary_write(qkv, weight, 1e-6, cos_sin, keys=keys, values=values, slots=slots)
            else:
                ops.qk_norm_rotary(qkv[:, :rotated], weight, 1e-6, cos_sin)
                keys.index_copy_(0, slots, qkv[:, rotated - kv : rotated])
                values.index_copy_(0, slots, qkv[:, rotated:])
            x = layer["out"](qkv[:, : shape.heads].reshape(rows, -1))
            x = ops.add_rms_norm(x, residual, scale, 1e-6)
            delta = layer["down"](ops.gated_silu(layer["gate_up"](x)))
        found = logits(ops.add_rms_norm(delta, residual, scale, 1e-6))
        return greedy_sample(found, dependent_launch=ops.dependent_launch) if fused else found.argmax(-1)

    taken = {}
    tables: dict[str, tuple[Any, bool]] = {"torch": (reference_ops, False), "triton": (TritonOps(dependent_launch=False), True)}
    for label, (ops, fused) in {**tables, "triton, dependent launch": (TritonOps(dependent_launch=True), True)}.items():
        bound = [{which: ops.bind_linear(each, None) for which, each in layer.items()} for layer in layers]
        taken[label] = time_us([partial(step, ops, bound, ops.bind_linear(head, None), fused=fused)] * 20, replays=3)
    return {"model": name, "rows": rows, "weight_bytes": num_bytes, "us": taken}


def candidates(columns: int, rows: int) -> Iterator[tuple[Any, Any]]:
    """Shapes of blocks that may be the best for a weight."""
    for elements, block_k, per_thread in itertools.product((4096, 8192, 16384), (1024, 2048, 4096, 16384), (32, 64)):
        fits = block_k <= min(elements, triton.next_power_of_2(columns)) and (rows == 1 or block_k >= columns)
        if fits and elements // block_k <= 16:
            shape = MatvecShape(block_n=elements // block_k, block_k=block_k, num_warps=elements // per_thread // 32)
            yield Matvec, shape
    if rows > 1:
        for block_n, block_k in itertools.product((16, 32), (256, 512)):
            for split in sorted({1, 2, 4, min(columns // block_k, 8)}):
                yield FewRows, FewRowsShape(block_n=block_n, block_k=block_k, split=split, stages=3)


def sweep(part: tuple[int, int] | None) -> list[dict[str, Any]]:
    """The best shapes of blocks for each weight and number of rows, and torch. With a part: compiles them."""
    found = []
    sizes = {size for shape in SHAPES.values() for size in shape.linears.values()}
    if part is not None:
        todo = {(columns, rows, kind, each) for _, columns in sizes for rows in (1, 4) for kind, each in candidates(columns, rows)}
        for columns, rows, kind, each in sorted(todo, key=str)[part[0] :: part[1]]:
            kind(random(256, columns), None, each, dependent_launch=True)(random(rows, columns))
        return []
    for outputs, columns in sorted(sizes):
        weights = [random(outputs, columns, scale=columns**-0.5) for _ in range(copies(outputs * columns * 2, most=40))]
        for rows in (1, 4, 16):
            x = random(rows, columns)
            times = []
            for kind, each in candidates(columns, rows):
                if kind is FewRows or rows <= 4:
                    calls = [partial(kind(weight, None, each, dependent_launch=True), x) for weight in weights]
                    times.append((round(time_us(calls, replays=5), 2), str(each)))
            theirs = time_us([partial(torch.nn.functional.linear, x, weight) for weight in weights], replays=5)
            found.append({"outputs": outputs, "columns": columns, "rows": rows, "torch_us": round(theirs, 2), "us": sorted(times)})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def check(case: Case) -> float:
    mine, theirs = case.outputs or (case.mine[0], case.theirs[0])
    actual, expected = mine(), theirs()
    if actual.dtype is torch.int64:
        return float((actual != expected).sum())
    return relative_error(actual, expected)


def compare(only: str, num_rows: Sequence[int]) -> dict[str, Any]:
    measured, ops = [], TritonOps(dependent_launch=True)
    for (name, shape), rows in itertools.product(SHAPES.items(), num_rows):
        for case in cases(name, shape, rows, ops):
            if only not in case.op:
                continue
            error = check(case)
            if not error < 1e-2:
                print(f"{name}, {case.op}, {rows} rows: relative error {error:.1e}", file=sys.stderr)
            mine, theirs = time_us(case.mine), time_us(case.theirs)
            rate = {"triton_tb_s": case.num_bytes / mine / 1e6, "torch_tb_s": case.num_bytes / theirs / 1e6}
            measured.append({"model": name, "op": case.op, "rows": rows, "bytes": case.num_bytes, "error": error})
            measured[-1] |= {"triton_us": mine, "torch_us": theirs, **rate}
            print(json.dumps(measured[-1]), file=sys.stderr, flush=True)
    if only:
        return {"ops": measured}
    return {"ops": measured, "steps": [steps(name, shape, rows) for name, shape in SHAPES.items() for rows in (1, 8)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="what has this in its name, and no whole steps")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 64, 2048), metavar="N")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("I", "N"))
    asked = parser.parse_args()
    torch.manual_seed(0)
    gc.freeze()  # a capture collects garbage first
    if asked.compile:
        sweep(tuple(asked.compile))
        return
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    about |= {"command": " ".join(sys.argv), "commit": asked.commit, "few_rows": small_linear.FEW_ROWS}
    result = {"sweep": sweep(None)} if asked.sweep else compare(asked.only, asked.rows)
    print(json.dumps({**about, "limits": limits(), **result}, indent=1))


if __name__ == "__main__":
    main()
