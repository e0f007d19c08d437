"""Which drafts are accepted: those that equal the target's own draw.

Each row of a verification is sampled exactly as a decoding row at its position is, from the same number. A draft is
accepted if it is the token that its parent's row gave, and only such tokens are told. So the tokens of a request depend neither on
the drafter nor on how many drafts there are; drafts decide how many a forward yields.

B requests, N rows each: a root and N - 1 drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class AcceptedRows(NamedTuple):
    """path: [B, N] int64, the rows whose draws are told, from the root; behind them the last one again. counts: [B] int64, drafts.

    The told tokens of request b are sampled[b, path[b, : counts[b] + 1]].
    """

    path: torch.Tensor
    counts: torch.Tensor


def accept(
    sampled: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor | None, num_drafts: torch.Tensor, *, depth: int | None = None
) -> AcceptedRows:
    """Walk from each root to the child whose token the row drew, as long as there is one.

    sampled: [B, N] int64, what each row drew. tokens: [B, N] int64, the rows' inputs: row 0 is the root. parents: [B, N] int64, the
    row before each draft, smaller than its own; None: a chain. num_drafts: [B] int64; rows behind them are padding. Of several
    children with that token the first is taken. depth: of a tree, no row has more before it; None: that is not known. Nothing waits
    for the device.
    """
    num_rows = tokens.shape[1]
    row = torch.arange(num_rows, device=tokens.device)
    if parents is None:
        matches = (tokens[:, 1:] == sampled[:, :-1]) & (row[:-1] < num_drafts[:, None])
        counts = matches.cumprod(1).sum(1)
        return AcceptedRows(torch.minimum(row, counts[:, None]), counts)
    is_draft = (row > 0) & (row <= num_drafts[:, None])  # [B, N]
    node = torch.zeros_like(num_drafts)  # [B]
    counts, path = torch.zeros_like(num_drafts), [node]
    depth = num_rows - 1 if depth is None else depth
    for _ in range(depth):
        drawn = sampled.gather(1, node[:, None])
        fits = is_draft & (parents == node[:, None]) & (tokens == drawn)
        found = fits.any(1)
        node = torch.where(found, fits.long().argmax(1), node)
        counts = counts + found
        path.append(node)
    return AcceptedRows(torch.stack(path + [node] * (num_rows - 1 - depth), 1), counts)
