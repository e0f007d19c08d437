"""What is computed on the host, once per batch: which memory each request reads, and who may see what.

B requests of a group, L tokens of the longest, P its pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from enginery.api import ForwardBatch, ForwardPlan

Window = int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestPart:
    """One request on its own: rows [start, stop) of the batch against its `kv_len` tokens.

    first_slot: where its tokens lie in one run, else None and `pages` [P] lists its pages. masks: per window, what each row may
    see, [stop - start, kv_len] bool, or None where causality alone decides. tree: [N, N] bool, in place of all masks, which of the
    last N keys each of its N rows sees.
    """

    start: int
    stop: int
    kv_len: int
    first_slot: int | None
    pages: torch.Tensor
    masks: Mapping[Window, torch.Tensor | None]
    causal: bool
    tree: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeGroup:
    """Rows [0, B) of the batch, one token each, padded to the longest: pages [B, P], masks [B, L] bool per window."""

    size: int
    pages: torch.Tensor
    masks: Mapping[Window, torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchPlan(ForwardPlan):
    """The decoding requests as one group if they are several, everything else request by request.

    trees: [requests, N, N] bool, device, written after planning, of requests whose drafts may branch; None: there are none.
    """

    group: DecodeGroup | None
    parts: tuple[RequestPart, ...]
    trees: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Planner:
    """What planning needs beside the batch. windows: all that occur in the model's layers."""

    page_size: int
    windows: tuple[Window, ...]
    device: torch.device

    def group(self, batch: ForwardBatch, size: int) -> DecodeGroup:
        """The first `size` requests of the batch, which have one token each."""
        kv_lens = batch.kv_lens_cpu[:size, None].long()  # [B, 1]
        num_pages = -(-int(kv_lens.max()) // self.page_size)
        owned = torch.arange(num_pages) * self.page_size < kv_lens  # [B, P]
        pages = torch.where(owned, batch.page_table_cpu[:size, :num_pages].long(), 0)
        keys = torch.arange(num_pages * self.page_size)  # [L]
        masks = {window: self._seen(keys, kv_lens - 1, window) for window in self.windows}  # [B, L]
        return DecodeGroup(size=size, pages=self._on_device(pages), masks=masks)

    def trees(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Room for what the rows of the batch's trees see; None if it has none."""
        if not batch.trees:
            return None
        return torch.empty(batch.num_decode_requests, batch.decode_len, batch.decode_len, dtype=torch.bool, device=self.device)

    def part(self, batch: ForwardBatch, row: int, *, start: int, tree: torch.Tensor | None = None) -> RequestPart:
        """Request `row`, whose first token is row `start` of the batch."""
        q_len, kv_len = int(batch.q_lens_cpu[row]), int(batch.kv_lens_cpu[row])
        pages = batch.page_table_cpu[row, : -(-kv_len // self.page_size)].long()
        in_one_run = bool((pages.diff() == 1).all())
        queries = torch.arange(kv_len - q_len, kv_len)[:, None]  # [S, 1], positions
        keys = torch.arange(kv_len)
        masks: dict[Window, torch.Tensor | None] = {}
        for window in self.windows:
            sees_all = window is None or kv_len <= window
            needs_none = (sees_all and q_len in (1, kv_len)) or tree is not None
            masks[window] = None if needs_none else self._seen(keys, queries, window)
        return RequestPart(
            start=start,
            stop=start + q_len,
            kv_len=kv_len,
            first_slot=int(pages[0]) * self.page_size if in_one_run else None,
            pages=self._on_device(pages),
            masks=masks,
            causal=q_len > 1,
            tree=tree,
        )

    def _seen(self, keys: torch.Tensor, positions: torch.Tensor, window: Window) -> torch.Tensor:
        return self._on_device(visible(keys, positions, window))

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)


def visible(keys: torch.Tensor, positions: torch.Tensor, window: Window) -> torch.Tensor:
    """Whether the query at each position sees each key: [rows, keys] bool."""
    found = keys <= positions
    return found if window is None else found & (keys > positions - window)
