"""What is computed on the host, once per batch, and uploaded in one piece: where rows begin, which pages, tiles of the convolution.

int32   [ first rows, B | stop rows, B | reads, B | writes, B | tiles, 2 N ]      of one group of requests after the other
Groups of one token each have no tiles, but for rows behind checkpoints.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from enginery.api import ForwardBatch, ForwardPlan, PlanKey
from enginery_attn_delta.launch import CHUNK_ROWS, Rows, can_chain

Ints = npt.NDArray[np.int32]
FROM_ZEROS = -1  # in place of the page that a beginning request's states would be read from
NOWHERE = -1  # in place of the page that a state would be written to


@dataclass(frozen=True, kw_only=True, eq=False)
class Verified:
    """The leading requests, which verify drafts. rows: as they are advanced, and states stay.

    pages: [B] int32, where their states go. marked: the rows before checkpoints, of `requests` [N], written to their pages; None:
    there are none. Of a captured plan they are all requests', without rows and pages where there is no checkpoint.
    """

    rows: Rows
    pages: torch.Tensor
    requests: torch.Tensor
    marked: Rows | None

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.pages)

    def standing(self, counts: torch.Tensor) -> list[Rows]:
        """The rows by which states move on, checkpoints first: those read what the others write. counts: [B] int64, device."""
        stands = (counts + 1).int()
        moved = dataclasses.replace(self.rows, stop_rows=self.rows.first_rows + stands, writes=self.pages)
        if self.marked is None:
            return [moved]
        after = self.marked.stop_rows - self.marked.first_rows
        kept = torch.where(stands.index_select(0, self.requests) >= after, self.marked.writes, NOWHERE)
        return [dataclasses.replace(self.marked, writes=kept), moved]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaPlan(ForwardPlan):
    """decode: of the requests at the front of the batch that have one token each; verified: of those there that verify drafts;
    prefill: of the others, up to their checkpoints; rest: the rows behind these, which read what the others write. None: there are
    none. uploaded: what all of it is views of, int32.
    """

    decode: Rows | None
    prefill: Rows | None
    rest: Rows | None
    verified: Verified | None
    uploaded: torch.Tensor

    @property
    def leading(self) -> tuple[Rows, ...]:
        """Of the requests at the front, if there are any."""
        verified = None if self.verified is None else self.verified.rows
        return tuple(rows for rows in (self.decode, verified) if rows is not None)

    @property
    def prompts(self) -> tuple[Rows, ...]:
        """Of the others, if there are any."""
        return tuple(rows for rows in (self.prefill, self.rest) if rows is not None)


class Group:
    """Some requests of a batch, on the host: the first row of each, how many it has, and its pages; [B].

    room: [B], for how many rows there are tiles; None: as many as there are. follows: their states are written in the same step,
    which kernels for one token each do not wait for.
    """

    def __init__(
        self, first_rows: Ints, lengths: Ints, reads: Ints, writes: Ints, *, room: Ints | None = None, follows: bool = False
    ) -> None:
        self.first_rows, self.lengths, self.reads, self.writes = first_rows, lengths, reads, writes
        tiled = lengths if room is None else room
        self.tiles = None if bool((tiled == 1).all()) and not follows else _tiles_of(tiled)

    @classmethod
    def of(cls, batch: ForwardBatch, requests: slice, *, first_row: int) -> Group:
        """Consecutive ones; those without tokens are left out."""
        q_lens = batch.q_lens_cpu[requests].numpy()
        has_rows = q_lens > 0
        reads, writes = (pages[requests][has_rows] for pages in moves_of(batch))
        lengths = q_lens[has_rows]
        first_rows = (first_row + np.cumsum(lengths) - lengths).astype(np.int32)
        return cls(first_rows, lengths, reads, writes)

    def cut(self, rows: Ints, pages: Ints) -> tuple[Group, Group]:
        """Up to checkpoints, and those rows behind them that there are: pages get states after so many rows, 0: none; [B]."""
        is_cut = rows > 0
        before = Group(self.first_rows, np.where(is_cut, rows, self.lengths), self.reads, np.where(is_cut, pages, self.writes))
        first_rows, lengths = self.first_rows + rows, self.lengths - rows
        return before, Group(first_rows[is_cut], lengths[is_cut], pages[is_cut], self.writes[is_cut], follows=True)

    def packed(self) -> Ints:
        """All of it, as it is uploaded."""
        tiles = () if self.tiles is None else (self.tiles.reshape(-1),)
        return np.concatenate((self.first_rows, self.first_rows + self.lengths, self.reads, self.writes, *tiles)).astype(np.int32)

    def rows(self, uploaded: torch.Tensor) -> Rows:
        """uploaded: what `packed` gave, on the device."""
        count = len(self.lengths)
        first_rows, stop_rows, reads, writes, tiles = uploaded.split_with_sizes([count] * 4 + [len(uploaded) - 4 * count])
        return Rows(
            first_rows=first_rows,
            stop_rows=stop_rows,
            reads=reads,
            writes=writes,
            tiles=None if self.tiles is None else tiles.view(-1, 2),
            longest=int(self.lengths.max(initial=0)),
            chained=can_chain(uploaded.device),
        )


def _tiles_of(lengths: Ints) -> Ints:
    """Request and first token of each, [N, 2]."""
    counts = -(-lengths // CHUNK_ROWS)
    request = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    begin = (np.arange(len(request)) - (np.cumsum(counts) - counts)[request]) * CHUNK_ROWS
    return np.stack((request, begin.astype(np.int32)), axis=1)


def moves_of(batch: ForwardBatch) -> tuple[Ints, Ints]:
    """The page that each request's state is read from, or `FROM_ZEROS`, and the one that it is written to: [B] int32 both."""
    begins: npt.NDArray[np.bool_] = batch.q_lens_cpu.numpy() == batch.kv_lens_cpu.numpy()
    return np.where(begins, FROM_ZEROS, batch.states.reads_cpu.numpy()), batch.states.writes_cpu.numpy()


def plan_rows(batch: ForwardBatch, key: PlanKey, device: torch.device) -> DeltaPlan:
    """Of the requests that decode, that verify drafts, and of the others."""
    groups = _groups(batch, capture=key.capture)
    packed = [group.packed() for group in groups]
    uploaded = upload(np.concatenate(packed), device)
    there = uploaded.split_with_sizes([len(each) for each in packed])
    leading, others, rest, *verifying = (group.rows(part) for group, part in zip(groups, there, strict=True))
    verified = None
    if verifying:
        still, marked = verifying
        requests = marked.first_rows // batch.decode_len
        verified = Verified(rows=still, pages=leading.writes, requests=requests, marked=marked if len(requests) else None)
    decodes = verified is None and len(leading.reads) > 0
    return DeltaPlan(
        key=key,
        decode=leading if decodes else None,
        prefill=others if len(others.reads) else None,
        rest=rest if len(rest.reads) else None,
        verified=verified,
        uploaded=uploaded,
    )


def _groups(batch: ForwardBatch, *, capture: bool) -> list[Group]:
    """The leading requests and both parts of the others; where the leading ones verify drafts, these twice more: as they are
    advanced, without pages to write to, and up to their checkpoints. capture: of a plan that is captured, whose sizes are always
    the same.
    """
    count, length = batch.num_decode_requests, batch.decode_len
    leading = Group.of(batch, slice(0, count), first_row=0)
    groups = [leading, *prompts_of(batch)]
    if length == 1 or not count:
        return groups
    still = Group(leading.first_rows, leading.lengths, leading.reads, np.full_like(leading.writes, NOWHERE))
    return [*groups, still, _marked(batch, leading, every=capture)]


def prompts_of(batch: ForwardBatch) -> tuple[Group, Group]:
    """The requests behind the leading ones: up to their checkpoints or to their ends, and the rows behind checkpoints."""
    requests = slice(batch.num_decode_requests, batch.num_requests)
    whole, states = Group.of(batch, requests, first_row=requests.start * batch.decode_len), batch.states
    rows, pages = np.zeros_like(whole.lengths), whole.writes
    if states.checkpoints_cpu is not None and states.checkpoint_rows_cpu is not None:
        has_rows = batch.q_lens_cpu[requests].numpy() > 0
        rows, pages = (given[requests].numpy()[has_rows] for given in (states.checkpoint_rows_cpu, states.checkpoints_cpu))
    return whole.cut(rows, pages)


def _marked(batch: ForwardBatch, leading: Group, *, every: bool) -> Group:
    """Requests with the rows before their checkpoints; every: also those that have none, with no rows."""
    pages, rows = batch.states.checkpoints_cpu, batch.states.checkpoint_rows_cpu
    count = len(leading.lengths)
    after = np.zeros(count, np.int32) if rows is None else rows[:count].numpy()
    kept = np.full(count, NOWHERE, np.int32) if pages is None else np.where(after > 0, pages[:count].numpy(), NOWHERE)
    reads = np.where(after > 0, leading.reads, FROM_ZEROS)
    if every:
        return Group(leading.first_rows, after, reads, kept, room=leading.lengths)
    chosen = np.flatnonzero(after)
    return Group(leading.first_rows[chosen], after[chosen], reads[chosen], kept[chosen])


def refresh(plan: DeltaPlan, batch: ForwardBatch) -> None:
    """Write the pages of another batch of as many requests and rows to where a captured plan has them, in one copy."""
    if plan.decode is not None:
        moves = torch.as_strided(plan.decode.reads, (2 * len(plan.decode.reads),), (1,))  # reads, then writes
        values = np.concatenate(moves_of(batch))
    else:
        moves, values = plan.uploaded, np.concatenate([group.packed() for group in _groups(batch, capture=True)])
    moves.copy_(host_ints(values, moves.device), non_blocking=True)


def upload(values: Ints, device: torch.device) -> torch.Tensor:
    """Host values on the device, without waiting for it."""
    return host_ints(values, device).to(device, non_blocking=True)


def host_ints(values: Ints | npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """int32, pinned where the device copies from such."""
    host = torch.empty(len(values), dtype=torch.int32, pin_memory=device.type == "cuda")
    host.numpy()[:] = values
    return host
