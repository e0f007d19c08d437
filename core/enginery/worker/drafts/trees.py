"""Drafts that branch: how their rows lie, what each sees, and what becomes of those that stand.

    row        0    1    2    3    4      of one request: its last token, and guesses, each behind its parent
    parent          0    1    1    0
    position   p   p+1  p+2  p+2  p+1     by depth, so each draws with the number of its place
    slot       p   p+1  p+2  p+3  p+4     by row; if 0, 1 and 3 stand, row 3 is moved to p+2
    sees       what lies before p, the rows on its way from row 0, itself

What stands is moved before anything else reads it, so pages hold what plain decoding writes there.

n items that verify, N rows each.
"""

from __future__ import annotations

import numpy as np
import torch

from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import FULL, ForwardBatch, View
from enginery.contracts.step import INT, StepInput
from enginery.kv.pool import PagedKVPool
from enginery.kv.upload import to_device


def parents_of(step: StepInput) -> np.ndarray:
    """The row before each row: [n, N] int64; 0 for the first, and for padding."""
    counts = step.columns().num_drafts[: step.num_decode]
    parents = np.zeros((len(counts), step.decode_len), np.int64)
    place = np.arange(step.decode_len)
    parents[(place > 0) & (place <= counts[:, None])] = np.frombuffer(step.parents, INT)
    return parents


def depths_of(step: StepInput) -> np.ndarray:
    """How many drafts lead to each row, itself counted: [n, N] int64; 0 for the first, and for padding."""
    parents, counts = parents_of(step), step.columns().num_drafts[: step.num_decode]
    depths = np.zeros_like(parents)
    for row in range(1, step.decode_len):
        depths[:, row] = (depths[np.arange(len(depths)), parents[:, row]] + 1) * (row <= counts)
    return depths


def ways_of(step: StepInput) -> list[list[list[int]]]:
    """Of each item that verifies, for each of its drafts, the rows from the first draft to itself."""
    found = []
    for parents, count in zip(parents_of(step).tolist(), step.columns().num_drafts[: step.num_decode].tolist(), strict=True):
        ways: list[list[int]] = [[]]
        for row in range(1, 1 + count):
            ways.append([*ways[parents[row]], row])
        found.append(ways[1:])
    return found


def seen_of(parents: np.ndarray) -> np.ndarray:
    """Which of the N rows each of them sees: [n, N, N] bool."""
    count, num_rows = parents.shape
    seen = np.zeros((count, num_rows, num_rows), bool)
    for row in range(num_rows):
        seen[:, row] = seen[np.arange(count), parents[:, row]]
        seen[:, row, row] = True
    return seen


def write_masks(step: StepInput, batch: ForwardBatch, relay: BackendRelay) -> None:
    """Write what each row sees to where the backends look for it. batch: planned. Nothing waits for the device."""
    if not step.parents:
        return
    masks = relay.ask("verify_mask", plan=batch.plan)
    assert masks is not None, f"{relay.backend_id} claims trees of drafts, and has no masks for them"
    own, length, count = seen_of(parents_of(step)), step.decode_len, max(part.requests.stop for part in masks.parts)
    chunks = np.broadcast_to(np.tri(length, dtype=bool), (max(0, count - len(own)), length, length))  # as long as what verifies
    seen = torch.from_numpy(np.concatenate((own, chunks)))
    written = np.zeros(len(seen), bool)
    for requests, buffer in masks.parts:
        buffer.copy_(to_device(seen[requests], buffer.device))
        written[requests] = True
    assert written[: len(own)].all(), f"{relay.backend_id} has no masks for all requests that verify"


def standing_first(path: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The rows that are sampled, [num_rows] int64, in the order in which they are told. path: [n, N], of the requests in front."""
    order = torch.arange(num_rows, device=path.device)
    own = order[: path.numel()].view_as(path)
    return torch.cat((own.gather(1, path).flatten(), order[path.numel() :]))


def move_standing(batch: ForwardBatch, path: torch.Tensor, right: torch.Tensor, pool: PagedKVPool) -> None:
    """Bring what is kept of the rows that stand to where the positions of their tokens are. path: [n, N], right: [n], device."""
    view = batch.views[FULL]
    assert isinstance(view, View), "full pages have slots"
    slots = view.slots[: path.numel()].view_as(path)
    row = torch.arange(path.shape[1], device=path.device)
    source = slots.gather(1, torch.where(row <= right[:, None], path, row))
    pool.move(source.flatten(), slots.flatten())
