"""What is computed on the host, once per batch, and uploaded in one piece: where rows begin, which pages, tiles of the convolution.

int32   [ first rows, B + 1 | reads, B | writes, B | tiles, 2 N ]      of the decoding requests, then of the others
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from enginery.api import ForwardBatch, ForwardPlan
from enginery_attn_delta.launch import CHUNK_ROWS, Rows

Ints = npt.NDArray[np.int32]
FROM_ZEROS = -1  # in place of the page that a beginning request's states would be read from


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaPlan(ForwardPlan):
    """decode: of the requests at the front of the batch that have one token each; prefill: of the others. None: there are none."""

    decode: Rows | None
    prefill: Rows | None

    @property
    def groups(self) -> tuple[Rows, ...]:
        """Those that there are."""
        return tuple(rows for rows in (self.decode, self.prefill) if rows is not None)


class Group:
    """Some consecutive requests of a batch, on the host; those without tokens are left out."""

    def __init__(self, batch: ForwardBatch, requests: slice, *, first_row: int) -> None:
        q_lens, kv_lens = (values[requests].numpy() for values in (batch.q_lens_cpu, batch.kv_lens_cpu))
        states, has_rows = batch.states, q_lens > 0
        self.reads = np.where(q_lens == kv_lens, FROM_ZEROS, states.reads_cpu[requests].numpy())[has_rows]
        self.writes = states.writes_cpu[requests].numpy()[has_rows]
        self.lengths = q_lens[has_rows]
        self.first_rows = first_row + np.concatenate(([0], np.cumsum(self.lengths)))
        self.tile_rows = 1 if bool((self.lengths == 1).all()) else CHUNK_ROWS
        counts = -(-self.lengths // self.tile_rows)
        request = np.repeat(np.arange(len(counts)), counts)
        begin = (np.arange(len(request)) - (np.cumsum(counts) - counts)[request]) * self.tile_rows
        self.tiles = np.stack((request, begin), axis=1)  # [N, 2]

    def packed(self) -> Ints:
        """All of it, as it is uploaded."""
        return np.concatenate((self.first_rows, self.reads, self.writes, self.tiles.reshape(-1))).astype(np.int32)

    def rows(self, uploaded: torch.Tensor) -> Rows:
        """uploaded: what `packed` gave, on the device."""
        count = len(self.lengths)
        first_rows, reads, writes, tiles = uploaded.split_with_sizes([count + 1, count, count, 2 * len(self.tiles)])
        return Rows(first_rows=first_rows, reads=reads, writes=writes, tiles=tiles.view(-1, 2), tile_rows=self.tile_rows)


def plan_rows(batch: ForwardBatch, device: torch.device) -> tuple[Rows | None, Rows | None]:
    """Of the decoding requests, and of the others."""
    count = batch.num_decode_requests if batch.decode_len == 1 else 0
    groups = [Group(batch, slice(0, count), first_row=0), Group(batch, slice(count, batch.num_requests), first_row=count)]
    packed = [group.packed() for group in groups]
    decode, prefill = upload(np.concatenate(packed), device).split_with_sizes([len(each) for each in packed])
    return (
        groups[0].rows(decode) if len(groups[0].lengths) else None,
        groups[1].rows(prefill) if len(groups[1].lengths) else None,
    )


def refresh(rows: Rows, batch: ForwardBatch) -> None:
    """Write the pages of another batch of one token a request to where a captured plan has them, in one copy."""
    group = Group(batch, slice(0, batch.num_requests), first_row=0)
    moves = torch.as_strided(rows.reads, (2 * len(rows.reads),), (1,))  # reads, then writes
    moves.copy_(host_ints(np.concatenate((group.reads, group.writes)), rows.reads.device), non_blocking=True)


def upload(values: Ints, device: torch.device) -> torch.Tensor:
    """Host values on the device, without waiting for it."""
    return host_ints(values, device).to(device, non_blocking=True)


def host_ints(values: Ints | npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """int32, pinned where the device copies from such."""
    host = torch.empty(len(values), dtype=torch.int32, pin_memory=device.type == "cuda")
    host.numpy()[:] = values
    return host
