"""Folding attention over one part of the keys with attention over another, by their log-sum-exps.

S rows, H heads, V value dim. At the boundary between core and backends a log-sum-exp is in the base that the backend's
capabilities state; everywhere inside it is natural.
"""

from __future__ import annotations

import math
from typing import Literal

import torch


def to_natural_log(lse: torch.Tensor, base: Literal["e", "2"]) -> torch.Tensor:
    """[S, H] float32, converted in place where it is in base 2."""
    return lse.mul_(math.log(2.0)) if base == "2" else lse


def fold(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> torch.Tensor:
    """Softmax attention over two disjoint sets of keys from that over each (the merge of split-KV kernels, arXiv:2311.01282).

    out: [S, H, V] float32, overwritten with that over both; more: [S, H, V], of any dtype; lse, more_lse: [S, H] float32, natural,
    -inf for rows that saw nothing, whose outputs must be 0. Returns the log-sum-exp over both sets, [S, H].
    """
    whole = torch.logaddexp(lse, more_lse)
    share = torch.where(more_lse == float("-inf"), 0.0, (more_lse - whole).exp())
    out.lerp_(more.to(out.dtype), share[..., None])
    return whole
