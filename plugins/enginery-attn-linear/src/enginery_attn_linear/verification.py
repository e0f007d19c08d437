"""Rows that may turn out wrong: computed from a state that does not move, and later moved on by those of them that stand.

B requests of L rows each, H value heads, K key dim, V value dim, C: `RecurrentFacts.mixed_width`, W: taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from enginery_attn_linear.inputs import Rows
from enginery_attn_linear.kernels import step
from enginery_attn_linear.plan import DecodeGroup


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """What a layer keeps of its rows until its state moves on.

    inputs: [B, W - 1 + L, C], what the convolution had seen and the rows; None without one. rows: [B L, ...]; None without a
    matrix.
    """

    inputs: torch.Tensor | None
    rows: Rows | None


def read(states: Mapping[str, torch.Tensor], name: str, group: DecodeGroup) -> torch.Tensor:
    """A copy of the group's states of that name, [B, ...]; zeros of requests that begin."""
    stored = states[name].index_select(0, group.reads)
    return stored.masked_fill_(group.fresh.view(-1, *(1,) * (stored.dim() - 1)), 0.0)


def run_rows(rows: Rows, state: torch.Tensor, *, length: int, scale: float) -> torch.Tensor:
    """Token after token of each request; state: [B, H, V, K], moved on in place. Returns [B L, H, V]."""
    made = [_step(rows, state, place=place, length=length, scale=scale) for place in range(length)]
    return torch.stack(made, 1).flatten(0, 1)


def commit(kept: Kept, counts: torch.Tensor, states: Mapping[str, torch.Tensor], *, group: DecodeGroup, scratch: int) -> None:
    """Write the states after the first row and `counts` more, [B] int64, and those after the rows of checkpoints that stand.

    scratch: a page for checkpoints that do not.
    """
    standing, marked = counts + 1, group.checkpoints
    to = torch.where(standing[marked.requests] >= marked.rows, marked.pages, scratch)  # [N]
    if kept.inputs is not None:
        conv = states["conv"]
        moved = _windows(kept.inputs, standing, conv.shape[1])
        passed = _windows(kept.inputs[marked.requests], marked.rows, conv.shape[1])
        conv.index_copy_(0, group.writes, moved).index_copy_(0, to, passed)
    if kept.rows is not None:
        state = read(states, "matrix", group)  # [B, H, V, K]
        passed = state[marked.requests]
        for place in range(group.length):
            moved = state.clone()
            _step(kept.rows, moved, place=place, length=group.length, scale=1.0)
            state = torch.where((place < standing)[:, None, None, None], moved, state)
            passed = torch.where((place < marked.rows)[:, None, None, None], state[marked.requests], passed)
        states["matrix"].index_copy_(0, group.writes, state).index_copy_(0, to, passed)


def _step(rows: Rows, state: torch.Tensor, *, place: int, length: int, scale: float) -> torch.Tensor:
    """Row `place` of each request: [B, H, V]."""
    q, k, v, log_decay, beta, skipped = rows
    at = slice(place, None, length)
    beta = None if beta is None else beta[at]
    made = step(q[at], k[at], v[at], log_decay[at], beta, state, scale=scale)
    return made if skipped is None else made + skipped[at]


def _windows(inputs: torch.Tensor, counts: torch.Tensor, size: int) -> torch.Tensor:
    """The last inputs once `counts` [N] rows stand: [N, size, C] of [N, size + L, C]."""
    places = counts[:, None] + torch.arange(size, device=counts.device)  # [N, size]
    return inputs.gather(1, places[..., None].expand(-1, -1, inputs.shape[-1]))
