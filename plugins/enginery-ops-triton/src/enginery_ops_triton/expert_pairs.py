"""Pairs of a token and one of its experts: sorted by expert before products, added up by token behind them.

T tokens, K experts of each, C columns.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from enginery_ops_triton.kernels import experts as kernels
from enginery_ops_triton.kernels import sorting
from enginery_ops_triton.kernels.launch import next_power_of_2

SORT_FEW, SORT_BLOCK = 256, 1024  # pairs that a program looks at together
SORT_MANY = 4096  # pairs; more are counted by chunks
CHUNK, SHARE, ROWS = 128, 4, 256  # pairs of a program that counts or moves them; experts of one that adds up, and chunks at a time
SUM_BLOCK, LEAST_SUM_BLOCK = 1024, 128  # columns of a program
SUM_PROGRAMS: Final = 256  # wanted, where there are few tokens


class SortedPairs(NamedTuple):
    """order: pairs by expert [T K] int32. tiles: [as many as there can be, 3] int32, see `kernels.sorting.sort_pairs`."""

    order: torch.Tensor
    tiles: torch.Tensor


def sort_by_expert(ids: torch.Tensor, num_experts: int, *, block_m: int, dependent_launch: bool) -> SortedPairs:
    """ids: [T, K] int32, contiguous. block_m: pairs of a tile."""
    num_pairs = ids.numel()
    most_tiles = num_experts + num_pairs // block_m
    sparse = num_pairs <= most_tiles  # a tile for each pair is then no more
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((min(num_pairs, most_tiles), 3), dtype=torch.int32, device=ids.device)
    if num_pairs > SORT_MANY and not sparse:
        _sort_by_counting(ids, order, tiles, num_experts, block_m=block_m, dependent_launch=dependent_launch)
        return SortedPairs(order, tiles)
    sorting.sort_pairs[(num_experts,)](
        ids,
        order,
        tiles,
        num_pairs,
        block_m,
        int(sparse),
        BLOCK=SORT_FEW if num_pairs <= SORT_FEW else SORT_BLOCK,
        CHAINED=dependent_launch,
        num_warps=4 if num_pairs > SORT_FEW else 1,
        launch_pdl=dependent_launch,
    )
    return SortedPairs(order, tiles)


def _sort_by_counting(
    ids: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, num_experts: int, *, block_m: int, dependent_launch: bool
) -> None:
    """The same of many pairs, where a program for each expert that reads all of them would take long."""
    num_pairs, experts = ids.numel(), next_power_of_2(max(num_experts, SHARE))
    num_chunks = -(-num_pairs // CHUNK)
    counts = torch.empty((num_chunks, experts), dtype=torch.int32, device=ids.device)
    totals = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    chunked = {"EXPERTS": experts, "CHUNK": CHUNK, "CHAINED": dependent_launch, "num_warps": 8, "launch_pdl": dependent_launch}
    sorting.count_chunks[(num_chunks,)](ids, counts, totals, num_pairs, **chunked)
    sorting.place_chunks[(-(-num_experts // SHARE),)](
        counts,
        totals,
        tiles,
        num_chunks,
        num_experts,
        block_m,
        EXPERTS=experts,
        SHARE=SHARE,
        ROWS=ROWS,
        CHAINED=dependent_launch,
        num_warps=4,
        launch_pdl=dependent_launch,
    )
    sorting.scatter_pairs[(num_chunks,)](ids, counts, order, num_pairs, **chunked)


def add_up(parts: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, *, dependent_launch: bool) -> None:
    """out [T, C] = the sum over K of weights [T, K] * parts [T K, C], in float32 inside; of parts [T K, P, C] over P as well."""
    (num_tokens, columns), top_k = out.shape, weights.shape[1]
    block = min(SUM_BLOCK, next_power_of_2(columns))
    while block > LEAST_SUM_BLOCK and num_tokens * -(-columns // block) < SUM_PROGRAMS:
        block //= 2
    kernels.weighted_sum[(num_tokens, -(-columns // block))](
        parts,
        weights.contiguous(),
        out,
        COLUMNS=columns,
        TOP_K=top_k,
        PARTS=1 if parts.dim() == 2 else parts.shape[1],
        BLOCK=block,
        CHAINED=dependent_launch,
        num_warps=4,
        launch_pdl=dependent_launch,
    )
