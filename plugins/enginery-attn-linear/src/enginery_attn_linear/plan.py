"""What is computed on the host, once per batch: where each request's state is, and which requests begin."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from enginery.api import ForwardBatch, ForwardPlan


@dataclass(frozen=True, kw_only=True)
class RequestPart:
    """One request on its own: rows [start, stop) of the batch, and its state's pages. fresh: it begins with them, from zero."""

    start: int
    stop: int
    read: int
    write: int
    fresh: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeGroup:
    """Rows [0, B) of the batch, one token each. reads, writes: [B] int64, pages; fresh: [B] bool; device."""

    size: int
    reads: torch.Tensor
    writes: torch.Tensor
    fresh: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearPlan(ForwardPlan):
    """The requests of one token at the front as one group, everything else request by request."""

    group: DecodeGroup | None
    parts: tuple[RequestPart, ...]


def plan_group(batch: ForwardBatch, size: int, device: torch.device) -> DecodeGroup:
    """The first `size` requests, which have one token each."""
    columns = torch.stack((batch.states.reads_cpu[:size], batch.states.writes_cpu[:size], batch.kv_lens_cpu[:size] == 1))  # [3, B]
    columns = columns.long().pin_memory() if device.type == "cuda" else columns.long()
    reads, writes, fresh = columns.to(device, non_blocking=True)
    return DecodeGroup(size=size, reads=reads, writes=writes, fresh=fresh.bool())


def plan_parts(batch: ForwardBatch, first: int) -> tuple[RequestPart, ...]:
    """The requests from `first` on, before which there is one token each; those without tokens are left out."""
    parts, start = [], first
    columns = batch.q_lens_cpu, batch.kv_lens_cpu, batch.states.reads_cpu, batch.states.writes_cpu
    for q_len, kv_len, read, write in zip(*(column[first:].tolist() for column in columns), strict=True):
        if q_len:
            parts.append(RequestPart(start=start, stop=start + q_len, read=read, write=write, fresh=kv_len == q_len))
        start += q_len
    return tuple(parts)
