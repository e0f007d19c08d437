"""Tokens from logits, without a sort and without the host: can be captured in a CUDA graph.

N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch

from enginery.api import LEAST_TEMPERATURE, SamplingTensors
from enginery_ops_triton.kernels import sampling
from enginery_ops_triton.kernels.launch import next_power_of_2
from enginery_ops_triton.kernels.pivots import GROUP

BLOCK: Final = 4096  # tokens of a program that looks at all of them
GROUPS_AT_ONCE: Final = 32  # that are looked at again together
_MISSING_BITS: Final = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # in which its float32 differs from no other


def greedy_sample(logits: torch.Tensor, *, dependent_launch: bool) -> torch.Tensor:
    """The index of each row's largest logit, the lowest of equal ones: [N, V] -> [N] int64."""
    values, indices = best_of_each_block(logits, dependent_launch=dependent_launch)
    return _best_of_blocks(values, indices, dependent_launch=dependent_launch)


def _best_of_blocks(values: torch.Tensor, indices: torch.Tensor, *, dependent_launch: bool) -> torch.Tensor:
    """The index of the largest of each row of [N, blocks], the lowest of equal ones: [N] int64."""
    num_rows, num_blocks = values.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    sampling.best_of_blocks[(num_rows,)](
        values,
        indices,
        tokens,
        num_blocks,
        BLOCK=next_power_of_2(num_blocks),
        CHAINED=dependent_launch,
        num_warps=1,
        launch_pdl=dependent_launch,
    )
    return tokens


def best_of_each_block(logits: torch.Tensor, *, dependent_launch: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each block of a row of [N, V], as float32, and its index, int32: [N, blocks] both. One block of no columns."""
    values, indices = _of_each_block(logits)
    num_rows, num_blocks = values.shape
    sampling.best_of_block[(num_rows, num_blocks)](
        logits,
        values,
        indices,
        logits.stride(0),
        num_blocks,
        VOCAB=logits.shape[1],
        BLOCK=BLOCK,
        CHAINED=dependent_launch,
        num_warps=8,
        launch_pdl=dependent_launch,
    )
    return values, indices


def _of_each_block(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for a value, float32, and an index, int32, of each block of a row: [N, blocks] both. One block of no columns."""
    num_rows, vocab_size = logits.shape
    values, indices = torch.empty((2, num_rows, max(-(-vocab_size // BLOCK), 1)), dtype=torch.int32, device=logits.device)
    return values.view(torch.float32), indices


def draw_rows(logits: torch.Tensor, draws: SamplingTensors, *, dependent_launch: bool) -> torch.Tensor:
    """A token for each row of logits [N, V]: [N] int64. Of equal logits at a cut the first are kept."""
    values, indices = _of_each_block(logits)
    num_rows, num_blocks = values.shape
    num_groups = num_blocks * (BLOCK // GROUP.value) if draws.cut else 0
    masses = torch.empty_like(values) if draws.cut else values
    largest, listed = torch.empty((2, num_rows, num_groups), dtype=torch.int32, device=logits.device)
    asked = draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform
    sampling.look_at_block[(num_rows, num_blocks)](
        logits,
        *asked,
        values,
        indices,
        masses,
        largest.view(torch.float32),
        logits.stride(0),
        num_blocks,
        LEAST_TEMPERATURE,
        VOCAB=logits.shape[1],
        BLOCK=BLOCK,
        CHAINED=dependent_launch,
        num_warps=8,
        launch_pdl=dependent_launch,
    )
    tokens = _best_of_blocks(values, indices, dependent_launch=dependent_launch)
    if draws.cut:
        sampling.draw_cut_rows[(num_rows,)](
            logits,
            *asked,
            values,
            masses,
            largest.view(torch.float32),
            listed,
            tokens,
            logits.stride(0),
            num_blocks,
            num_groups,
            LEAST_TEMPERATURE,
            VOCAB=logits.shape[1],
            SHIFT=_MISSING_BITS[logits.dtype],
            BLOCKS=next_power_of_2(num_blocks),
            GROUPS=next_power_of_2(num_groups),
            COUNT=GROUPS_AT_ONCE,
            CHAINED=dependent_launch,
            num_warps=16,
            launch_pdl=dependent_launch,
        )
    return tokens
