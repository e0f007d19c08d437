"""Tokens from logits, without a sort and without the host: can be captured in a CUDA graph.

N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch

from enginery.api import LEAST_TEMPERATURE, SamplingTensors
from enginery_ops_triton.kernels import sampling
from enginery_ops_triton.kernels.launch import next_power_of_2

ARGMAX_BLOCK: Final = 4096
DRAW_BLOCK: Final = 4096
CUT_BLOCK: Final = 8192
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
    values, indices = _of_each_block(logits, ARGMAX_BLOCK)
    num_rows, num_blocks = values.shape
    sampling.best_of_block[(num_rows, num_blocks)](
        logits,
        values,
        indices,
        logits.stride(0),
        num_blocks,
        VOCAB=logits.shape[1],
        BLOCK=ARGMAX_BLOCK,
        CHAINED=dependent_launch,
        num_warps=8,
        launch_pdl=dependent_launch,
    )
    return values, indices


def _of_each_block(logits: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for a value, float32, and an index, int32, of each block of a row: [N, blocks] both. One block of no columns."""
    num_rows, vocab_size = logits.shape
    values, indices = torch.empty((2, num_rows, max(-(-vocab_size // block), 1)), dtype=torch.int32, device=logits.device)
    return values.view(torch.float32), indices


def draw_rows(logits: torch.Tensor, draws: SamplingTensors, *, dependent_launch: bool) -> torch.Tensor:
    """A token for each row of logits [N, V]: [N] int64. Of equal logits at a cut the first are kept."""
    values, indices = _of_each_block(logits, DRAW_BLOCK)
    num_rows, num_blocks = values.shape
    asked = draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform
    sampling.best_noisy_of_block[(num_rows, num_blocks)](
        logits,
        *asked,
        values,
        indices,
        logits.stride(0),
        num_blocks,
        LEAST_TEMPERATURE,
        VOCAB=logits.shape[1],
        BLOCK=DRAW_BLOCK,
        CHAINED=dependent_launch,
        num_warps=8,
        launch_pdl=dependent_launch,
    )
    tokens = _best_of_blocks(values, indices, dependent_launch=dependent_launch)
    if draws.cut:
        block = min(CUT_BLOCK, next_power_of_2(logits.shape[1]))
        sampling.draw_cut_rows[(num_rows,)](
            logits,
            *asked,
            tokens,
            logits.stride(0),
            LEAST_TEMPERATURE,
            VOCAB=logits.shape[1],
            SHIFT=_MISSING_BITS[logits.dtype],
            BLOCK=block,
            CHAINED=dependent_launch,
            num_warps=16 if block > 1024 else 4,
            launch_pdl=dependent_launch,
        )
    return tokens
