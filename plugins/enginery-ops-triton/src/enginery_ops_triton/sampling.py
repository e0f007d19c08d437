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
    num_rows, num_blocks = values.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
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
    num_rows, vocab_size = logits.shape
    num_blocks = max(-(-vocab_size // ARGMAX_BLOCK), 1)
    values = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    indices = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    sampling.best_of_block[(num_rows, num_blocks)](
        logits,
        values,
        indices,
        logits.stride(0),
        num_blocks,
        VOCAB=vocab_size,
        BLOCK=ARGMAX_BLOCK,
        CHAINED=dependent_launch,
        num_warps=8,
        launch_pdl=dependent_launch,
    )
    return values, indices


def sample_rows(logits: torch.Tensor, draws: SamplingTensors, *, dependent_launch: bool) -> torch.Tensor:
    """A token for each row of logits [N, V]: [N] int64. Of equal logits at a cut the first are kept."""
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // DRAW_BLOCK)
    tops, masses = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    asked = draws.temperature, draws.top_k, draws.top_p, draws.min_p
    sampling.weigh_block[(num_rows, num_blocks)](
        logits,
        *asked,
        tops,
        masses,
        logits.stride(0),
        num_blocks,
        LEAST_TEMPERATURE,
        VOCAB=vocab_size,
        BLOCK=DRAW_BLOCK,
        CHAINED=dependent_launch,
        num_warps=8,
        launch_pdl=dependent_launch,
    )
    sampling.draw_rows[(num_rows,)](
        logits,
        *asked,
        draws.uniform,
        tops,
        masses,
        tokens,
        logits.stride(0),
        num_blocks,
        LEAST_TEMPERATURE,
        VOCAB=vocab_size,
        BLOCK=DRAW_BLOCK,
        BLOCKS=next_power_of_2(num_blocks),
        CHAINED=dependent_launch,
        num_warps=8,
        launch_pdl=dependent_launch,
    )
    if draws.cut:
        block = min(CUT_BLOCK, next_power_of_2(vocab_size))
        sampling.sample_cut_rows[(num_rows,)](
            logits,
            *asked,
            draws.uniform,
            tokens,
            logits.stride(0),
            LEAST_TEMPERATURE,
            VOCAB=vocab_size,
            SHIFT=_MISSING_BITS[logits.dtype],
            BLOCK=block,
            CHAINED=dependent_launch,
            num_warps=16 if block > 1024 else 4,
            launch_pdl=dependent_launch,
        )
    return tokens
