"""Layers of experts that kernels_moe.py measures, and the blocks that it tries for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from enginery.api import Routing
from enginery_ops_triton.expert_blocks import ExpertSizes, PairBlocks, ProductBlock, RowBlock, TileBlocks, blocks_for

DTYPE, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
Blocks = PairBlocks | TileBlocks


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's layer of experts."""

    num_experts: int
    columns: int
    inner: int
    routing: Routing
    shared: int = 0  # parts of the shared expert, as large as the others

    def sizes(self, weight_dtype: torch.dtype) -> ExpertSizes:
        return ExpertSizes(
            num_experts=self.num_experts,
            columns=self.columns,
            inner=self.inner,
            dtype=DTYPE,
            weight_dtype=weight_dtype,
            has_descriptors=True,
        )

    def blocks(self, num_tokens: int, weight_dtype: torch.dtype) -> Blocks:
        return blocks_for(num_tokens * self.routing.top_k, self.routing.top_k, self.sizes(weight_dtype))


SHAPES = {
    "deepseek-v2-lite": Shape(num_experts=64, columns=2048, inner=1408, routing=Routing(top_k=6), shared=2),
    "qwen3-30b-a3b": Shape(num_experts=128, columns=2048, inner=768, routing=Routing(top_k=8, renormalise=True)),
    "mixtral-8x7b": Shape(num_experts=8, columns=4096, inner=14336, routing=Routing(top_k=2, renormalise=True)),
    "deepseek-v3": Shape(
        num_experts=256,
        columns=7168,
        inner=2048,
        routing=Routing(top_k=8, scoring="sigmoid", num_groups=8, top_groups=4, group_score="top2", renormalise=True, scale=2.5),
        shared=1,
    ),
}
WEIGHTS = {"bfloat16": DTYPE, "float8": FLOAT8}

Tried = Callable[[Shape, int, torch.dtype], Iterator[tuple[str, Blocks]]]


def candidates(shape: Shape, num_tokens: int, weight_dtype: torch.dtype) -> Iterator[tuple[str, Blocks]]:
    """Those of one product at a time, with the others as they are chosen."""
    chosen = shape.blocks(num_tokens, weight_dtype)
    yield "chosen", chosen
    if isinstance(chosen, PairBlocks):
        sizes = itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 3, 4), (512, 256) if weight_dtype is FLOAT8 else (256,))
        for rows, num_warps, times, k in sizes:
            n, lanes = rows * num_warps, k // 32  # columns of a thread
            ahead = -(-shape.columns // k // times)
            if shape.inner % n == 0 and rows * lanes <= 32 and rows * ahead * lanes <= 160:
                yield "gate_up", replace(chosen, gate_up=RowBlock(n=n, k=k, num_warps=num_warps, ahead=ahead))
            ahead = -(-shape.routing.top_k * -(-shape.inner // k) // times)
            if rows * lanes <= 64 and rows * ahead * lanes <= 320:
                yield "down", replace(chosen, down=RowBlock(n=n, k=k, num_warps=num_warps, ahead=ahead))
        return
    if weight_dtype is FLOAT8:
        yield from _of_parts(chosen)
        return
    many = num_tokens * shape.routing.top_k > 64 * shape.num_experts
    ms = (64, 128, 256) if many else tuple(sorted({16, 32, 64, chosen.m} & {chosen.m // 2, chosen.m, 2 * chosen.m}))
    loads = (False, True) if many else (chosen.described,)
    for m, n, k, num_warps, stages, described in itertools.product(ms, (64, 128, 256), (64, 128), (4, 8), (3, 4, 6), loads):
        if stages == (6 if k == 128 else 3 if not many else 6):
            continue
        for which, weights in (("gate_up", 2), ("down", 1)):
            registers = weights * n * m // (num_warps * 32)
            shared = stages * k * (weights * n + m) * DTYPE.itemsize
            fits = (32 if many else 4) <= registers <= 128 and shared <= 227 << 10 and n >= 16 * num_warps
            if fits and not (many and k == 128):
                block = ProductBlock(n=n, k=k, num_warps=num_warps, stages=stages)
                yield which, replace(chosen, m=m, described=described, **{which: block})


def _of_parts(chosen: TileBlocks) -> Iterator[tuple[str, Blocks]]:
    """Of float8 weights: blocks have the columns of a scale."""
    for m in sorted({16, 32, 64} & {chosen.m // 2, chosen.m, 2 * chosen.m}):
        for n, num_warps, stages in itertools.product((64, 128), (4, 8), (2, 3, 4)):
            block = ProductBlock(n=n, k=128, num_warps=num_warps, stages=stages)
            for which, weights in (("gate_up", 2), ("down", 1)):
                fits = weights * n * m <= 64 * num_warps * 32 and stages * 128 * (weights * n + 2 * m) <= 227 << 10
                if fits and n >= 16 * num_warps:
                    yield which, replace(chosen, m=m, few=16 if m > 16 else 0, **{which: block})


def other_tiles(shape: Shape, num_tokens: int, weight_dtype: torch.dtype) -> Iterator[tuple[str, Blocks]]:
    """Those of fewer and of more pairs of an expert, each with smaller ones for the last pairs."""
    chosen = shape.blocks(num_tokens, weight_dtype)
    yield "chosen", chosen
    for average in (8, 20, 48, 128):
        blocks = shape.blocks(average * shape.num_experts // shape.routing.top_k, weight_dtype)
        assert isinstance(blocks, TileBlocks)
        others = (replace(blocks, few=few) for few in (0, 16, 32, 64) if few < blocks.m)
        yield from ((f"{each.m} pairs, {each.few} of last tiles", each) for each in others if each != chosen)


def only_chosen(shape: Shape, num_tokens: int, weight_dtype: torch.dtype) -> Iterator[tuple[str, Blocks]]:
    yield "chosen", shape.blocks(num_tokens, weight_dtype)
