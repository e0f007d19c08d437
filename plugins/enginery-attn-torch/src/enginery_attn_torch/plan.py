"""What is computed on the host, once per batch: which memory each request reads, and who may see what.

B requests of a group, L tokens of the longest, P its pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from enginery.api import ForwardBatch, ForwardPlan

Window = int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestPart:
    """One request on its own: rows [start, stop) of the batch against its `kv_len` tokens.

    first_slot: where its tokens lie in one run, else None and `pages` [P] lists its pages. masks: per window, what each row may see,
    [stop - start, kv_len] bool, or None where causality alone decides.
    """

    start: int
    stop: int
    kv_len: int
    first_slot: int | None
    pages: torch.Tensor
    masks: Mapping[Window, torch.Tensor | None]
    causal: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeGroup:
    """Rows [0, B) of the batch, one token each, padded to the longest: pages [B, P], masks [B, L] bool per window."""

    size: int
    pages: torch.Tensor
    masks: Mapping[Window, torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchPlan(ForwardPlan):
    """The decoding requests as one group if they are several, everything else request by request."""

    group: DecodeGroup | None
    parts: tuple[RequestPart, ...]


def decode_group(batch: ForwardBatch, size: int, *, page_size: int, windows: Iterable[Window], device: torch.device) -> DecodeGroup:
    """The first `size` requests of the batch, which have one token each."""
    kv_lens = batch.kv_lens_cpu[:size].long()
    num_pages = -(-int(kv_lens.max()) // page_size)
    owned = torch.arange(num_pages) * page_size < kv_lens[:, None]  # [B, P]
    pages = torch.where(owned, batch.page_table_cpu[:size, :num_pages].long(), 0)
    keys = torch.arange(num_pages * page_size)  # [L]
    masks: dict[Window, torch.Tensor] = {}
    for window in windows:
        seen = keys < kv_lens[:, None]
        if window is not None:
            seen &= keys >= kv_lens[:, None] - window
        masks[window] = seen.to(device, non_blocking=True)
    return DecodeGroup(size=size, pages=pages.to(device, non_blocking=True), masks=masks)


def request_part(
    batch: ForwardBatch, row: int, start: int, *, page_size: int, windows: Iterable[Window], device: torch.device
) -> RequestPart:
    """Request `row`, whose first token is row `start` of the batch."""
    q_len, kv_len = int(batch.q_lens_cpu[row]), int(batch.kv_lens_cpu[row])
    pages = batch.page_table_cpu[row, : -(-kv_len // page_size)].long()
    in_one_run = bool((pages.diff() == 1).all())
    queries = torch.arange(kv_len - q_len, kv_len)[:, None]  # positions
    keys = torch.arange(kv_len)
    masks: dict[Window, torch.Tensor | None] = {}
    for window in windows:
        hides = window is not None and kv_len > window
        if not hides and (q_len == 1 or q_len == kv_len):
            masks[window] = None
            continue
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        masks[window] = seen.to(device, non_blocking=True)
    return RequestPart(
        start=start,
        stop=start + q_len,
        kv_len=kv_len,
        first_slot=int(pages[0]) * page_size if in_one_run else None,
        pages=pages.to(device, non_blocking=True),
        masks=masks,
        causal=q_len > 1,
    )
