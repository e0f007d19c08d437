"""What is computed on the host, once per batch: where each request's state is, and which requests begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from enginery.api import ForwardBatch, ForwardPlan, StateView


@dataclass(frozen=True, kw_only=True)
class RequestPart:
    """Rows [start, stop) of one request, up to its checkpoint or to its end, and its state's pages. fresh: from zero."""

    start: int
    stop: int
    read: int
    write: int
    fresh: bool


class Checkpoints(NamedTuple):
    """requests: [N] int64, their places in the group; pages, rows: [N] int64, where their states after so many rows go; device."""

    requests: torch.Tensor
    pages: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeGroup:
    """Rows [0, B L) of the batch, L for each request; above 1 they verify drafts.

    reads, writes: [B] int64, pages; fresh: [B] bool; device.
    """

    size: int
    length: int
    reads: torch.Tensor
    writes: torch.Tensor
    fresh: torch.Tensor
    checkpoints: Checkpoints

    @property
    def num_rows(self) -> int:
        """B L."""
        return self.size * self.length


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearPlan(ForwardPlan):
    """The requests of one token at the front, or those that verify drafts, as one group, everything else request by request."""

    group: DecodeGroup | None
    parts: tuple[RequestPart, ...]


def plan_group(batch: ForwardBatch, size: int, device: torch.device) -> DecodeGroup:
    """The first `size` requests, which have `decode_len` tokens each."""
    states, length = batch.states, batch.decode_len
    columns = torch.stack((states.reads_cpu[:size], states.writes_cpu[:size], batch.kv_lens_cpu[:size] == length))  # [3, B]
    reads, writes, fresh = _there(columns, device)
    return DecodeGroup(
        size=size,
        length=length,
        reads=reads,
        writes=writes,
        fresh=fresh.bool(),
        checkpoints=_checkpoints(states, size, device),
    )


def _checkpoints(states: StateView, size: int, device: torch.device) -> Checkpoints:
    if states.checkpoints_cpu is None or states.checkpoint_rows_cpu is None:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return Checkpoints(nothing, nothing, nothing)
    rows = states.checkpoint_rows_cpu[:size]
    requests = rows.nonzero().squeeze(1)
    return Checkpoints(*_there(torch.stack((requests, states.checkpoints_cpu[requests], rows[requests])), device))


def _there(columns: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As int64, without waiting for the device."""
    columns = columns.long().pin_memory() if device.type == "cuda" else columns.long()
    return columns.to(device, non_blocking=True)


def plan_parts(batch: ForwardBatch, first: int) -> tuple[RequestPart, ...]:
    """The requests from `first` on, before which there are `decode_len` tokens each; those without tokens are left out."""
    parts, start = [], first * batch.decode_len
    states, nothing = batch.states, torch.zeros_like(batch.q_lens_cpu)
    pages, rows = (nothing if given is None else given for given in (states.checkpoints_cpu, states.checkpoint_rows_cpu))
    columns = batch.q_lens_cpu, batch.kv_lens_cpu, states.reads_cpu, states.writes_cpu, pages, rows
    for q_len, kv_len, read, write, page, before in zip(*(column[first:].tolist() for column in columns), strict=True):
        stop, fresh = start + q_len, kv_len == q_len
        if before:
            parts.append(RequestPart(start=start, stop=start + before, read=read, write=page, fresh=fresh))
            start, read, fresh = start + before, page, False
        if q_len:
            parts.append(RequestPart(start=start, stop=stop, read=read, write=write, fresh=fresh))
        start = stop
    return tuple(parts)
