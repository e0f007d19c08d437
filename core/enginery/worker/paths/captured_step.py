"""One captured decoding step: what it reads and leaves, where its rows begin, and what becomes of the drafts that it verifies.

How many guesses of the step before are right is not told yet where one that verifies is launched:

    host      lays each request out where it begins if all that may be wrong are: `behind` positions before the item's start
              slots     [ s0 s1 s2 s3 | s4 s5 s6 s7 ]   of its rows there, and of as many positions behind them
    device    moved     = behind - wrong                of the step before, by seat
              positions + moved, slots[moved : moved + L], kv_lens behind the last row

Its plan is for the longest lengths that there may be. R requests of L rows each, T = R L; P columns of the page table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from enginery.attention.axes import renewed
from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import FULL, ForwardBatch, View
from enginery.contracts.plan import Accepted
from enginery.worker.drafts.trees import CapturedComb, move_standing
from enginery.worker.paths.results import StepParts

_log: Final = logging.getLogger(__name__)


class Replayable(Protocol):
    """A captured piece of device work."""

    def replay(self) -> None:
        """Launch the captured work again, on the current stream."""


Capture = Callable[[Callable[[], None]], Replayable]
Head = Callable[[torch.Tensor], "HeadResults"]  # of hidden states, [T, C]; its results stay where they are until the next replay
NumGuesses = Callable[[int], int]  # of each of so many requests, with which a load of them begins


def takes_graphs(relay: BackendRelay, most: int, *, what: str) -> bool:
    """Whether backends can be captured for so many rows; if not, the log says that `what` runs eagerly."""
    if relay.ask("init_graph_state", max_batch_size=most, max_num_tokens=most) is not None:
        return True
    _log.info("%s runs eagerly: %s has no init_graph_state", what, relay.backend_id)
    return False


class HeadResults(NamedTuple):
    """What a head makes of the hidden states of rows. best: tokens, [T] int64. marked: the same, `NAN_TOKEN` where their logits are
    NaN. logits: [T, V], of several ranks this one's columns. largest: [T], those of the best tokens, where NaN is to be looked for
    on the host. hidden: [T, C], where somebody takes it; there is no other of a step without a head."""

    best: torch.Tensor | None = None
    marked: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    largest: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedStep:
    """packed: [fields + 2, T] int64, device: the token fields, the sources, and in its first places the seats of what is sampled.
    Of a step that verifies, [fields + 4, T]: the slots behind its rows (`move_on`), and, before the sources, in its first places,
    how many drafts each request has and then how far behind its earliest place it may begin. seats: the seats there, where the
    next step finds what this one samples: [requests] int64, device.

    batch: planned, its token fields in `packed`. made: valid from a replay to the next one of any size. So are accepted, [requests]
    int64, of a step that verifies: how many drafts are the best tokens; and standing, of one that verifies combs, which rows these
    are. followed: whether a draft model finds what it takes. moving: moves recurrent states by as many drafts as `accepted` says,
    or what is kept of the rows that stand; None: there is nothing to move, or nothing is verified. moved: [requests] int64, of a
    step whose rows begin where the device finds: how far behind its earliest place each does.
    """

    packed: torch.Tensor
    seats: torch.Tensor
    batch: ForwardBatch
    graph: Replayable
    made: HeadResults
    followed: bool = False
    accepted: torch.Tensor | None = None
    standing: CapturedComb | None = None
    moving: Replayable | None = None
    moved: torch.Tensor | None = None

    def keep_accepted(self, right: torch.Tensor, path: torch.Tensor | None = None) -> None:
        """Move states behind so many drafts of each request that has some, or the rows that stand: [n] and [n, N] int64, device.
        What a draft model does as a graph reads `accepted` too.
        """
        assert self.accepted is not None, "the step verifies drafts"
        if self.moving is None and not self.followed:
            return
        if right.data_ptr() != self.accepted.data_ptr():
            self.accepted[: len(right)].copy_(right)
        if self.standing is not None and path is not None and path.data_ptr() != self.standing.path.data_ptr():
            self.standing.path[: len(path)].copy_(path)
        if self.moving is not None:
            self.moving.replay()


def captured_moving(
    parts: StepParts, batch: ForwardBatch, accepted: torch.Tensor, standing: CapturedComb | None, *, capture: Capture
) -> Replayable | None:
    """Moves states behind so many drafts of each request of a captured batch, [requests] int64, device, or rows that stand.

    Which is found in each replay. None: there is nothing to move.
    """
    relay, pool = parts.relay, parts.pool
    if standing is not None:
        path = standing.path
        return capture(lambda: move_standing(batch, path, accepted, pool))
    if all(layer.recurrent is None for layer in pool.geometry.layers):
        return None

    def move() -> None:
        done = relay.ask("commit_state", plan=batch.plan, accepted=Accepted(counts=accepted))
        assert done is not None, "a backend of recurrent layers that verifies commits states"

    return capture(move)


def at_the_earliest(batch: ForwardBatch, behind: int, *, page_size: int) -> tuple[ForwardBatch, torch.Tensor]:
    """A batch that verifies with its rows `behind` positions before where they are, and the slots behind those; host, [T] int64."""
    count, length, view = batch.num_requests, batch.decode_len, batch.pages
    begins = batch.kv_lens_cpu.numpy().astype(np.int64) - length - behind
    places = np.maximum(begins[:, None] + np.arange(2 * length), 0)
    columns, offsets = np.divmod(places, page_size)
    table = view.page_table_cpu.numpy()
    pages = table[np.arange(count)[:, None], np.minimum(columns, table.shape[1] - 1)].astype(np.int64)  # [R, 2 L]
    slots, positions = pages * page_size + offsets, np.maximum(batch.positions.numpy() - behind, 0)
    there = View(slots=torch.from_numpy(slots[:, :length].ravel()), page_table_cpu=view.page_table_cpu)
    earlier = renewed(batch, positions=torch.from_numpy(positions), views={**batch.views, FULL: there})
    return earlier, torch.from_numpy(slots[:, length:].ravel())


def move_on(
    batch: ForwardBatch, later: torch.Tensor, *, behind: torch.Tensor, wrong: torch.Tensor, out: torch.Tensor, most_positions: int
) -> None:
    """Bring the batch's rows to where they begin: its positions, slots and `kv_lens` are written. Device work only.

    later: [T], see `at_the_earliest`. behind: [R] int64, 0 of a request that is where it begins. wrong: [R] int64, of its guesses
    in the step before. out: [R] int64, how far it was moved. most_positions: what lies further is a row that nobody is told.
    """
    shape = batch.num_requests, batch.decode_len
    slots, positions = batch.pages.slots.view(shape), batch.positions.view(shape)
    moved = torch.clamp(behind - wrong, min=0, out=out)[:, None]
    places = torch.arange(shape[1], device=moved.device) + moved
    torch.gather(torch.cat((slots, later.view(shape)), 1), 1, places, out=slots)
    positions.add_(moved).clamp_(max=most_positions - 1)
    torch.add(positions[:, 0], shape[1], out=batch.kv_lens)
