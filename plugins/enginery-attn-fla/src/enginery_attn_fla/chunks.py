"""From what a layer gives `advance` to fla-core's chunked kernels. S rows of N requests, H value heads, K, V: dims of a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from enginery.api import RecurrentFacts, RecurrentWeights
from enginery_attn_delta.plan import FROM_ZEROS, Group
from enginery_attn_fla.delta_inputs import prepare_delta
from enginery_attn_fla.kernels import CHUNK, Kernels


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """Rows of N requests. rows: where they are in the batch: a slice, or [S] int64 where others lie between them.

    first_rows: [N + 1] int64, among these rows, on the device and on the host; reads, writes: [N] int64, pages; fresh: [N, 1, 1, 1]
    bool, of requests that begin from zeros and read none; indices: [chunks, 2] int64, of each chunk of `CHUNK` tokens the request
    and which of its chunks it is; offsets: [N + 1] int64, each request's first chunk; device.
    """

    rows: slice | torch.Tensor
    first_rows: torch.Tensor
    first_rows_cpu: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor
    fresh: torch.Tensor
    indices: torch.Tensor
    offsets: torch.Tensor


def chunk_places(lengths: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices and offsets, see `Chunks`. lengths: [N], tokens of each request."""
    counts = -(-lengths // CHUNK)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    request = np.repeat(np.arange(len(lengths)), counts)
    return np.stack([request, np.arange(len(request)) - offsets[request]], axis=1), offsets


def plan_chunks(group: Group, device: torch.device) -> Chunks:
    """The rows of a group, one upload, from pinned memory. Its parts begin at multiples of 16 bytes: kernels are compiled anew for
    a tensor that does not.
    """
    lengths = group.lengths.astype(np.int64)
    fresh = group.reads == FROM_ZEROS
    first_rows = np.concatenate(([0], np.cumsum(lengths)))
    begins, ends = group.first_rows, group.first_rows + group.lengths
    scattered = bool((begins[1:] != ends[:-1]).any())
    of_batch = np.arange(first_rows[-1]) + (begins - first_rows[:-1]).repeat(lengths) if scattered else np.zeros(0, np.int64)
    indices, offsets = chunk_places(lengths)
    reads = np.where(fresh, group.writes, group.reads)  # a page that is there; it is cleared
    parts = (first_rows, reads, group.writes, fresh, offsets, indices.reshape(-1), of_batch)
    room = [len(part) + len(part) % 2 for part in parts]
    host = torch.zeros(sum(room), dtype=torch.int64, pin_memory=device.type == "cuda")
    for place, part in zip(host.split_with_sizes(room), parts, strict=True):
        place.numpy()[: len(part)] = part
    there = host.to(device, non_blocking=True).split_with_sizes(room)
    on_device = [place[: len(part)] for place, part in zip(there, parts, strict=True)]
    return Chunks(
        rows=on_device[6] if scattered else slice(int(begins[0]), int(ends[-1])),
        first_rows=on_device[0],
        first_rows_cpu=torch.from_numpy(first_rows.astype(np.int64)),
        reads=on_device[1],
        writes=on_device[2],
        fresh=on_device[3].bool().view(-1, 1, 1, 1),
        indices=on_device[5].view(-1, 2),
        offsets=on_device[4],
    )


def run_chunks(
    kernels: Kernels,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    facts: RecurrentFacts,
    weights: RecurrentWeights,
    *,
    chunks: Chunks,
    matrix: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """mixed: [S, C], after the convolution; gates: [S, G]; matrix: [pages, H, V, K] float32, of which the write pages are written.

    Returns [S, H, V].
    """
    given: dict[str, Any] = {
        "scale": scale,
        "initial_state": matrix.index_select(0, chunks.reads).masked_fill_(chunks.fresh, 0.0),
        "cu_seqlens": chunks.first_rows,
        "cu_seqlens_cpu": chunks.first_rows_cpu,
        "chunk_indices": chunks.indices,
        "chunk_offsets": chunks.offsets,
    }
    q, k, v, log_decay, beta = prepare_delta(mixed, gates, facts, weights)
    kernel = kernels.kda if facts.decay == "channel" else kernels.gated_delta_rule
    made, after = kernel(q, k, v, g=log_decay, beta=beta, **given)
    matrix.index_copy_(0, chunks.writes, after)
    return made[0] if weights.skip is None else made[0] + (weights.skip[:, None] * v[0]).to(made.dtype)
