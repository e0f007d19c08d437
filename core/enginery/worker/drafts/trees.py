"""Drafts that branch: how their rows lie, what each sees, and what becomes of those that stand.

    row        0    1    2    3    4      of one request: its last token, and guesses, each behind its parent
    parent          0    1    1    0
    position   p   p+1  p+2  p+2  p+1     by depth, so each draws with the number of its place
    slot       p   p+1  p+2  p+3  p+4     by row; if 0, 1 and 3 stand, row 3 is moved to p+2
    sees       what lies before p, the rows on its way from row 0, itself

What stands is moved before anything else reads it, so pages hold what plain decoding writes there. A draft model follows what
stands as if it had been a chain.

n items that verify, N rows each, of which D at the most lie one behind the other behind the first; T rows of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import torch

from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import FULL, ForwardBatch, View
from enginery.contracts.step import INT, Item, Items, StepInput
from enginery.kv.pool import PagedKVPool
from enginery.kv.upload import to_device
from enginery.speculate.combs import comb_parents


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
    write_seen(seen_of(parents_of(step)), batch, relay)


def write_seen(own: np.ndarray, batch: ForwardBatch, relay: BackendRelay) -> None:
    """The same of requests of which each row sees these, [n, N, N] bool; those behind them are chunks."""
    masks = relay.ask("verify_mask", plan=batch.plan)
    assert masks is not None, f"{relay.backend_id} claims trees of drafts, and has no masks for them"
    length, count = own.shape[1], max(part.requests.stop for part in masks.parts)
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
    return torch.cat((order[: path.numel()].view_as(path).gather(1, path).flatten(), order[path.numel() :]))


def move_standing(batch: ForwardBatch, path: torch.Tensor, right: torch.Tensor, pool: PagedKVPool) -> None:
    """Bring what is kept of the rows that stand to where the positions of their tokens are. path: [n, N], right: [n], device."""
    slots = batch.pages.slots[: path.numel()].view_as(path)
    row = torch.arange(path.shape[1], device=path.device)
    source = slots.gather(1, torch.where(row <= right[:, None], path, row))
    pool.move(source.flatten(), slots.flatten())


class CapturedComb(NamedTuple):
    """Of combs that a captured step verifies. parents: [requests, N] int64, device, the row before each. depth: D.

    path: [requests, N] int64, device, which rows stand, see `accept`: of the last replay.
    """

    parents: torch.Tensor
    depth: int
    path: torch.Tensor


def deepest(step: StepInput) -> int:
    """D, where drafts branch; 0 where none does."""
    return int(depths_of(step).max()) if step.parents else 0


def standing_in_comb(size: int, length: int, depth: int, siblings: int, batch: ForwardBatch, relay: BackendRelay) -> CapturedComb:
    """Of `size` combs that begin with `length` rows. What each row sees is written to where the backends look for it, for good."""
    own = np.array([0, *(1 + parent for parent in comb_parents(depth, siblings))], np.int64)[:length]
    parents = np.broadcast_to(own, (size, length))
    write_seen(seen_of(parents), batch, relay)
    there = torch.from_numpy(parents.copy()).to(batch.input_ids.device)
    return CapturedComb(there, depth, torch.zeros_like(there))


class Chain(NamedTuple):
    """rows: [T'] int64, of the step's rows those that stand, in front 1 + D of each item that verifies, then the others. ids,
    positions, slots: [T'] int64, of them, and of where they stand. All on the device."""

    rows: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


def standing_chain(batch: ForwardBatch, path: torch.Tensor, depth: int) -> Chain:
    """What stands, as if it had been drafted as a chain; it has been moved. path: [n, N], see `accept`. Device work only."""
    (count, length), device = path.shape, path.device
    begins = torch.arange(0, count * length, length, device=device)[:, None]
    others = torch.arange(count * length, batch.num_tokens, device=device)
    rows, places = (
        torch.cat(((begins + each).flatten(), others)) for each in (path[:, : 1 + depth], torch.arange(1 + depth, device=device))
    )
    ids, positions = (values.index_select(0, rows) for values in (batch.input_ids, batch.positions))
    return Chain(rows, ids, positions, batch.pages.slots.index_select(0, places))


def chain_batch(batch: ForwardBatch, chain: Chain, count: int, depth: int) -> ForwardBatch:
    """The step's batch with what stands of its `count` items that verify in place of their rows; unplanned."""
    fewer = (torch.arange(batch.num_requests) < count).int() * (batch.decode_len - 1 - depth)
    return ForwardBatch(
        phase=batch.phase,
        input_ids=chain.ids,
        positions=chain.positions,
        q_lens_cpu=batch.q_lens_cpu - fewer,
        kv_lens_cpu=batch.kv_lens_cpu - fewer,
        num_logits_cpu=batch.num_logits_cpu - fewer,
        seats_cpu=batch.seats_cpu,
        views={FULL: View(slots=chain.slots, page_table_cpu=batch.page_table_cpu)},
        decode_len=1 + depth,
    )


def chain_told(tokens: torch.Tensor, count: int, length: int, depth: int) -> torch.Tensor:
    """Of what was sampled of each row, [R], in the order in which it is told, that of the rows that stand: [R']."""
    own = tokens[: count * length].view(count, length)[:, : 1 + depth]
    return torch.cat((own.flatten(), tokens[count * length :]))


class Straight(NamedTuple):
    """A step as if what stands had been drafted as a chain. features: [T', ..], tokens: [R'], device, of its rows."""

    step: StepInput
    batch: ForwardBatch
    features: torch.Tensor
    tokens: torch.Tensor


def straightened(
    step: StepInput, batch: ForwardBatch, *, path: torch.Tensor, features: torch.Tensor, tokens: torch.Tensor
) -> Straight:
    """path: [n, N], see `accept`; features: [T, ..]; tokens: [R], in the order in which they are told."""
    count, depth = step.num_decode, deepest(step)
    chain = standing_chain(batch, path, depth)
    told = chain_told(tokens, count, step.decode_len, depth)
    return Straight(as_chain(step, depth), chain_batch(batch, chain, count, depth), features.index_select(0, chain.rows), told)


def as_chain(step: StepInput, depth: int) -> StepInput:
    """The step with so many drafts of each item, one behind the other, or as many as it has."""
    items = np.frombuffer(step.items, INT).reshape(-1, len(Item._fields)).copy()
    columns = Items(*items.T)
    kept = np.minimum(columns.num_drafts, depth)
    columns.num_tokens[:] -= columns.num_drafts - kept
    columns.pending[:] = np.minimum(columns.pending, np.where(columns.num_drafts > 0, kept, columns.pending))
    columns.num_drafts[:] = kept
    return msgspec.structs.replace(step, items=items.tobytes(), decode_len=1 + depth, parents=b"")
